# SPDX-License-Identifier: Apache-2.0
"""Finds missing events of an engine by their batch numbers. No I/O.

An engine numbers its batches from 0, and starts again at 0 when it restarts. It sends no snapshot of its cache.
Events that the router missed can only be replayed, as far back as the engine keeps them.
"""

from __future__ import annotations

from enum import Enum


class Step(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """The batch was applied before."""
    REPLAY = "replay"
    """Earlier batches are missing: ask for them from `next_number` on."""
    RESTART = "restart"
    """The engine has restarted: forget its blocks, then call `step` again."""


KEPT = 1_000
"""Number of batches whose times are remembered. A batch comes twice only if it came while a replay ran."""


class BatchNumbers:
    """The numbers of one engine's batches."""

    def __init__(self) -> None:
        self.next_number = 0
        """Number of the batch that is expected next."""
        self._last_ts = float("-inf")
        self._times: dict[int, float] = {}  # batch number -> time, of recent batches

    def step(self, number: int, ts: float) -> Step:
        """What to do with a batch that was published, not replayed. Changes nothing.

        Args:
            ts: time of the batch, by the engine's clock. An old number with another time means a restarted engine,
                even if its clock was set back.
        """
        if number < self.next_number:
            applied_ts = self._times.get(number)
            new = ts > self._last_ts if applied_ts is None else ts != applied_ts
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
        """The engine has restarted: it counts from 0."""
        self.next_number = 0
        self._last_ts = float("-inf")
        self._times.clear()
