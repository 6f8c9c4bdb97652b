# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot: where layers, heads and tokens become bytes.

The calling thread waits for them. On CPU it copies itself (`block_copies.py`). On a GPU kernels do it, on a stream of
their own (`kernel_pages.py`); where Triton is missing, or a chunk is not for kernels, torch's operations do.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pd_connector.kv.geometry import Geometry, Group
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.cache_layers import CacheLayers
from pd_connector.pages.layer import LayerPages
from pd_connector.pages.one_ahead import GatherCall, OneAhead
from pd_connector.pages.own_stream import own_streams, own_thread
from pd_connector.pages.slot_copies import SlotCopies
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import token_bytes
from pd_connector.protocol.audit import Distance

if TYPE_CHECKING:
    from pd_connector.pages.kernel_pages import KernelPages

__all__ = ["LayerPages", "PagedCache"]

logger = logging.getLogger("pd_connector.pages.paged_cache")


class PagedCache:
    """The cache of one rank. One thread gathers and scatters.

    Attributes:
        last_checksum: of the payload that the last `gather` wrote, or that the last `scatter` brought into
            pages, if a kernel has summed it on the way; None if the caller has to sum it.

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
        self.last_checksum: bytes | None = None
        self._layers = CacheLayers(layers, geometry)
        self._copies = SlotCopies(self._layers, self._wait)
        self._device = self._layers.device
        self._stream: torch.cuda.Stream | None
        self._stream, copies = own_streams(self._device)
        wanted = self._stream is not None if by_kernels is None else by_kernels
        self._kernels = _kernels(self._layers.by_number, self._device, copies) if wanted else None
        self._ahead = OneAhead(self._kernels, self._stream) if self._kernels else None

    @property
    def device(self) -> torch.device:
        """Where all layers lie."""
        return self._device

    @property
    def slot_device(self) -> torch.device | None:
        """The device on which slots of this cache may lie; None where no kernels move its pages."""
        return None if self._kernels is None else self._device

    def enter_thread(self) -> None:
        """Make the calling thread one of our own on the cache's device; see `own_thread`."""
        own_thread(self._device)

    @property
    def pages(self) -> int:
        """Pages of the cache: of the layer that has the fewest."""
        return self._layers.pages

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

    def happened(self, fence: torch.cuda.Event | None) -> bool:
        """Whether the work before a `fence` is done, so that nothing waits for it any more."""
        return self._stream is None or fence is None or bool(fence.query())

    def gather(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        slot: Payload,
        fence: torch.cuda.Event | None = None,
    ) -> Payload:
        """Write a chunk's payload into the slot; returns the part of it that is filled. All of it is there
        then, in host memory or on the device: whoever posts it need not know of streams.

        Args:
            pages: ids of `chunk.pages(route.source.page_size)`.
            slot: in host memory, or on the cache's device (`slot_device`).

        Raises:
            IndexError: a page is not of this cache.
            ValueError: the slot is too small.
        """
        nbytes = chunk.nbytes(route)
        if len(slot) < nbytes:
            raise ValueError(f"slot of {len(slot)} bytes: the chunk has {nbytes} bytes")
        call = GatherCall(route, chunk, pages, slot[:nbytes], fence)
        self.last_checksum = None
        with self._streamed(fence):
            if self._ahead is not None:
                self.last_checksum = self._ahead.gather(call)
            if self.last_checksum is None:
                self.last_checksum = self._copies.fill(call)
        return call.slot

    def gather_next(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        slot: Payload,
        fence: torch.cuda.Event | None = None,
    ) -> None:
        """The `gather` after the next one will probably be this: a device begins with it early. `settle` must
        follow, whether or not it comes. The slot must be free. Pages may be another's by then: what was read
        of them counts only if that `gather` is called."""
        nbytes = chunk.nbytes(route)
        if self._ahead is not None and len(slot) >= nbytes:
            self._ahead.gather_next(GatherCall(route, chunk, pages, slot[:nbytes], fence))

    def scatter_next(self, payload: Payload) -> None:
        """The `scatter` after the next one will probably be of this payload: it is copied to the device
        meanwhile. `settle` must follow, whether or not that `scatter` comes."""
        if self._ahead is not None:
            self._ahead.scatter_next(payload)

    def settle(self) -> None:
        """Nothing that was begun by `gather_next` or `scatter_next` is under way any more."""
        if self._ahead is not None:
            self._ahead.settle()

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
            pages: ids of `chunk.pages(route.destination.page_size)`.

        Raises:
            IndexError: a page is not of this cache.
            ValueError: the payload has not the chunk's size. Nothing has been written then.
        """
        if len(payload) != chunk.nbytes(route):
            raise ValueError(
                f"payload of {len(payload)} bytes: the chunk has {chunk.nbytes(route)} bytes"
            )
        self.last_checksum = None
        with self._streamed(fence):
            if self._ahead is not None:
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
        """How far a landed chunk is from what the pages hold. Nothing is written.

        Args:
            pages: ids of `chunk.pages(route.destination.page_size)`; -1: not held any more.

        Returns:
            One distance for K and one for V of each layer; none for caches whose elements cannot
            be read as numbers, and none where all pages are gone.

        Raises:
            IndexError: a page is not of this cache.
            ValueError: the payload has not the chunk's size.
        """
        if len(payload) != chunk.nbytes(route):
            raise ValueError(
                f"payload of {len(payload)} bytes: the chunk has {chunk.nbytes(route)} bytes"
            )
        with self._streamed(fence):
            self.last_checksum, found = self._copies.compare(route, chunk, pages, payload)
            return found

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
        return self._layers.pieces(group, first_head, route, chunk, pages)

    def in_place(self, route: Route, chunk: Chunk, pages: Sequence[int]) -> memoryview | None:
        """The chunk's payload where it lies in the cache, if it is one run of full pages of one
        layer there; None where it has to be gathered."""
        if not (self.on_host and chunk.verbatim):
            return None
        return self._layers.run_of_pages(route, chunk, pages)

    @contextlib.contextmanager
    def _streamed(self, fence: torch.cuda.Event | None) -> Iterator[None]:
        """What is queued within is on this cache's own stream, after `fence`. After an error nothing of it is
        under way: the slot is lent again, or unmapped."""
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
        """Until everything on this cache's own stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def _kernels(*arguments: Any) -> "KernelPages | None":
    """As `KernelPages` takes them."""
    try:
        from pd_connector.pages.kernel_pages import KernelPages
    except ImportError as error:
        logger.warning("pages are moved by torch, block by block, and not by kernels: %s", error)
        return None
    return KernelPages(*arguments)
