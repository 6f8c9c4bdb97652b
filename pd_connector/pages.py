# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot: where layers, heads and tokens become bytes.

The calling thread waits for them: on CPU it copies itself, on a GPU a stream of their own does.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch

from pd_connector.codec import CODECS, DTYPES, Elements, Part
from pd_connector.copying import Copier, DeviceCopier, HostCopier, Index, Span, Words, as_tensor
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.geometry import Geometry, Group
from pd_connector.memory import Pieces
from pd_connector.plan import Block, Chunk, blocks, page_part_bytes, token_bytes
from pd_connector.route import Route


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
        copier: what copies; chosen by the cache's device by default.

    Raises:
        UnsupportedGeometryError: a layer is not what the geometry says of it.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerPages],
        geometry: Geometry,
        copier: Copier | None = None,
    ) -> None:
        self.geometry = geometry
        self._layers = dict(layers)
        for group in geometry.groups:
            for layer in group.layers:
                _check(layer, self._layers[layer], geometry, group)
        self._device = next(iter(self._layers.values())).key.device
        on_host = self._device.type == "cpu"
        self._copier: Copier = copier or (HostCopier() if on_host else DeviceCopier())
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def on_host(self) -> bool:
        """Whether pages lie in this machine's memory, not a device's."""
        return self._stream is None

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
        with self._streamed(fence):
            self._gather(route, chunk, pages, np.frombuffer(filled, np.uint8))
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
        with self._streamed(None):
            self._scatter(route, chunk, pages, np.frombuffer(payload, np.uint8))

    def pieces(
        self, group: Group, first_head: int, route: Route, chunk: Chunk, pages: Sequence[int]
    ) -> Pieces | None:
        """Where a verbatim chunk's payload lies in this cache, in order; None if it is not in
        host memory.

        Args:
            group: the route's source or destination, whichever this cache is.
            first_head: place of the route's first head in this cache.
            pages: ids of `chunk.pages(group.page_size)`.

        Raises:
            IndexError: a page is not of this cache.
        """
        if self._stream is not None or not chunk.verbatim:
            return None
        heads = slice(first_head, first_head + len(route.heads))
        found: list[Index] = []
        piece_bytes = 0
        for layer in chunk.layers(route):
            rows, index = self._row_range(layer, group, heads, pages)
            _, parts, piece_bytes = rows.shape
            addresses = rows.data_ptr() + index * rows.stride(0)
            if rows.stride(1) == piece_bytes:  # the heads lie side by side
                piece_bytes *= parts
            elif parts > 1:
                addresses = (addresses[:, None] + np.arange(parts) * rows.stride(1)).reshape(-1)
            found.append(addresses)
        return Pieces(np.concatenate(found).astype(np.uint64), piece_bytes)

    def in_place(self, route: Route, chunk: Chunk, pages: Sequence[int]) -> memoryview | None:
        """The chunk's payload where it lies in the cache, if it is one run of full pages of one
        layer there; None where it has to be gathered."""
        group = route.source
        one_run = all(b - a == 1 for a, b in itertools.pairwise(pages))
        whole = len(route.heads) == len(self.geometry.heads(group))
        full = chunk.stop_token % group.page_size == 0
        if not (self._stream is None and chunk.verbatim and one_run and whole and full):
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

    @contextlib.contextmanager
    def _streamed(self, fence: torch.cuda.Event | None) -> Iterator[None]:
        """What is queued within has been done at the end."""
        stream: AbstractContextManager[object] = contextlib.nullcontext()
        if self._stream is not None:
            stream = torch.cuda.stream(self._stream)
            if fence is not None:
                self._stream.wait_event(fence)
        with stream:
            yield
        if self._stream is not None:
            self._stream.synchronize()

    def _gather(self, route: Route, chunk: Chunk, pages: Sequence[int], buffer: Words) -> None:
        heads = slice(route.source_head, route.source_head + len(route.heads))
        if chunk.verbatim:
            for layer, part in self._verbatim(route, chunk, buffer):
                rows, index = self._row_range(layer, route.source, heads, pages)
                self._copier.take_rows(rows, index, part)
            return
        for block in blocks(route, chunk):
            spans = self._spans(chunk, block.layer, route.source, pages)
            view = self._view(block)[:, heads]
            out = torch.from_numpy(buffer[block.offset : block.offset + block.nbytes])
            if route.codec == "raw" and self._stream is None:  # the bits as they are
                self._copier.read(view, spans, out.view(view.dtype).view(block.shape))
                continue
            x = torch.empty(block.shape, dtype=view.dtype, device=self._device)
            self._copier.read(view, spans, x)
            coded = out if self._stream is None else torch.empty_like(out, device=self._device)
            source, wanted = _elements(route.source, block), _elements(route.destination, block)
            CODECS[route.codec].encode(block.part, x, source, wanted, coded)
            if coded is not out:
                out.copy_(coded)

    def _scatter(self, route: Route, chunk: Chunk, pages: Sequence[int], buffer: Words) -> None:
        heads = slice(route.destination_head, route.destination_head + len(route.heads))
        if chunk.verbatim:
            for layer, part in self._verbatim(route, chunk, buffer):
                rows, index = self._row_range(layer, route.destination, heads, pages)
                self._copier.put_rows(rows, index, part)
            return
        for block in blocks(route, chunk):
            coded = as_tensor(buffer[block.offset : block.offset + block.nbytes])
            decoded = CODECS[route.codec].decode(
                block.part,
                coded.to(self._device),
                block.shape,
                _elements(route.source, block),
                _elements(route.destination, block),
            )
            spans = self._spans(chunk, block.layer, route.destination, pages)
            self._copier.write(self._view(block)[:, heads], spans, decoded)

    def _view(self, block: Block) -> torch.Tensor:
        layer = self._layers[block.layer]
        view = layer.value if block.part is Part.VALUE else layer.key
        assert view is not None
        return view

    def _spans(self, chunk: Chunk, layer: int, group: Group, pages: Sequence[int]) -> list[Span]:
        """The chunk's tokens, page by page of the layer's view."""
        view = self._layers[layer].key
        tokens = view.shape[2]
        parts = self._parts_per_page(layer, group)
        self._check_pages(pages, view.shape[0] // parts)
        base = chunk.first_token // group.page_size * group.page_size
        spans: list[Span] = []
        for place in range(
            (chunk.first_token - base) // tokens, -(-(chunk.stop_token - base) // tokens)
        ):
            begin = base + place * tokens
            first = max(chunk.first_token, begin)
            stop = min(chunk.stop_token, begin + tokens)
            page = pages[place // parts] * parts + place % parts
            spans.append(Span(page, first - begin, stop - begin, first - chunk.first_token))
        return spans

    def _row_range(
        self, layer: int, group: Group, heads: slice, pages: Sequence[int]
    ) -> tuple[torch.Tensor, Index]:
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


def _elements(group: Group, block: Block) -> Elements:
    key, value = group.scale(block.layer)
    return Elements(group.dtype, value if block.part is Part.VALUE else key)


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
