# SPDX-License-Identifier: Apache-2.0
"""When an engine that answers its health checks but fails requests gets none for a while. No I/O, no clock."""

from __future__ import annotations

from random import Random

FAILURES = 5
"""Failures of one cause in a row that open an engine's circuit."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
_MOST_DOUBLINGS = 10
BUDGET = 0.2
"""Retries for each request, on average."""
DEATHS = ("connect", "died", "unhealthy", "aborted")
"""Causes with which an engine is gone."""
SAVED = 10.0
"""Retries that may come at once after a quiet time."""


class Circuit:
    """Counts one engine's failures by cause.

    Closed, it lets everything pass. Once a cause has come `FAILURES` times without a success in between it opens: the
    engine gets nothing for a pause. Then it is half open: one request may try. If that fails, the pause doubles.
    """

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()
        self._failures: dict[str, int] = {}
        self._pauses = 0
        self._until_s = 0.0
        self._probing = False

    @property
    def cause(self) -> str:
        """Why it is open or half open; empty: it is closed."""
        return max(self._failures, key=lambda cause: self._failures[cause]) if self._pauses else ""

    def lets_pass(self, now_s: float) -> bool:
        """Whether the engine may get a request now."""
        return not self._pauses or (now_s >= self._until_s and not self._probing)

    def sent(self) -> None:
        """The engine gets a request. Half open, that is the one that tries."""
        self._probing = self._pauses > 0

    def succeeded(self) -> None:
        """It answered: everything is forgotten."""
        self._failures.clear()
        self._pauses, self._probing = 0, False

    def given_up(self) -> None:
        """A request ended and says nothing of the engine: the client left, or the engine had no room."""
        self._probing = False

    def failed(self, cause: str, now_s: float) -> bool:
        """It failed a request. Returns whether the circuit has opened by that."""
        self._failures[cause] = self._failures.get(cause, 0) + 1
        half_open, self._probing = self._pauses > 0 and now_s >= self._until_s, False
        if not half_open and (self._pauses or self._failures[cause] < FAILURES):
            return False
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._pauses)
        # An engine may fail for days: 2**1024 is no float any more.
        self._pauses = min(self._pauses + 1, _MOST_DOUBLINGS)
        # Several routers that saw the same failures must not all come back at once.
        self._until_s = now_s + pause_s * self._random.uniform(0.5, 1.0)
        return True


class RetryBudget:
    """Retries at most a fifth of all requests, so that failing engines are not asked all the more."""

    def __init__(self) -> None:
        self._left = SAVED

    def request(self) -> None:
        """A request has come."""
        self._left = min(SAVED, self._left + BUDGET)

    def allows(self, cause: str) -> bool:
        """Whether one more retry is allowed after a failure of this cause; it counts if so.

        An engine that dies fails all its requests at once, and none again. Their retries are always allowed.
        """
        if cause in DEATHS:
            return True
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
