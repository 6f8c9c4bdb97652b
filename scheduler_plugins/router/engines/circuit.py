# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker: an engine that answers health checks but fails requests gets a pause. No I/O, no clock."""

from __future__ import annotations

from random import Random

from pd_connector.pauses import doubled_s

FAILURES = 5
"""An engine's circuit opens after this many failures of one cause in a row."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
BUDGET = 0.2
"""Most retries per request, on average."""
DEATHS = ("connect", "died", "unhealthy", "aborted")
"""Causes that mean that the engine is gone."""
SAVED = 10.0
"""Most retries that may come at once after a quiet time."""


class Circuit:
    """Counts one engine's failures by cause.

    A closed circuit lets everything pass. It opens after `FAILURES` failures of one cause without a success in
    between; then the engine gets nothing for a pause. After the pause it is half open: one request may try. If that
    request fails, the pause doubles.
    """

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()
        self._failures: dict[str, int] = {}
        self._pauses = 0
        self._until_s = 0.0
        self._probing = False

    @property
    def cause(self) -> str:
        """Why the circuit is open or half open; empty: it is closed."""
        return max(self._failures, key=lambda cause: self._failures[cause]) if self._pauses else ""

    def lets_pass(self, now_s: float) -> bool:
        """Whether the engine may get a request now."""
        return not self._pauses or (now_s >= self._until_s and not self._probing)

    def sent(self) -> None:
        """The engine gets a request. In a half-open circuit this request is the trial."""
        self._probing = self._pauses > 0

    def succeeded(self) -> None:
        """The engine answered: all failures are forgotten."""
        self._failures.clear()
        self._pauses, self._probing = 0, False

    def given_up(self) -> None:
        """A request ended without a verdict on the engine: the client left, or the engine had no room."""
        self._probing = False

    def failed(self, cause: str, now_s: float) -> bool:
        """The engine failed a request. Returns whether this failure opened the circuit."""
        self._failures[cause] = self._failures.get(cause, 0) + 1
        half_open, self._probing = self._pauses > 0 and now_s >= self._until_s, False
        if not half_open and (self._pauses or self._failures[cause] < FAILURES):
            return False
        pause_s = doubled_s(FIRST_PAUSE_S, self._pauses, LONGEST_PAUSE_S)
        self._pauses += 1
        # Routers that saw the same failures must not all come back at the same time.
        self._until_s = now_s + pause_s * self._random.uniform(0.5, 1.0)
        return True


class RetryBudget:
    """Limits retries to a fifth of all requests, so retries do not add to the load of failing engines."""

    def __init__(self) -> None:
        self._left = SAVED

    def request(self) -> None:
        """A request has come."""
        self._left = min(SAVED, self._left + BUDGET)

    def allows(self, cause: str) -> bool:
        """Whether one more retry is allowed after a failure of this cause. An allowed retry is counted.

        A dying engine fails all its requests once and gets none again, so their retries are always allowed.
        """
        if cause in DEATHS:
            return True
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
