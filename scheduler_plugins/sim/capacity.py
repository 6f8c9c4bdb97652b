# SPDX-License-Identifier: Apache-2.0
"""The highest rate that keeps a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_plugins.sim.served import Served

KEPT = 0.9
"""A rate is sustained if this part of the requests is served in time."""
CLOSE = 0.03
MOST_PER_S = 1000.0
"""The search for a rate ends here. A few requests are in time at any rate."""


def kept(served: Iterable[Served], ttft_s: float, tpot_s: float) -> float:
    """Part of the requests that were served within both promises. Refused ones were not. No request: 1."""
    in_time = [
        request.end_s is not None and request.ttft_s <= ttft_s and request.tpot_s <= tpot_s
        for request in served
    ]
    return sum(in_time) / len(in_time) if in_time else 1.0


def largest(keeps: Callable[[float], bool], low: float, high: float, close: float = CLOSE) -> float:
    """The largest value that `keeps`, found by halving; `low` if none above it does. `close`: relative error."""
    while high - low > close * high:
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def sustained(
    keeps: Callable[[float], bool], start: float = 1.0, close: float = 0.06, low: float = 0.0
) -> float:
    """The largest rate that `keeps`: doubled from `start` on until it does not, then found by halving.

    Args:
        low: a rate that is known to hold.
    """
    high = start
    while high < MOST_PER_S and keeps(high):
        low, high = high, high * 2
    return largest(keeps, low, high, close)
