# SPDX-License-Identifier: Apache-2.0
"""Spans of a prompt's tokens in the pages of a cache, page by page or row by row."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


class PageSpan(NamedTuple):
    """Tokens [first, stop) of one page. In the plane they begin at `start`."""

    page: int
    first: int
    stop: int
    start: int


class TokenSpan(NamedTuple):
    """Tokens [first_token, stop_token) of a prompt, in the pages of a view of a cache.

    The results are kept for the next call: all layers of a chunk ask for the same.

    Attributes:
        pages: ids of the engine's pages, of `page_size` tokens each; the first holds `first_token`.
        view_tokens: tokens of a page of the view, which may be a part of the engine's page.
    """

    pages: tuple[int, ...]
    first_token: int
    stop_token: int
    page_size: int
    view_tokens: int

    def page_spans(self) -> Sequence[PageSpan]:
        """The span page by page of the view."""
        return _page_spans(self)

    def row_numbers(self, heads: int, steps: tuple[int, ...]) -> Index:
        """Numbers of the span's rows in a matrix of rows, by head and then by token: int64 `[heads * tokens]`.

        Args:
            steps: rows from one page, one head and one token to the next.
        """
        return _row_numbers(self, heads, steps)


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


@functools.lru_cache(maxsize=8)
def _row_numbers(span: TokenSpan, heads: int, steps: tuple[int, ...]) -> Index:
    pages, first_token, stop_token, page_size, view_tokens = span
    by_page, by_head, by_token = steps
    token = np.arange(first_token % page_size, stop_token - first_token // page_size * page_size)
    parts = page_size // view_tokens
    place, within = np.divmod(token, view_tokens)
    page = np.asarray(pages, np.int64)[place // parts] * parts + place % parts
    numbers: Index = np.arange(heads)[:, None] * by_head + (page * by_page + within * by_token)
    return numbers.reshape(-1)
