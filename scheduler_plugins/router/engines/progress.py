# SPDX-License-Identifier: Apache-2.0
"""Distinguishes an engine that finishes its requests from a dead engine, by the answers that still make progress. No
I/O, no clock.

A stopped vLLM closes its port, ends its core and leaves open sockets silent. An engine that drains refuses connections
as well, but its answers go on, each at its own pace.
"""

from __future__ import annotations

from math import inf

PACES = 3.0
"""An answer is late once it was silent for this many times the longest of its recent pauses."""
LEAST_S = 1.5
"""No answer is late before. It is longer than a step of an engine."""
FEWEST = 4
"""Pauses after which the pace of an answer is known. The first bytes often come together."""
_FADES = 0.9
"""Factor for the longest pause with each further one, so an early pause is forgotten."""


class Signs:
    """Signs of life of one engine since its start, in this process. Times are those of `loop.ran_s`."""

    def __init__(self) -> None:
        self.last_s = -inf
        """When bytes came last."""
        self.dead = False
        """Whether an answer that had a pace was late, and nothing came since."""
        self._expected: dict[
            Progress, float
        ] = {}  # until when the pace of each explains its silence

    def moved(self, progress: Progress, now_s: float, patience_s: float) -> None:
        """Bytes of an answer came. Its next bytes are not late before `patience_s` have passed."""
        self.last_s, self.dead = now_s, False
        self._expected[progress] = now_s + patience_s

    def ended(self, progress: Progress) -> None:
        """An answer has ended."""
        self._expected.pop(progress, None)

    def is_silent(self, now_s: float) -> bool:
        """Whether no answer of the engine moves as it did."""
        if self.dead:
            return True
        return now_s - self.last_s >= LEAST_S and all(
            now_s >= until_s for until_s in self._expected.values()
        )


class Progress:
    """The pace of one answer, in seconds between its bytes."""

    def __init__(self, signs: Signs, expected_s: float = 0.0) -> None:
        """`expected_s`: predicted time to the first byte; 0: not known."""
        self.signs = signs
        self._longest_s = expected_s
        self._pauses = -1  # bytes come before the first pause

    @property
    def has_pace(self) -> bool:
        """Whether the answer has a pace."""
        return self._pauses >= FEWEST

    def came(self, pause_s: float, now_s: float) -> None:
        """Bytes came, `pause_s` after the previous bytes (or after the request)."""
        self._pauses += 1
        self._longest_s = max(pause_s, self._longest_s * _FADES) if self._pauses else 0.0
        self.signs.moved(self, now_s, self.patience_s)

    def end(self) -> None:
        """No more bytes will come."""
        self.signs.ended(self)

    def is_late(self, silent_s: float, now_s: float) -> bool:
        """Whether this answer and all other answers of the engine make slower progress than before.

        Args:
            silent_s: time since this answer's last bytes.
        """
        return silent_s >= self.patience_s and self.signs.is_silent(now_s)

    @property
    def patience_s(self) -> float:
        """The longest silence that is not late."""
        return max(LEAST_S, PACES * self._longest_s)
