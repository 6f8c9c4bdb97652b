# SPDX-License-Identifier: Apache-2.0
"""Sums of request events for each second of the last minutes. Router and simulator fill them by the same calls."""

from __future__ import annotations

from collections import deque
from math import inf
from operator import add
from typing import NamedTuple

KEPT_S = 600
"""Seconds that are kept."""
_BOUND = 1e3
"""A time counts as at most this many times its promise, so that one lost request does not set a mean."""


class Seen(NamedTuple):
    """Sums of one group over a period, and values computed from them. All are 0 if nothing happened. Most are
    counts."""

    seconds: float = 0.0  # length of the period; shorter than asked for at the start
    arrivals: float = 0
    tokens: float = 0  # prompt tokens that arrived
    prefills: float = 0  # requests that got their first token
    uncached: float = 0  # prompt tokens computed for them
    squares: float = 0  # sum of the squares of `uncached`; attention's work
    answers: float = 0  # requests that ended
    answered: float = 0  # tokens generated for them
    refusals: float = 0
    ttft_promised: float = 0  # first tokens with a promise
    ttft_missed: float = 0  # those that came later than promised
    ttft_ratios: float = 0.0  # sum of TTFT / promise
    tpot_promised: float = 0
    tpot_missed: float = 0
    tpot_ratios: float = 0.0
    ttft_hurry: float = 0.0  # sum over arrivals with a promise of 1 / promise
    ttft_hurried: float = 0  # arrivals with a promise
    tpot_hurry: float = 0.0
    tpot_hurried: float = 0

    @property
    def tpot_missed_share(self) -> float:
        """Part of the answers with a promise that were slower than promised."""
        return self.tpot_missed / self.tpot_promised if self.tpot_promised else 0.0

    @property
    def tpot_ratio(self) -> float:
        """Mean TPOT as a multiple of its promise."""
        return self.tpot_ratios / self.tpot_promised if self.tpot_promised else 0.0

    @property
    def ttft_slo_s(self) -> float:
        """The promise of the arrivals, harmonic mean over those with a promise; infinite if there is none."""
        return self.ttft_hurried / self.ttft_hurry if self.ttft_hurry else inf

    @property
    def tpot_slo_s(self) -> float:
        """As `ttft_slo_s`, for the time per token."""
        return self.tpot_hurried / self.tpot_hurry if self.tpot_hurry else inf


_N = {name: n for n, name in enumerate(Seen._fields)}


class History:
    """Counts of each group and second. Memory is bounded: `KEPT_S` seconds for each group.

    `now_s` is any clock. If it jumps back, events count in the latest second that is known.
    """

    def __init__(self) -> None:
        self._groups: dict[str, deque[tuple[int, list[float]]]] = {}
        self._begun_s = inf

    def arrived(
        self, now_s: float, group: str, tokens: int, ttft_slo_s: float, tpot_slo_s: float
    ) -> None:
        """A request came, before any decision. Promises are infinite if there is none."""
        sums = self._sums(now_s, group)
        sums[_N["arrivals"]] += 1
        sums[_N["tokens"]] += tokens
        if ttft_slo_s < inf:
            sums[_N["ttft_hurry"]] += 1 / ttft_slo_s
            sums[_N["ttft_hurried"]] += 1
        if tpot_slo_s < inf:
            sums[_N["tpot_hurry"]] += 1 / tpot_slo_s
            sums[_N["tpot_hurried"]] += 1

    def prefilled(
        self, now_s: float, group: str, uncached_tokens: int, ttft_s: float, ttft_slo_s: float
    ) -> None:
        """A request got its first token."""
        sums = self._sums(now_s, group)
        sums[_N["prefills"]] += 1
        sums[_N["uncached"]] += uncached_tokens
        sums[_N["squares"]] += uncached_tokens**2
        _compare(sums, "ttft", ttft_s, ttft_slo_s)

    def answered(
        self, now_s: float, group: str, tokens: int, tpot_s: float, tpot_slo_s: float
    ) -> None:
        """A request got its last token; `tokens` were generated."""
        sums = self._sums(now_s, group)
        sums[_N["answers"]] += 1
        sums[_N["answered"]] += tokens
        _compare(sums, "tpot", tpot_s, tpot_slo_s)

    def refused(self, now_s: float, group: str) -> None:
        """A request was refused: no engine could take it in time."""
        self._sums(now_s, group)[_N["refusals"]] += 1

    def over(self, now_s: float, seconds: float, group: str) -> Seen:
        """Sums over the last `seconds` seconds, up to `KEPT_S`. The second that runs is part of them."""
        sums, first = [0.0] * len(_N), int(now_s - seconds) + 1
        for second, row in reversed(self._groups.get(group, ())):
            if second < first:
                break
            sums = list(map(add, sums, row))
        passed_s = min(seconds, max(0.0, now_s - self._begun_s))
        return Seen(*sums)._replace(seconds=passed_s)

    def arrivals(self, now_s: float, seconds: float, group: str, bin_s: int) -> list[float]:
        """Requests that came in each `bin_s` seconds of the last `seconds`, oldest first, up to the second before this
        one. Bins before the first request of any group are left out."""
        end = int(now_s)
        bins = int(min(seconds, max(0.0, end - self._begun_s)) // bin_s)
        counts = [0.0] * bins
        for second, row in reversed(self._groups.get(group, ())):
            n = (end - 1 - second) // bin_s
            if n >= bins:
                break
            if n >= 0:
                counts[bins - 1 - n] += row[_N["arrivals"]]
        return counts

    def _sums(self, now_s: float, group: str) -> list[float]:
        rows = self._groups.setdefault(group, deque())
        second = int(now_s)
        self._begun_s = min(self._begun_s, now_s)
        if not rows or rows[-1][0] < second:
            rows.append((second, [0.0] * len(_N)))
            while rows[0][0] <= second - KEPT_S:
                rows.popleft()
        return rows[-1][1]


def _compare(sums: list[float], what: str, time_s: float, slo_s: float) -> None:
    if slo_s < inf:
        sums[_N[f"{what}_promised"]] += 1
        sums[_N[f"{what}_missed"]] += time_s > slo_s
        sums[_N[f"{what}_ratios"]] += min(_BOUND, time_s / slo_s)
