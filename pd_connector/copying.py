# SPDX-License-Identifier: Apache-2.0
"""Copies between a layer's pages and dense blocks: by numpy on CPU; by torch on a GPU where kernels do
not move them (`device_pages.py`).
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

_SMALL_PAGE_BYTES = 16 * 1024
"""Parts of pages up to this size are copied many at a time."""


class Span(NamedTuple):
    """Tokens [first, stop) of a page, which are a block's from `start` on."""

    page: int
    first: int
    stop: int
    start: int


def spans(
    pages: Sequence[int], first_token: int, stop_token: int, page_size: int, view_tokens: int
) -> list[Span]:
    """Tokens [first_token, stop_token) of a prompt, page by page of a view.

    Args:
        pages: of the engine, of `page_size` tokens each; the first holds `first_token`.
        view_tokens: tokens of a page of the view, which may be a part of the engine's page.
    """
    parts = page_size // view_tokens
    base = first_token // page_size * page_size
    found: list[Span] = []
    for place in range((first_token - base) // view_tokens, -(-(stop_token - base) // view_tokens)):
        begin = base + place * view_tokens
        first, stop = max(first_token, begin), min(stop_token, begin + view_tokens)
        page = pages[place // parts] * parts + place % parts
        found.append(Span(page, first - begin, stop - begin, first - first_token))
    return found


class Copier(Protocol):
    """Views of a cache are `[page, head, token, dim]`, blocks `[head, token, dim]`, rows
    `[page, head, bytes]`; buffers are in host memory."""

    def read(self, view: torch.Tensor, spans: Sequence[Span], block: torch.Tensor) -> None:
        """Fill `block`, dense and on the cache's device, from the cache."""
        ...

    def write(self, view: torch.Tensor, spans: Sequence[Span], block: torch.Tensor) -> None:
        """Write `block`, on the cache's device, into the cache."""
        ...

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        """Fill `buffer` with the rows of these pages."""
        ...

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        """Write `buffer` into the rows of these pages."""
        ...


class HostCopier:
    """Page by page, which is as fast as the memory; where pages are small, all at once. (torch's
    own indexing on CPU is several times slower.)"""

    def read(self, view: torch.Tensor, spans: Sequence[Span], block: torch.Tensor) -> None:
        source = _words(view)
        target = _like(block, source)
        if (small := _small_pages(source, spans, target)) is not None:
            small.block[...] = small.cache[small.pages]
            return
        for page, first, stop, start in spans:
            target[:, start : start + stop - first] = source[page, :, first:stop]

    def write(self, view: torch.Tensor, spans: Sequence[Span], block: torch.Tensor) -> None:
        target = _words(view)
        source = _like(block.contiguous(), target)
        if (small := _small_pages(target, spans, source)) is not None:
            small.cache[small.pages] = small.block
            return
        for page, first, stop, start in spans:
            target[page, :, first:stop] = source[:, start : start + stop - first]

    def take_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        source = rows.numpy()
        for place, page in enumerate(index):
            buffer[place] = source[page]

    def put_rows(self, rows: torch.Tensor, index: Index, buffer: Words) -> None:
        target = rows.numpy()
        for place, page in enumerate(index):
            target[page] = buffer[place]


class DeviceCopier:
    """On the current stream, in plain torch: for a GPU without Triton, and for chunks that are not for
    kernels. Copies from and to buffers may still be under way when a call returns."""

    def read(self, view: torch.Tensor, spans: Sequence[Span], block: torch.Tensor) -> None:
        index = torch.tensor([span.page for span in spans], device=view.device)
        picked = _bits(view).index_select(0, index).permute(1, 0, 2, 3).flatten(1, 2)
        _bits(block).copy_(picked[:, spans[0].first : spans[0].first + block.shape[1]])

    def write(self, view: torch.Tensor, spans: Sequence[Span], block: torch.Tensor) -> None:
        target, source = _bits(view), _bits(block)
        for page, first, stop, start in spans:
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


class _SmallPages(NamedTuple):
    """A cache and a block with like axes but the first: all pages of it, and those in `pages`."""

    cache: Words
    block: Words
    pages: Index


def _small_pages(cache: Words, spans: Sequence[Span], block: Words) -> _SmallPages | None:
    """What to copy at once where whole pages are so small that one by one, Python's share of the
    time would show; None elsewhere."""
    _, heads, tokens, dim = cache.shape
    small = heads * tokens * dim * cache.itemsize <= _SMALL_PAGE_BYTES
    if not small or spans[0].first or spans[-1].stop != tokens:
        return None
    pages = np.fromiter((span.page for span in spans), np.int64, len(spans))
    paged = block.reshape(heads, len(spans), tokens, dim).transpose(1, 0, 2, 3)
    if cache.strides[2] > cache.strides[1]:  # in the order of memory it is twice as fast
        cache, paged = cache.swapaxes(1, 2), paged.swapaxes(1, 2)
    return _SmallPages(cache, paged, pages)


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
