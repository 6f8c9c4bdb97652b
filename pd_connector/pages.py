# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot: where layers, heads and tokens become bytes.

On CPU the calling thread copies page by page, which is as fast as the memory, or, where they are
small, all at once; on a GPU torch gathers on a stream of its own, and is waited for.
"""

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_connector.codec import CODECS, DTYPES, Elements, Part
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.geometry import Geometry, Group
from pd_connector.plan import Block, Chunk, blocks, page_part_bytes, token_bytes
from pd_connector.route import Route

Words = npt.NDArray[Any]

_SMALL_PAGE_BYTES = 16 * 1024
"""Parts of pages up to this size are copied many at a time."""


class LayerPages(NamedTuple):
    """One layer's cache, seen as K and V. A page here may be a part of the engine's page.

    Attributes:
        key: `[page, kv head, token, dim]`, any strides; the latent of MLA.
        value: the same of V; None for a latent.
        rows: the same memory as bytes, `[page, kv head, bytes]`, or `[page, 1, bytes]` where
            heads are not apart; None where pages are not dense.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    rows: torch.Tensor | None


class PagedCache:
    """The cache of one rank.

    Args:
        layers: what each layer, by its number in the model, looks like; not copied.
        geometry: what they hold.

    Raises:
        UnsupportedGeometryError: a layer is not what the geometry says of it.
    """

    def __init__(self, layers: Mapping[int, LayerPages], geometry: Geometry) -> None:
        self.geometry = geometry
        self._layers = dict(layers)
        for group in geometry.groups:
            for layer in group.layers:
                _check(layer, self._layers[layer], geometry, group)
        some = next(iter(self._layers.values()))
        self._device = some.key.device
        self._on_cpu = self._device.type == "cpu"
        self._words = (
            {
                (number, part): _words(view)
                for number, pages in layers.items()
                for part, view in ((Part.KEY, pages.key), (Part.VALUE, pages.value))
                if view is not None
            }
            if self._on_cpu
            else {}
        )
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def largest_page_bytes(self) -> int:
        """Bytes of one page of one layer, of the group where they are most."""
        return max(
            len(self.geometry.heads(group)) * group.page_size * token_bytes(group)
            for group in self.geometry.groups
        )

    def fence(self) -> torch.cuda.Event | None:
        """A point in the calling thread's stream; work before it is done when `gather`
        with this fence reads. None on CPU, where that is so already."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def gather(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        slot: memoryview,
        fence: torch.cuda.Event | None = None,
    ) -> memoryview:
        """Write a chunk's payload into the slot; returns the part of it that is filled.

        Args:
            pages: ids of `chunk.pages(route.source.page_size)`.

        Raises:
            IndexError: a page is not of this cache.
            ValueError: the slot is too small.
        """
        nbytes = chunk.nbytes(route)
        if len(slot) < nbytes:
            raise ValueError(f"slot of {len(slot)} bytes: the chunk has {nbytes} bytes")
        filled = slot[:nbytes]
        if self._stream is None:
            self._gather(route, chunk, pages, filled)
            return filled
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            self._gather(route, chunk, pages, filled)
        self._stream.synchronize()
        return filled

    def scatter(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: memoryview
    ) -> None:
        """Write a landed chunk's tokens into pages of this cache.

        Args:
            pages: ids of `chunk.pages(route.destination.page_size)`.

        Raises:
            IndexError: a page is not of this cache.
            ValueError: the payload has not the chunk's size. Nothing has been written then.
        """
        if len(payload) != chunk.nbytes(route):
            raise ValueError(
                f"payload of {len(payload)} bytes: the chunk has {chunk.nbytes(route)} bytes"
            )
        if self._stream is None:
            self._scatter(route, chunk, pages, payload)
            return
        with torch.cuda.stream(self._stream):
            self._scatter(route, chunk, pages, payload)
        self._stream.synchronize()

    def in_place(self, route: Route, chunk: Chunk, pages: Sequence[int]) -> memoryview | None:
        """The chunk's payload where it lies in the cache, if it is one run of full pages of one
        layer there; None where it has to be gathered."""
        group = route.source
        one_run = all(b - a == 1 for a, b in itertools.pairwise(pages))
        whole = len(route.heads) == len(self.geometry.heads(group))
        full = chunk.stop_token % group.page_size == 0
        if not (self._on_cpu and chunk.verbatim and one_run and whole and full):
            return None
        if chunk.stop_layer - chunk.first_layer != 1:
            return None
        (layer,) = chunk.layers(route)
        rows = self._rows(layer)
        parts = self._parts_per_page(layer, group)
        first, count = pages[0] * parts, len(pages) * parts
        self._check_pages(pages, rows.shape[0] // parts)
        run = rows[first : first + count]
        return memoryview(run.reshape(-1).numpy()) if run.is_contiguous() else None

    def _gather(self, route: Route, chunk: Chunk, pages: Sequence[int], filled: memoryview) -> None:
        buffer = np.frombuffer(filled, np.uint8)
        heads = slice(route.source_head, route.source_head + len(route.heads))
        if chunk.verbatim:
            for layer, target in self._verbatim(route, chunk, buffer):
                rows, index = self._row_range(layer, route.source, heads, pages)
                if self._on_cpu:
                    source = rows.numpy()
                    for place, page in enumerate(index):
                        target[place] = source[page]
                else:
                    picked = rows.index_select(0, torch.from_numpy(index).to(self._device))
                    torch.from_numpy(target).copy_(picked)
            return
        codec = CODECS[route.codec]
        target_dtype = route.destination.dtype
        for block in blocks(route, chunk):
            source_elements = _elements(route.source, block)
            wanted = Elements(target_dtype, _elements(route.destination, block).scale)
            out = torch.from_numpy(buffer[block.offset : block.offset + block.nbytes])
            x = self._read(route, chunk, block, heads, pages)
            if self._on_cpu:
                codec.encode(block.part, x, source_elements, wanted, out)
            else:
                coded = torch.empty(block.nbytes, dtype=torch.uint8, device=self._device)
                codec.encode(block.part, x, source_elements, wanted, coded)
                out.copy_(coded)

    def _scatter(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: memoryview
    ) -> None:
        buffer = np.frombuffer(payload, np.uint8)
        heads = slice(route.destination_head, route.destination_head + len(route.heads))
        if chunk.verbatim:
            for layer, data in self._verbatim(route, chunk, buffer):
                rows, index = self._row_range(layer, route.destination, heads, pages)
                if self._on_cpu:
                    target = rows.numpy()
                    for place, page in enumerate(index):
                        target[page] = data[place]
                else:
                    on_device = torch.from_numpy(data.copy()).to(self._device)
                    rows[torch.from_numpy(index).to(self._device)] = on_device
            return
        codec = CODECS[route.codec]
        for block in blocks(route, chunk):
            coded = _as_tensor(buffer[block.offset : block.offset + block.nbytes])
            decoded = codec.decode(
                block.part,
                coded if self._on_cpu else coded.to(self._device),
                block.shape,
                _elements(route.source, block),
                _elements(route.destination, block),
            )
            self._write(route, chunk, block, heads, pages, decoded)

    def _read(
        self, route: Route, chunk: Chunk, block: Block, heads: slice, pages: Sequence[int]
    ) -> torch.Tensor:
        """A block out of the cache, `[head, token, dim]`."""
        spans = list(self._spans(chunk, block.layer, route.source, pages))
        view = self._view(block)
        if not self._on_cpu:
            index = torch.tensor([span.page for span in spans], device=self._device)
            picked = view.index_select(0, index)[:, heads].permute(1, 0, 2, 3)
            first = spans[0].first
            return picked.flatten(1, 2)[:, first : first + chunk.tokens]
        x = torch.empty(block.shape, dtype=view.dtype)
        source = self._words[block.layer, block.part]
        target = _like(x, source)
        if (small := _small_pages(source[:, heads], spans, target)) is not None:
            small.block[...] = small.cache[small.pages]
            return x
        for page, first, stop, start in spans:
            target[:, start : start + stop - first] = source[page, heads, first:stop]
        return x

    def _write(
        self,
        route: Route,
        chunk: Chunk,
        block: Block,
        heads: slice,
        pages: Sequence[int],
        x: torch.Tensor,
    ) -> None:
        view = self._view(block)
        spans = list(self._spans(chunk, block.layer, route.destination, pages))
        if not self._on_cpu:
            for page, first, stop, start in spans:
                view[page, heads, first:stop] = x[:, start : start + stop - first]
            return
        target = self._words[block.layer, block.part]
        source = _like(x, target)
        if (small := _small_pages(target[:, heads], spans, source)) is not None:
            small.cache[small.pages] = small.block
            return
        for page, first, stop, start in spans:
            target[page, heads, first:stop] = source[:, start : start + stop - first]

    def _view(self, block: Block) -> torch.Tensor:
        layer = self._layers[block.layer]
        view = layer.value if block.part is Part.VALUE else layer.key
        assert view is not None
        return view

    def _spans(
        self, chunk: Chunk, layer: int, group: Group, pages: Sequence[int]
    ) -> Iterator["_Span"]:
        """The chunk's tokens, page by page of the layer's view."""
        view = self._layers[layer].key
        tokens = view.shape[2]
        parts = self._parts_per_page(layer, group)
        self._check_pages(pages, view.shape[0] // parts)
        base = chunk.first_token // group.page_size * group.page_size
        for place in range(
            (chunk.first_token - base) // tokens, -(-(chunk.stop_token - base) // tokens)
        ):
            begin = base + place * tokens
            first = max(chunk.first_token, begin)
            stop = min(chunk.stop_token, begin + tokens)
            page = pages[place // parts] * parts + place % parts
            yield _Span(page, first - begin, stop - begin, first - chunk.first_token)

    def _row_range(
        self, layer: int, group: Group, heads: slice, pages: Sequence[int]
    ) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """The layer's rows of these heads, and which of them are the pages'."""
        rows = self._rows(layer)
        parts = self._parts_per_page(layer, group)
        self._check_pages(pages, rows.shape[0] // parts)
        index = np.asarray(pages, np.int64)[:, None] * parts + np.arange(parts)
        return rows if rows.shape[1] == 1 else rows[:, heads], index.reshape(-1)

    def _verbatim(self, route: Route, chunk: Chunk, buffer: Words) -> Iterator[tuple[int, Words]]:
        """Each layer, and its part of the payload as `[page, kv head, bytes]`."""
        layers = chunk.layers(route)
        pages = len(chunk.pages(route.source.page_size))
        each = pages * page_part_bytes(route)
        for place, layer in enumerate(layers):
            _, heads, row_bytes = self._rows(layer).shape
            heads = 1 if heads == 1 else len(route.heads)
            part = buffer[place * each : (place + 1) * each]
            yield layer, part.reshape(-1, heads, row_bytes)

    def _rows(self, layer: int) -> torch.Tensor:
        rows = self._layers[layer].rows
        assert rows is not None, f"layer {layer} has no dense pages"
        return rows

    def _parts_per_page(self, layer: int, group: Group) -> int:
        return int(group.page_size // self._layers[layer].key.shape[2])

    @staticmethod
    def _check_pages(pages: Sequence[int], count: int) -> None:
        if min(pages) < 0 or max(pages) >= count:
            raise IndexError(f"pages {min(pages)}-{max(pages)} of a cache of {count}")


class _Span(NamedTuple):
    """Tokens [first, stop) of a page of the view, which are the chunk's from `start` on."""

    page: int
    first: int
    stop: int
    start: int


