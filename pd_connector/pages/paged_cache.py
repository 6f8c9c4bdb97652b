# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot: where layers, heads and tokens become bytes.

The calling thread waits for the bytes. On a CPU the thread copies them itself (`plane_copies.py`). On a GPU
kernels copy, on a stream of their own (`kernel_pages.py`). Without Triton, or for chunks that kernels cannot
take, torch copies.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pd_connector.kv.coding import RAW
from pd_connector.kv.geometry import Geometry, Group
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.cache_layers import CacheLayers
from pd_connector.pages.layer import LayerPages, StatePages
from pd_connector.pages.one_ahead import OneAhead
from pd_connector.pages.own_stream import own_streams, own_thread
from pd_connector.pages.plane_copies import PlaneCopies
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import token_bytes
from pd_connector.protocol.consuming.audit import Distance

if TYPE_CHECKING:
    from pd_connector.pages.kernel_pages import KernelPages

__all__ = ["LayerPages", "PagedCache", "StatePages"]

logger = logging.getLogger("pd_connector.pages.paged_cache")


class PagedCache:
    """The cache of one rank. One thread gathers and scatters.

    Attributes:
        last_checksum: checksum of the payload that the last `gather` wrote or the last `scatter` read, if a kernel has
            computed it; None if the caller has to.
        passed: the coarsest codec of all KV that was written into this cache. KV computed from it has the same error.

    Args:
        layers: the views of each layer, by its number in the model; not copied.
        geometry: what the layers hold.
        by_kernels: whether `pd_kernels` moves pages, on a CPU as plain torch. Default: if the cache is on a
            GPU and Triton is installed.
        clears: whether a page may hold NaN in these layers, such as bytes of a state or of another dtype. Attention
            reads whole pages, and zero times NaN is NaN. So a load zeroes the part of a page that it does not fill.

    Raises:
        UnsupportedGeometryError: a layer differs from the geometry.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerPages | StatePages],
        geometry: Geometry,
        *,
        by_kernels: bool | None = None,
        clears: bool = False,
    ) -> None:
        self.geometry = geometry
        self._clears = clears
        self.last_checksum: bytes | None = None
        self.passed = RAW.name
        self._layers = CacheLayers(layers, geometry)
        self._copies = PlaneCopies(self._layers, self._wait)
        self._device = self._layers.device
        self._stream: torch.cuda.Stream | None
        self._stream, copies = own_streams(self._device)
        use_kernels = self._stream is not None if by_kernels is None else by_kernels
        self._kernels = (
            _kernels(self._layers.by_number, self._device, copies) if use_kernels else None
        )
        self._ahead = OneAhead(self._kernels, self._stream) if self._kernels else None

    @property
    def device(self) -> torch.device:
        """The device of all layers."""
        return self._device

    @property
    def slot_device(self) -> torch.device | None:
        """The device on which slots of this cache may lie; None if no kernels move its pages."""
        return None if self._kernels is None else self._device

    def enter_thread(self) -> None:
        """Make the calling thread a private thread on the cache's device; see `own_thread`."""
        own_thread(self._device)

    @property
    def pages(self) -> int:
        """The number of pages in the layer with the fewest."""
        return self._layers.pages

    def layer(self, number: int) -> LayerPages:
        """The views of a layer, by its number in the model."""
        return self._layers.by_number[number]

    @property
    def on_host(self) -> bool:
        """Whether this machine's processors read and write pages directly."""
        return self._stream is None and self._kernels is None

    @property
    def largest_page_bytes(self) -> int:
        """Bytes of the largest piece that is never divided: one page of one layer, in the group with the largest pages,
        or one unit of a state."""
        return max(
            max(section.unit_bytes for section in group.sections)
            if group.kind == "state"
            else len(self.geometry.heads(group)) * group.page_entries * token_bytes(group)
            for group in self.geometry.groups
        )

    def prepare(self, routes: Sequence[Route], *, gathers: bool) -> bool:
        """Prepare to gather, or scatter, chunks of these routes. Returns whether that has ended. It can take
        seconds if kernels must be compiled; another thread compiles them."""
        if self._kernels is None:
            return True
        done = [
            self._kernels.prepare(route, gathers=gathers) for route in routes if route.plain
        ]  # begin all
        return all(done)

    def fence(self) -> torch.cuda.Event | None:
        """An event in the calling thread's stream. `gather` or `scatter` with this fence touches pages only after the
        work before the event. None on a CPU, where such work is already done."""
        return (
            None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        )

    def happened(self, fence: torch.cuda.Event | None) -> bool:
        """Whether the work before a `fence` is done, so that no call has to wait for it."""
        return self._stream is None or fence is None or bool(fence.query())

    def gather(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        slot: Payload,
        fence: torch.cuda.Event | None = None,
    ) -> Payload:
        """Write a chunk's payload into the slot; returns the filled part. The payload is complete at the return,
        in host memory or on the device, so the transport needs no knowledge of streams.

        Args:
            pages: ids of `chunk.source_pages(route)`.
            slot: in host memory, or on the cache's device (`slot_device`).

        Raises:
            IndexError: a page is outside this cache.
            ValueError: the slot is too small.
        """
        nbytes = chunk.nbytes(route)
        if len(slot) < nbytes:
            raise ValueError(f"slot of {len(slot)} bytes: the chunk has {nbytes} bytes")
        payload = slot[:nbytes]
        self.last_checksum = None
        with self._streamed(fence):
            if self._ahead is not None and route.plain:
                self.last_checksum = self._ahead.gather(route, chunk, pages, payload, fence)
            if self.last_checksum is None:
                self.last_checksum = self._copies.fill(route, chunk, pages, payload)
        return payload

    def gather_next(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        slot: Payload,
        fence: torch.cuda.Event | None = None,
    ) -> None:
        """Announce the probable `gather` after the next one; a device begins with it early. `settle` must
        follow, whether or not that `gather` comes. The slot must be free. Pages may belong to another request by
        then: the bytes read count only if that `gather` is called."""
        nbytes = chunk.nbytes(route)
        if self._ahead is not None and route.plain and len(slot) >= nbytes:
            self._ahead.gather_next(route, chunk, pages, slot[:nbytes], fence)

    def scatter_next(self, payload: Payload) -> None:
        """Announce the probable payload of the `scatter` after the next one, as `gather_next`: a device copies it early."""
        if self._ahead is not None:
            self._ahead.scatter_next(payload)

    def settle(self) -> None:
        """Wait until nothing that `gather_next` or `scatter_next` began is under way."""
        if self._ahead is not None:
            self._ahead.settle()

    def clear(
        self,
        tables: Sequence[Sequence[int]],
        first_token: int,
        stop_token: int,
        fence: torch.cuda.Event | None = None,
    ) -> None:
        """Zero the pages that a load of tokens [first_token, stop_token) fills only in part, before the load writes
        anything. Does nothing unless the cache `clears`. A page with tokens before the load is not zeroed, because it
        holds their KV; in `uncached` tables no page does.

        Args:
            tables: page ids by table, from the prompt's start; -1: none.

        Raises:
            IndexError: a page is outside this cache.
        """
        if not self._clears or stop_token <= first_token:
            return
        zeroed = False
        with self._streamed(fence):
            for group in self.geometry.groups:
                if group.kind == "state":
                    continue
                tokens = group.page_size * self.geometry.stripe(group).size
                table = tables[group.table]
                held = 0 if group.table in self.geometry.uncached else first_token
                partly = {stop_token // tokens} if stop_token % tokens else set()
                if group.window:  # its first page may begin before the window
                    partly |= {number for number, page in enumerate(table) if page >= 0}
                for number in partly:
                    if number * tokens >= held and number < len(table) and table[number] >= 0:
                        self._layers.zero(group, table[number])
                        zeroed = True
            if zeroed:
                self._wait()  # the page may be given back without another write here

    def scatter(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        payload: Payload,
        fence: torch.cuda.Event | None = None,
    ) -> None:
        """Write a landed chunk's tokens into pages of this cache.

        Args:
            pages: ids of `chunk.destination_pages(route)`.

        Raises:
            IndexError: a page is outside this cache.
            ValueError: the payload does not have the chunk's size. Nothing has been written then.
        """
        if len(payload) != chunk.nbytes(route):
            raise ValueError(
                f"payload of {len(payload)} bytes: the chunk has {chunk.nbytes(route)} bytes"
            )
        self.last_checksum = None
        with self._streamed(fence):
            if self._ahead is not None and route.plain:
                self.last_checksum = self._ahead.scatter(route, chunk, pages, payload)
            if self.last_checksum is None:
                self.last_checksum = self._copies.empty(route, chunk, pages, payload)

    def compare(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        payload: Payload,
        fence: torch.cuda.Event | None = None,
    ) -> list[Distance]:
        """Distance between a landed chunk and the pages' contents. Nothing is written.

        Args:
            pages: ids of `chunk.destination_pages(route)`; -1: no longer held.

        Returns:
            One distance for K and one for V of each layer. None for caches whose elements cannot be read as
            numbers, and none if all pages are gone.

        Raises:
            IndexError: a page is outside this cache.
            ValueError: the payload does not have the chunk's size.
        """
        if len(payload) != chunk.nbytes(route):
            raise ValueError(
                f"payload of {len(payload)} bytes: the chunk has {chunk.nbytes(route)} bytes"
            )
        with self._streamed(fence):
            self.last_checksum, distances = self._copies.compare(route, chunk, pages, payload)
            return distances

    def pieces(
        self, group: Group, first_head: int, route: Route, chunk: Chunk, pages: Sequence[int]
    ) -> Pieces | None:
        """The memory of a verbatim chunk's payload in this cache, in order; None if it is not in host
        memory.

        Args:
            group: the route's source or destination, whichever is this cache's.
            first_head: place of the route's first head in this cache.
            pages: ids of the chunk's pages in this cache.

        Raises:
            IndexError: a page is outside this cache.
        """
        if not self.on_host or not chunk.verbatim:
            return None
        return self._layers.pieces(group, first_head, route, chunk, pages)

    def in_place(self, route: Route, chunk: Chunk, pages: Sequence[int]) -> memoryview | None:
        """The chunk's payload in place, if it is one run of full pages of one layer in the cache; None if it must be
        gathered."""
        if not (self.on_host and chunk.verbatim):
            return None
        return self._layers.run_of_pages(route, chunk, pages)

    @contextlib.contextmanager
    def _streamed(self, fence: torch.cuda.Event | None) -> Iterator[None]:
        """A context that queues work on this cache's own stream, after `fence`. After an error none of the work
        is under way, because the slot will be lent again, or unmapped."""
        stream: AbstractContextManager[object] = contextlib.nullcontext()
        if self._stream is not None:
            stream = torch.cuda.stream(self._stream)
            if fence is not None:
                self._stream.wait_event(fence)
        try:
            with stream:
                yield
        except BaseException:
            self._wait()
            if self._kernels is not None:
                self._kernels.settle()
            raise

    def _wait(self) -> None:
        """Wait for everything on this cache's own stream."""
        if self._stream is not None:
            self._stream.synchronize()


def _kernels(*arguments: Any) -> "KernelPages | None":
    """`KernelPages` with these arguments; None if it cannot be used."""
    try:
        from pd_connector.pages.kernel_pages import KernelPages
    except ImportError as error:
        logger.warning("torch moves pages plane by plane, without kernels: %s", error)
        return None
    return KernelPages(*arguments)
