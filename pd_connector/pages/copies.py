# SPDX-License-Identifier: Apache-2.0
"""Copies between a layer's pages and dense blocks: by numpy on CPU; by torch on a GPU where kernels do
not move them (`device_pages.py`).
"""

import ctypes
import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pd_connector.pages.grid import Grid, Index, Words
from pd_connector.pages.tiles import is_tiled, read_tiles, write_tiles

_SMALL_PAGE_BYTES = 16 * 1024
"""Into pages whose part has up to this size rows are written many at a time: one by one, Python's share
of the time would show. In larger ones a page's own order of memory is faster."""


class Span(NamedTuple):
    """Tokens [first, stop) of a page, which are a block's from `start` on."""

    page: int
    first: int
    stop: int
    start: int


class Where(NamedTuple):
    """Tokens [first_token, stop_token) of a prompt in the pages of a view. What is computed of it is
    kept: the layers of a chunk ask for the same.

    Attributes:
        pages: of the engine, of `page_size` tokens each; the first holds `first_token`.
        view_tokens: tokens of a page of the view, which may be a part of the engine's page.
    """

    pages: tuple[int, ...]
    first_token: int
    stop_token: int
    page_size: int
    view_tokens: int

    def spans(self) -> Sequence[Span]:
        """Page by page of the view."""
        return _spans(self)

    def rows(self, heads: int, steps: tuple[int, ...]) -> Index:
        """Numbers of the rows of a grid, by head and then by token.

        Args:
            steps: from one page, head and token to the next.
        """
        return _rows(self, heads, steps)


