# SPDX-License-Identifier: Apache-2.0
"""Waiting work and its arrival rate, by the size of the requests."""

from __future__ import annotations

from math import exp, log2

BUCKETS = 40
_SMALLEST_S = 1e-4
_PER_OCTAVE = 2
WINDOW_S = 30.0
"""Time over which the rate of arriving work is averaged."""


def bucket_of(cost_s: float) -> int:
    """The bucket of a cost. There are two buckets per factor of 2, from 0.1 ms to about 70 s."""
    if cost_s <= _SMALLEST_S:
        return 0
    return min(BUCKETS - 1, 1 + int(_PER_OCTAVE * log2(cost_s / _SMALLEST_S)))


class WorkHistogram:
    """Seconds of work, by the cost of the requests.

    Admission needs this. With a policy that serves short requests first, a request waits only for shorter requests:
    those that wait now, and those that come later.
    """

    def __init__(self) -> None:
        self._waiting = [0.0] * BUCKETS
        self._arrived = [0.0] * BUCKETS
        self._arrived_at_s: float | None = None

    @property
    def waiting_s(self) -> tuple[float, ...]:
        """Waiting work in each bucket."""
        return tuple([work if work > 0.0 else 0.0 for work in self._waiting])

    def add(self, bucket: int, cost_s: float) -> None:
        """Add waiting work to a bucket. Departing work is negative."""
        self._waiting[bucket] += cost_s

    def arrive(self, bucket: int, cost_s: float, now_s: float) -> None:
        """Count a new request in the arrival rates."""
        self._age(now_s)
        self._arrived[bucket] += cost_s

    def arriving(self, now_s: float) -> tuple[float, ...]:
        """Arrival rate in each bucket: seconds of work per second, as an exponential average."""
        self._age(now_s)
        return tuple([work / WINDOW_S for work in self._arrived])

    def _age(self, now_s: float) -> None:
        if self._arrived_at_s is not None and now_s > self._arrived_at_s:
            kept = exp((self._arrived_at_s - now_s) / WINDOW_S)
            self._arrived = [work * kept for work in self._arrived]
        # Arrivals may be slightly out of order. But if the clock was set back, nothing would age until the clock has
        # caught up.
        last_s = self._arrived_at_s
        if last_s is None or now_s > last_s or now_s < last_s - WINDOW_S:
            self._arrived_at_s = now_s
