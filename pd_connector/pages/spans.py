# SPDX-License-Identifier: Apache-2.0
"""Spans of a prompt's tokens in the pages of a cache, page by page or row by row."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_connector.kv.geometry import Stripe
from pd_connector.plan.stripes import Stripes

Index = npt.NDArray[np.int64]


class PageSpan(NamedTuple):
    """Tokens [first, stop) of one page. In the plane they begin at `start`."""

    page: int
    first: int
    stop: int
    start: int


class TokenSpan(NamedTuple):
    """Tokens [first_token, stop_token) of a prompt, in the pages of a view of a cache.

    Results are cached, because all layers of a chunk need the same.

    Attributes:
        pages: ids of the engine's pages, of `page_size` tokens each; the first holds `first_token`.
        view_tokens: tokens of a page of the view, which may be a part of the engine's page.
    """

    pages: tuple[int, ...]
    first_token: int
    stop_token: int
    page_size: int
    view_tokens: int

    @property
    def scattered(self) -> bool:
        """Whether the tokens of a page need not lie side by side."""
        return False

    def page_spans(self) -> Sequence[PageSpan]:
        """The span page by page of the view."""
        return _page_spans(self)

    def places(self) -> tuple[Index, Index]:
        """For each token, the page of the view that holds it, and its place there."""
        return _places(self)

    def row_numbers(self, heads: int, steps: tuple[int, ...]) -> Index:
        """Numbers of the span's rows in a matrix of rows, by head and then by token: int64 `[heads * tokens]`.

        Args:
            steps: rows from one page, one head and one token to the next.
        """
        return _row_numbers(self, heads, steps)


class StripedSpan(NamedTuple):
    """The tokens of [first_token, stop_token) that both of two ranks hold, in the pages of a view of one rank. Like
    `TokenSpan`, for ranks that hold only some tokens (context parallelism).

    Attributes:
        pages: ids of the engine's pages; the first is the one whose tokens of the sequence include `first_token`.
        page_entries: entries (one K and V, one latent) of an engine's page.
        view_entries: entries of a page of the view.
        state_tokens: tokens of an entry.
        stripes: the tokens that both ranks hold.
        stripe: the tokens that this rank holds.
    """

    pages: tuple[int, ...]
    first_token: int
    stop_token: int
    page_entries: int
    view_entries: int
    state_tokens: int
    stripes: Stripes
    stripe: Stripe

    @property
    def scattered(self) -> bool:
        """See `TokenSpan`."""
        return True

    def page_spans(self) -> Sequence[PageSpan]:
        """Runs of entries that lie side by side, in the order of the tokens."""
        return _striped_page_spans(self)

    def places(self) -> tuple[Index, Index]:
        """For each entry, the page of the view that holds it, and its place there."""
        return _striped_places(self)

    def row_numbers(self, heads: int, steps: tuple[int, ...]) -> Index:
        """See `TokenSpan`."""
        return _row_numbers(self, heads, steps)


Span = TokenSpan | StripedSpan


def common_tokens(stripes: Stripes, first_token: int, stop_token: int) -> Index:
    """The tokens of [first_token, stop_token) that both sides hold, ascending: int64."""
    base = first_token // stripes.period * stripes.period
    starts = np.arange(base, stop_token, stripes.period)
    tokens: Index = (starts[:, None] + _pattern(stripes)).reshape(-1)
    return tokens[(tokens >= first_token) & (tokens < stop_token)]


@functools.lru_cache(maxsize=64)
def _pattern(stripes: Stripes) -> Index:
    """Common tokens of one period."""
    return np.concatenate([np.arange(start, stop) for start, stop in stripes.runs])


@functools.lru_cache(maxsize=8)
def _striped_places(span: StripedSpan) -> tuple[Index, Index]:
    tokens = common_tokens(span.stripes, span.first_token, span.stop_token)[:: span.state_tokens]
    _, size, interleave = span.stripe
    held = tokens // (interleave * size) * interleave + tokens % interleave
    entry = held // span.state_tokens
    page_tokens = span.page_entries * span.state_tokens * size
    number = entry // span.page_entries - span.first_token // page_tokens
    parts = span.page_entries // span.view_entries
    place, within = np.divmod(entry % span.page_entries, span.view_entries)
    return np.asarray(span.pages, np.int64)[number] * parts + place, within


@functools.lru_cache(maxsize=8)
def _striped_page_spans(span: StripedSpan) -> Sequence[PageSpan]:
    page, within = _striped_places(span)
    breaks = np.flatnonzero((np.diff(page) != 0) | (np.diff(within) != 1)) + 1
    starts = [0, *breaks.tolist(), len(page)]
    return [
        PageSpan(int(page[start]), int(within[start]), int(within[start]) + stop - start, start)
        for start, stop in itertools.pairwise(starts)
        if start < stop
    ]


@functools.lru_cache(maxsize=8)
def _page_spans(span: TokenSpan) -> Sequence[PageSpan]:
    pages, first_token, stop_token, page_size, view_tokens = span
    parts = page_size // view_tokens
    base = first_token // page_size * page_size
    spans: list[PageSpan] = []
    for place in range((first_token - base) // view_tokens, -(-(stop_token - base) // view_tokens)):
        begin = base + place * view_tokens
        first, stop = max(first_token, begin), min(stop_token, begin + view_tokens)
        page = pages[place // parts] * parts + place % parts
        spans.append(PageSpan(page, first - begin, stop - begin, first - first_token))
    return spans


def _places(span: TokenSpan) -> tuple[Index, Index]:
    pages, first_token, stop_token, page_size, view_tokens = span
    token = np.arange(first_token % page_size, stop_token - first_token // page_size * page_size)
    parts = page_size // view_tokens
    place, within = np.divmod(token, view_tokens)
    return np.asarray(pages, np.int64)[place // parts] * parts + place % parts, within


@functools.lru_cache(maxsize=8)
def _row_numbers(span: Span, heads: int, steps: tuple[int, ...]) -> Index:
    page, within = span.places()
    by_page, by_head, by_token = steps
    numbers: Index = np.arange(heads)[:, None] * by_head + (page * by_page + within * by_token)
    return numbers.reshape(-1)