@functools.lru_cache(maxsize=8)
def _spans(where: Where) -> Sequence[Span]:
    pages, first_token, stop_token, page_size, view_tokens = where
    parts = page_size // view_tokens
    base = first_token // page_size * page_size
    found: list[Span] = []
    for place in range((first_token - base) // view_tokens, -(-(stop_token - base) // view_tokens)):
        begin = base + place * view_tokens
        first, stop = max(first_token, begin), min(stop_token, begin + view_tokens)
        page = pages[place // parts] * parts + place % parts
        found.append(Span(page, first - begin, stop - begin, first - first_token))
    return found


@functools.lru_cache(maxsize=8)
def _rows(where: Where, heads: int, steps: tuple[int, ...]) -> Index:
    pages, first_token, stop_token, page_size, view_tokens = where
    by_page, by_head, by_token = steps
    token = np.arange(first_token % page_size, stop_token - first_token // page_size * page_size)
    parts = page_size // view_tokens
    place, within = np.divmod(token, view_tokens)
    page = np.asarray(pages, np.int64)[place // parts] * parts + place % parts
    found: Index = np.arange(heads)[:, None] * by_head + (page * by_page + within * by_token)
    return found.reshape(-1)


class Copier(Protocol):
    """Views of a cache are `[page, head, token, dim]`, or tiled on the host (`tiles.py`); blocks
    `[head, token, dim]`, rows `[page, head, bytes]`; buffers are in host memory."""

    def read(self, view: torch.Tensor, where: Where, block: torch.Tensor) -> None:
        """Fill `block`, dense and on the cache's device, from the cache."""
        ...

    def write(self, view: torch.Tensor, where: Where, block: torch.Tensor) -> None:
        """Write `block`, on the cache's device, into the cache."""
        ...

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        """Fill `buffer` with the rows of these pages."""
        ...

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        """Write `buffer` into the rows of these pages."""
        ...


class HostCopier:
    """Row by row of a grid, else page by page. (torch's own indexing on CPU is several times slower.)

    The memory of views must stay where it is for as long as this lives.
    """

    def __init__(self) -> None:
        self._grids: dict[Hashable, Grid | None] = {}

    def read(self, view: torch.Tensor, where: Where, block: torch.Tensor) -> None:
        if is_tiled(view):
            read_tiles(view, where.spans(), block)
            return
        grid = self._grid(view)
        if grid is not None:
            grid.take(where.rows(view.shape[1], grid.steps), _bits(block).numpy())
            return
        source = _words(view)
        target = _like(block, source)
        for page, first, stop, start in where.spans():
            target[:, start : start + stop - first] = source[page, :, first:stop]

    def write(self, view: torch.Tensor, where: Where, block: torch.Tensor) -> None:
        if is_tiled(view):
            write_tiles(view, where.spans(), block.contiguous())
            return
        grid = self._grid(view) if view[0].nbytes <= _SMALL_PAGE_BYTES else None
        if grid is not None:
            values = _bits(block.contiguous()).numpy()
            grid.put(where.rows(view.shape[1], grid.steps), values)
            return
        target = _words(view)
        source = _like(block.contiguous(), target)
        for page, first, stop, start in where.spans():
            target[page, :, first:stop] = source[:, start : start + stop - first]

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        rows = _side_by_side(rows)
        if (grid := self._grid(rows)) is not None:
            grid.take(_row_numbers(grid, index, rows.shape[1]), buffer)
            return
        source = rows.numpy()
        for place, page in enumerate(index):
            buffer[place] = source[page].reshape(buffer.shape[1:])

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        rows = _side_by_side(rows)
        if (grid := self._grid(rows)) is not None:
            grid.put(_row_numbers(grid, index, rows.shape[1]), buffer)
            return
        target = rows.numpy()
        for place, page in enumerate(index):
            target[page] = buffer[place].reshape(target.shape[1:])

    def _grid(self, view: torch.Tensor) -> Grid | None:
        key = view.data_ptr(), view.shape, view.stride(), view.dtype
        if key not in self._grids:
            self._grids[key] = Grid.of(view)
        return self._grids[key]


class DeviceCopier:
    """On the current stream, in plain torch: for a GPU without Triton, and for chunks that are not for
    kernels. Copies from and to buffers may still be under way when a call returns."""

    def read(self, view: torch.Tensor, where: Where, block: torch.Tensor) -> None:
        spans = where.spans()
        index = torch.tensor([span.page for span in spans], device=view.device)
        picked = _bits(view).index_select(0, index).permute(1, 0, 2, 3).flatten(1, 2)
        _bits(block).copy_(picked[:, spans[0].first : spans[0].first + block.shape[1]])

    def write(self, view: torch.Tensor, where: Where, block: torch.Tensor) -> None:
        target, source = _bits(view), _bits(block)
        for page, first, stop, start in where.spans():
            target[page, :, first:stop] = source[:, start : start + stop - first]

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        picked = rows.index_select(0, torch.from_numpy(index).to(rows.device))
        torch.from_numpy(buffer).copy_(picked, non_blocking=True)

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        found = as_tensor(buffer).to(rows.device, non_blocking=True)
        rows[torch.from_numpy(index).to(rows.device)] = found


def as_tensor(data: Words) -> torch.Tensor:
    """Host memory as a tensor that is only read: torch warns of memory that it may not write."""
    if not data.flags.writeable:
        same = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
        data = np.ctypeslib.as_array(same).reshape(data.shape)
    return torch.from_numpy(data)


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows `[page, head, bytes]` with those of all heads as one, if they lie so in whole pages."""
    pages, heads, nbytes = rows.shape
    together = heads * nbytes
    if rows.stride(1) != nbytes or rows.stride(0) % together:
        return rows
    return rows.as_strided((pages, 1, together), (rows.stride(0), together, 1))


def _row_numbers(grid: Grid, index: Index, heads: int) -> Index:
    by_page, by_head = grid.steps
    found: Index = (index[:, None] * by_page + np.arange(heads) * by_head).reshape(-1)
    return found


def _words(view: torch.Tensor) -> Words:
    """The view as words of 8 bytes where its rows allow that, of one element else."""
    words = _like(view, None)
    wide = view.stride(-1) == 1 and view.shape[-1] * view.element_size() % 8 == 0
    return words.view(np.int64) if wide else words


def _like(x: torch.Tensor, words: Words | None) -> Words:
    """A tensor as words, of the same width as `words` where that is given and `x` dense."""
    found: Words = _bits(x).numpy()
    return found if words is None else found.view(words.dtype)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: numpy has no bfloat16, and torch on a GPU does not index FP8."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])