class _SmallPages(NamedTuple):
    """A cache and a block with like axes but the first: all pages of it, and those in `pages`."""

    cache: Words
    block: Words
    pages: npt.NDArray[np.int64]


def _small_pages(cache: Words, spans: Sequence[_Span], block: Words) -> _SmallPages | None:
    """What to copy at once where whole pages are so small that one by one, Python's share of the
    time would show; None elsewhere.

    Args:
        cache: `[page, head, token, dim]`.
        block: `[head, token, dim]`, dense.
    """
    _, heads, tokens, dim = cache.shape
    small = heads * tokens * dim * cache.itemsize <= _SMALL_PAGE_BYTES
    if not small or spans[0].first or spans[-1].stop != tokens:
        return None
    pages = np.fromiter((span.page for span in spans), np.int64, len(spans))
    paged = block.reshape(heads, len(spans), tokens, dim).transpose(1, 0, 2, 3)
    if cache.strides[2] > cache.strides[1]:  # in the order of memory it is twice as fast
        cache, paged = cache.swapaxes(1, 2), paged.swapaxes(1, 2)
    return _SmallPages(cache, paged, pages)


def _elements(group: Group, block: Block) -> Elements:
    key, value = group.scale(block.layer)
    return Elements(group.dtype, value if block.part is Part.VALUE else key)


