# SPDX-License-Identifier: Apache-2.0
"""How many requests will come: the trend of the last minutes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

BIN_S = 10
TREND_S = 600.0
SURE = 2.0
"""A slope counts from this many standard errors on. A smaller one is noise, and would move the rate to and fro."""
JUMP_S, JUMP = 60, 4.0
"""If the last minute is this many standard errors off the trend, the trend is over, and the last minute counts alone."""


def trend(counts: Sequence[float], ahead_s: float) -> float:
    """Requests a second, `ahead_s` seconds from now, by a straight line through the counts of the last minutes.

    Args:
        counts: requests of each `BIN_S` seconds, oldest first; empty: none came.
    """
    bins = len(counts)
    if bins < 2:
        return sum(counts) / max(1, bins) / BIN_S
    mean = sum(counts) / bins
    # Requests come in bursts: their counts spread more than those of a Poisson process. Differences leave the trend out.
    steps = sum((after - before) ** 2 for before, after in pairwise(counts)) / (2 * (bins - 1))
    burst = max(1.0, steps / max(mean, 1e-9))
    middle, squares = (bins - 1) / 2, bins * (bins**2 - 1) / 12
    slope = sum((n - middle) * count for n, count in enumerate(counts)) / squares
    if abs(slope) < SURE * sqrt(burst * mean / squares):
        slope = 0.0
    last = JUMP_S // BIN_S
    line = max(0.0, mean + slope * (bins - 1 - middle))
    expected, came = line * last, sum(counts[-last:])
    if bins >= last and abs(came - expected) > JUMP * sqrt(burst * max(1.0, expected)):
        return came / JUMP_S
    return max(0.0, line + slope * (0.5 + ahead_s / BIN_S)) / BIN_S
