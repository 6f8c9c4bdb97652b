# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot: where layers, heads and tokens become bytes.

The calling thread waits for them: on CPU it copies itself; on a GPU kernels do on a stream of their
own (`device_pages.py`), or torch's operations where Triton is missing or a chunk is not for kernels.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_connector.codec import load_codec
from pd_connector.kv.coding import Elements, Part
from pd_connector.kv.geometry import Geometry, Group
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.copies import (
    Copier,
    DeviceCopier,
    HostCopier,
    Where,
    as_tensor,
)
from pd_connector.pages.grid import Index, Words
from pd_connector.pages.layer import LayerPages, check_layer
from pd_connector.pages.tiles import tokens_of
from pd_connector.plan.chunks import Block, Chunk, blocks
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import page_part_bytes, token_bytes

if TYPE_CHECKING:
    from pd_connector.pages.device import DevicePages

__all__ = ["LayerPages", "PagedCache"]

logger = logging.getLogger("pd_connector.pages.paged_cache")


class PagedCache:
    """The cache of one rank. One thread gathers and scatters.

    Attributes:
        checksum: of the payload that the last `gather` wrote, or of what the last `scatter` brought
            into pages, where a kernel has summed it on the way; None where the caller has to.

    Args:
        layers: what each layer, by its number in the model, looks like; not copied.
        geometry: what they hold.
        by_kernels: whether `pd_kernels` moves pages, on CPU as plain torch; by default where the
            cache is on a GPU and Triton is installed.

    Raises:
        UnsupportedGeometryError: a layer is not what the geometry says of it.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerPages],
        geometry: Geometry,
        *,
        by_kernels: bool | None = None,
    ) -> None:
        self.geometry = geometry
        self.checksum: bytes | None = None
        self._layers = dict(layers)
        for group in geometry.groups:
            for layer in group.layers:
                check_layer(layer, self._layers[layer], geometry, group)
        self._device = next(iter(self._layers.values())).key.device
        on_gpu = self._device.type == "cuda"
        self._copier: Copier = DeviceCopier() if on_gpu else HostCopier()
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        wanted = on_gpu if by_kernels is None else by_kernels
        self._kernels = _kernels(self._layers, self._device) if wanted else None

    @property
    def device(self) -> torch.device:
        """Where all layers lie."""
        return self._device

    @property
    def on_host(self) -> bool:
        """Whether pages are read and written by this machine's processors themselves."""
        return self._stream is None and self._kernels is None

    @property
    def largest_page_bytes(self) -> int:
        """Bytes of one page of one layer, of the group where they are most."""
        return max(
            len(self.geometry.heads(group)) * group.page_size * token_bytes(group)
            for group in self.geometry.groups
        )

    def prepare(self, routes: Sequence[Route], *, gathers: bool) -> bool:
        """Make ready to gather, or scatter, chunks of these routes. Returns whether that has been done;
        it may take seconds where kernels must be compiled, which another thread does meanwhile."""
        if self._kernels is None:
            return True
        done = [self._kernels.prepare(route, gathers=gathers) for route in routes]  # begin all
        return all(done)

    def fence(self) -> torch.cuda.Event | None:
        """A point in the calling thread's stream; work before it is done when `gather` or
        `scatter` with this fence touches pages. None on CPU, where that is so already."""
        return (
            None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        )

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
        self.checksum = None
        with self._streamed(fence):
            if self._kernels is not None:
                self.checksum = self._kernels.gather_to_host(route, chunk, pages, filled)
            if self.checksum is None:
                self._gather(route, chunk, pages, np.frombuffer(filled, np.uint8))
        return filled

    def scatter(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        payload: memoryview,
        fence: torch.cuda.Event | None = None,
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
        self.checksum = None
        with self._streamed(fence):
            if self._kernels is not None:
                self.checksum = self._kernels.scatter_from_host(route, chunk, pages, payload)
            if self.checksum is None:
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
        if not self.on_host or not chunk.verbatim:
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
        if not (self.on_host and chunk.verbatim and one_run and whole and full):
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
        try:
            with stream:
                yield
        finally:  # after an error, too: the slot is lent again, or unmapped
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
            where = self._where(chunk, block.layer, route.source, pages)
            view = self._view(block)[:, heads]
            out = torch.from_numpy(buffer[block.offset : block.offset + block.nbytes])
            if route.codec == "raw" and self._stream is None:  # the bits as they are
                self._copier.read(view, where, out.view(view.dtype).view(block.shape))
                continue
            x = torch.empty(block.shape, dtype=view.dtype, device=self._device)
            self._copier.read(view, where, x)
            coded = out if self._stream is None else torch.empty_like(out, device=self._device)
            source, wanted = _elements(route.source, block), _elements(route.destination, block)
            load_codec(route.codec).encode(block.part, x, source, wanted, coded)
            if coded is not out:
                out.copy_(coded, non_blocking=True)

    def _scatter(self, route: Route, chunk: Chunk, pages: Sequence[int], buffer: Words) -> None:
        heads = slice(route.destination_head, route.destination_head + len(route.heads))
        if chunk.verbatim:
            for layer, part in self._verbatim(route, chunk, buffer):
                rows, index = self._row_range(layer, route.destination, heads, pages)
                self._copier.put_rows(rows, index, part)
            return
        for block in blocks(route, chunk):
            coded = as_tensor(buffer[block.offset : block.offset + block.nbytes])
            decoded = load_codec(route.codec).decode(
                block.part,
                coded.to(self._device, non_blocking=True),
                block.shape,
                _elements(route.source, block),
                _elements(route.destination, block),
            )
            where = self._where(chunk, block.layer, route.destination, pages)
            self._copier.write(self._view(block)[:, heads], where, decoded)

    def _view(self, block: Block) -> torch.Tensor:
        layer = self._layers[block.layer]
        view = layer.value if block.part is Part.VALUE else layer.key
        assert view is not None
        return view

    def _where(self, chunk: Chunk, layer: int, group: Group, pages: Sequence[int]) -> Where:
        """The chunk's tokens in the pages of the layer's view."""
        view = self._layers[layer].key
        self._check_pages(pages, view.shape[0] // self._parts_per_page(layer, group))
        tokens = chunk.first_token, chunk.stop_token
        return Where(tuple(pages), *tokens, group.page_size, tokens_of(view))

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
        return int(group.page_size // tokens_of(self._layers[layer].key))

    @staticmethod
    def _check_pages(pages: Sequence[int], count: int) -> None:
        if min(pages) < 0 or max(pages) >= count:
            raise IndexError(f"pages {min(pages)}-{max(pages)} of a cache of {count}")


def _elements(group: Group, block: Block) -> Elements:
    key, value = group.scale(block.layer)
    return Elements(group.dtype, value if block.part is Part.VALUE else key)


def _kernels(layers: Mapping[int, LayerPages], device: torch.device) -> "DevicePages | None":
    try:
        from pd_connector.pages.device import DevicePages
    except ImportError as error:
        logger.warning("pages are moved by torch, block by block, and not by kernels: %s", error)
        return None
    return DevicePages(layers, device)
