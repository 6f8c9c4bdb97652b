# SPDX-License-Identifier: Apache-2.0
"""Which of an engine's events are missing. No I/O.

An engine numbers its batches from 0, and begins again when it restarts. It sends no snapshot of its cache: what was said
before the router came, or while it did not listen, can only be replayed, as far back as the engine keeps it.
"""

from __future__ import annotations

from enum import Enum


class Step(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """It was applied before."""
    REPLAY = "replay"
    """Batches are missing before it: ask for them from `next_number` on."""
    RESTART = "restart"
    """The engine has started anew: forget its blocks, then look at the batch again."""


KEPT = 1_000
"""Batches whose times are remembered. Only what came while a replay ran comes twice."""


class BatchNumbers:
    """The numbers of one engine's batches."""

    def __init__(self) -> None:
        self.next_number = 0
        """The batch that is wanted next."""
        self._last_ts = float("-inf")
        self._times: dict[int, float] = {}  # of the batches that were applied lately

    def step(self, number: int, ts: float) -> Step:
        """What to do with a batch that came by itself. Changes nothing.

        Args:
            ts: its time, by the engine's clock: an old number with another time is a new engine's, also where its clock
                was set back meanwhile.
        """
        if number < self.next_number:
            known = self._times.get(number)
            new = ts > self._last_ts if known is None else ts != known
            return Step.RESTART if new else Step.SKIP
        return Step.APPLY if number == self.next_number else Step.REPLAY

    def applied(self, number: int, ts: float) -> None:
        """A batch was applied."""
        self.next_number = number + 1
        self._last_ts = ts
        self._times[number] = ts
        if len(self._times) > KEPT:
            del self._times[next(iter(self._times))]

    def restart(self) -> None:
        """The engine has started anew: it counts from 0."""
        self.next_number = 0
        self._last_ts = float("-inf")
        self._times.clear()