def _as_tensor(data: Words) -> torch.Tensor:
    """Bytes as a tensor that is only read: torch warns of memory that it may not write."""
    if not data.flags.writeable:
        same = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
        data = np.ctypeslib.as_array(same)
    return torch.from_numpy(data)


def _words(x: torch.Tensor) -> Words:
    """The view as unsigned words of 8 bytes where its rows allow that, of one element else."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    words: Words = x.view(signed).numpy()
    wide = x.stride(-1) == 1 and x.shape[-1] * x.element_size() % 8 == 0
    return words.view(np.int64) if wide else words


def _like(x: torch.Tensor, words: Words) -> Words:
    """A dense tensor as words of the same width."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    found: Words = x.contiguous().view(signed).numpy()
    return found.view(words.dtype)


def _check(layer: int, pages: LayerPages, geometry: Geometry, group: Group) -> None:
    heads = len(geometry.heads(group))
    known = group.dtype in DTYPES
    views = [(pages.key, group.key_dim)]
    if pages.value is not None:
        views.append((pages.value, group.value_dim))
    elif group.value_dim:
        raise UnsupportedGeometryError(f"cache of layer {layer} has no V of {group.value_dim} dims")
    for view, dim in views:
        good = view.ndim == 4 and view.shape[1] == heads and group.page_size % view.shape[2] == 0
        if known:
            good = good and view.shape[3] == dim and view.dtype == DTYPES[group.dtype]
        if not good:
            raise UnsupportedGeometryError(
                f"cache of layer {layer} has shape {tuple(view.shape)} and {view.dtype}: wanted "
                f"[page, {heads} heads, tokens that divide {group.page_size}, {dim}] of "
                f"{group.dtype}"
            )
    if pages.rows is None:
        if group.layout or not known:
            raise UnsupportedGeometryError(
                f"cache of layer {layer} ({group.dtype}, layout {group.layout}) has pages that are "
                "not dense: only those of a known dtype can be moved, and their layout has no name"
            )
        return
    count, _, tokens, _ = pages.key.shape
    apart = heads if group.heads_apart else 1
    wanted = count, apart, heads // apart * tokens * token_bytes(group)
    if tuple(pages.rows.shape) != wanted:
        raise UnsupportedGeometryError(
            f"cache of layer {layer} has rows of shape {tuple(pages.rows.shape)}: wanted {wanted}"
        )
