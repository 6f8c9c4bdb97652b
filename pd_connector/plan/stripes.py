# SPDX-License-Identifier: Apache-2.0
"""Which tokens pass between two ranks that hold unlike tokens of a sequence (context parallelism). Pure functions.

Both sides' tokens repeat with a period. So the tokens that both hold are some runs of one period, again and again.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Stripe

MAX_PERIOD = 1 << 18
"""Tokens. Sizes and interleaves whose common period is longer are refused: a plan would be too long."""


@dataclass(frozen=True, eq=False)
class Stripes:
    """The tokens that two ranks hold both. Made by `common`; compared by identity.

    Attributes:
        source, destination: what each of the two holds.
        period: tokens after which the pattern repeats.
        runs: first and stop token of each run, within one period from token 0 on, ascending.
        before: common tokens before each run, in the same period.
        tokens: common tokens of a period.
    """

    source: Stripe
    destination: Stripe
    period: int
    runs: tuple[tuple[int, int], ...]
    before: tuple[int, ...]
    tokens: int

    def count(self, first_token: int, stop_token: int) -> int:
        """Common tokens in [first_token, stop_token)."""
        return self._below(stop_token) - self._below(first_token)

    def most(self, tokens: int) -> int:
        """Common tokens in any `tokens` tokens in a row, at most."""
        periods, rest = divmod(tokens, self.period)
        return periods * self.tokens + min(rest, self.tokens)

    def _below(self, token: int) -> int:
        """Common tokens before this one."""
        periods, rest = divmod(token, self.period)
        place = bisect_right(self.runs, (rest, self.period)) - 1
        if place < 0:
            return periods * self.tokens
        start, stop = self.runs[place]
        return periods * self.tokens + self.before[place] + min(rest, stop) - start


@functools.lru_cache(maxsize=256)
def common(source: Stripe, destination: Stripe) -> Stripes | None:
    """The tokens that pass from one rank to another; None: all tokens do, because both hold all.

    Raises:
        UnsupportedGeometryError: they repeat after more than `MAX_PERIOD` tokens.

    >>> both = common(Stripe(1, 2, 4), Stripe(2, 3, 2))
    >>> both.period, both.runs, both.count(0, 48)
    (24, ((4, 6), (22, 24)), 8)
    """
    if source.size == destination.size == 1:
        return None
    ours, theirs = source.size * source.interleave, destination.size * destination.interleave
    period = math.lcm(ours, theirs)
    if period > MAX_PERIOD:
        raise UnsupportedGeometryError(
            f"context parallelism of {source.size} / {destination.size} ranks with an interleave of "
            f"{source.interleave} / {destination.interleave} tokens repeats after {period} tokens: must be at most "
            f"{MAX_PERIOD}; choose one interleave for both sides"
        )
    runs = tuple(_meet(_runs(source, period), _runs(destination, period)))
    before, tokens = [], 0
    for start, stop in runs:
        before.append(tokens)
        tokens += stop - start
    return Stripes(source, destination, period, runs, tuple(before), tokens)


def _runs(stripe: Stripe, period: int) -> list[tuple[int, int]]:
    """Runs of tokens that a rank holds, in one period."""
    if stripe.size == 1:
        return [(0, period)]
    length = stripe.interleave
    starts = range(stripe.rank * length, period, stripe.size * length)
    return [(start, start + length) for start in starts]


def _meet(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What two ascending lists of runs have in common; runs that touch are joined."""
    here = there = 0
    begun: tuple[int, int] | None = None
    while here < len(ours) and there < len(theirs):
        first = max(ours[here][0], theirs[there][0])
        stop = min(ours[here][1], theirs[there][1])
        if first < stop:
            if begun is not None and begun[1] == first:
                begun = begun[0], stop
            else:
                if begun is not None:
                    yield begun
                begun = first, stop
        if ours[here][1] <= theirs[there][1]:
            here += 1
        else:
            there += 1
    if begun is not None:
        yield begun
