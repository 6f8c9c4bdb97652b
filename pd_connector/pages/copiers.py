# SPDX-License-Identifier: Apache-2.0
"""Copies between a layer's pages and dense planes: by numpy on a CPU, by torch on a GPU. On a GPU these move
only chunks that kernels do not move (`kernel_pages.py`).
"""

import ctypes
from collections.abc import Hashable
from typing import Protocol

import numpy as np
import torch

from pd_connector.codec.elements import bits
from pd_connector.pages.row_matrix import RowMatrix, Words
from pd_connector.pages.spans import Index, Span
from pd_connector.pages.tiles import is_tiled, read_tiles, write_tiles

_SMALL_PAGE_BYTES = 16 * 1024
"""Largest page that is written as rows, many pages in one call: one call per small page would cost mostly Python's overhead.
Larger pages are written one by one in memory order, which is faster for them."""


class Copier(Protocol):
    """Copies tokens between a view and a plane, or whole pages between rows and a buffer.

    Views of a cache are `[page, head, token, dim]`, or tiled on the host (`tiles.py`). Planes are
    `[head, token, dim]`, rows uint8 `[page, head, bytes]`. Buffers are in host memory.
    """

    def read(self, view: torch.Tensor, span: Span, plane: torch.Tensor) -> None:
        """Fill `plane`, dense and on the cache's device, from the cache."""
        ...

    def write(self, view: torch.Tensor, span: Span, plane: torch.Tensor) -> None:
        """Write `plane`, on the cache's device, into the cache."""
        ...

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        """Fill `buffer` with the rows of these pages."""
        ...

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        """Write `buffer` into the rows of these pages."""
        ...


class HostCopier:
    """Copies by numpy: by rows if the view is a matrix of rows, else page by page. (torch's own indexing on a CPU is
    several times slower.)

    The memory of views must stay in place while this object lives.
    """

    def __init__(self) -> None:
        self._matrices: dict[Hashable, RowMatrix | None] = {}

    def read(self, view: torch.Tensor, span: Span, plane: torch.Tensor) -> None:
        if is_tiled(view):
            read_tiles(view, span.page_spans(), plane)
            return
        matrix = self._matrix(view)
        if matrix is not None:
            matrix.take(span.row_numbers(view.shape[1], matrix.steps), bits(plane).numpy())
            return
        source = _words(view)
        target = _like(plane, source)
        for page, first, stop, start in span.page_spans():
            target[:, start : start + stop - first] = source[page, :, first:stop]

    def write(self, view: torch.Tensor, span: Span, plane: torch.Tensor) -> None:
        if is_tiled(view):
            write_tiles(view, span.page_spans(), plane.contiguous())
            return
        by_rows = span.scattered or view[0].nbytes <= _SMALL_PAGE_BYTES
        matrix = self._matrix(view) if by_rows else None
        if matrix is not None:
            values = bits(plane.contiguous()).numpy()
            matrix.put(span.row_numbers(view.shape[1], matrix.steps), values)
            return
        target = _words(view)
        source = _like(plane.contiguous(), target)
        for page, first, stop, start in span.page_spans():
            target[page, :, first:stop] = source[:, start : start + stop - first]

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        rows = _side_by_side(rows)
        if (matrix := self._matrix(rows)) is not None:
            matrix.take(_row_numbers(matrix, index, rows.shape[1]), buffer)
            return
        source = rows.numpy()
        for place, page in enumerate(index):
            buffer[place] = source[page].reshape(buffer.shape[1:])

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        rows = _side_by_side(rows)
        if (matrix := self._matrix(rows)) is not None:
            matrix.put(_row_numbers(matrix, index, rows.shape[1]), buffer)
            return
        target = rows.numpy()
        for place, page in enumerate(index):
            target[page] = buffer[place].reshape(target.shape[1:])

    def _matrix(self, view: torch.Tensor) -> RowMatrix | None:
        key = view.data_ptr(), view.shape, view.stride(), view.dtype
        if key not in self._matrices:
            self._matrices[key] = RowMatrix.of(view)
        return self._matrices[key]


class TorchCopier:
    """Copies by torch's operations, on the current stream: for a GPU without Triton, and for chunks that kernels
    do not move. Copies from and to buffers may still run when a call returns."""

    def read(self, view: torch.Tensor, span: Span, plane: torch.Tensor) -> None:
        if span.scattered:
            page, within = _on(view.device, *span.places())
            bits(plane).copy_(bits(view)[page, :, within].transpose(0, 1))
            return
        spans = span.page_spans()
        index = torch.tensor([each.page for each in spans], device=view.device)
        picked = bits(view).index_select(0, index).permute(1, 0, 2, 3).flatten(1, 2)
        bits(plane).copy_(picked[:, spans[0].first : spans[0].first + plane.shape[1]])

    def write(self, view: torch.Tensor, span: Span, plane: torch.Tensor) -> None:
        target, source = bits(view), bits(plane)
        if span.scattered:
            page, within = _on(view.device, *span.places())
            target[page, :, within] = source.transpose(0, 1)
            return
        for number, first, stop, start in span.page_spans():
            target[number, :, first:stop] = source[:, start : start + stop - first]

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        picked = rows.index_select(0, torch.from_numpy(index).to(rows.device))
        torch.from_numpy(buffer).copy_(picked, non_blocking=True)

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        values = as_tensor(buffer).to(rows.device, non_blocking=True)
        rows[torch.from_numpy(index).to(rows.device)] = values


def as_tensor(data: Words) -> torch.Tensor:
    """Host memory as a tensor that is only read. torch would warn of memory that it must not write."""
    if not data.flags.writeable:
        same = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
        data = np.ctypeslib.as_array(same).reshape(data.shape)
    return torch.from_numpy(data)


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows `[page, head, bytes]` with the rows of all heads joined, if a page's rows are adjacent in memory."""
    pages, heads, nbytes = rows.shape
    together = heads * nbytes
    if rows.stride(1) != nbytes or rows.stride(0) % together:
        return rows
    return rows.as_strided((pages, 1, together), (rows.stride(0), together, 1))


def _on(device: torch.device, *index: Index) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(numbers).to(device) for numbers in index)


def _row_numbers(matrix: RowMatrix, index: Index, heads: int) -> Index:
    by_page, by_head = matrix.steps
    numbers: Index = (index[:, None] * by_page + np.arange(heads) * by_head).reshape(-1)
    return numbers


def _words(view: torch.Tensor) -> Words:
    """The view as words of 8 bytes if its rows allow that, else as words of one element."""
    words = _like(view, None)
    wide = view.stride(-1) == 1 and view.shape[-1] * view.element_size() % 8 == 0
    return words.view(np.int64) if wide else words


def _like(x: torch.Tensor, words: Words | None) -> Words:
    """A tensor as words, as wide as `words` if that is given and `x` is dense."""
    elements: Words = bits(x).numpy()
    return elements if words is None else elements.view(words.dtype)
