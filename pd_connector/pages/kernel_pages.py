# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter by the kernels of `pd_kernels`. One launch moves all layers of a chunk, codes them and
computes the checksum.

Payloads and checksums equal those of the path without kernels (`plane_copies.py`) byte by byte. On tensors in host
memory the same operators run as plain torch, so that almost everything can be tested without a GPU. Importing this
module needs Triton.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pd_connector.codec import DTYPES
from pd_connector.compiler import BackgroundCompile
from pd_connector.kv.geometry import Group
from pd_connector.memory.device_bytes import DeviceBytes, Payload
from pd_connector.pages.copiers import as_tensor
from pd_connector.pages.layer import LayerPages
from pd_connector.pages.own_stream import own_thread
from pd_connector.pages.staging import Stagings, record
from pd_connector.pages.tiles import tokens_of
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_kernels.transfer import Planes, Stored, finish, gather_pages, new_sums, scatter_pages
from pd_kernels.transfer.chunk_launch import ChunkLaunch


class WarmUp:
    """The routes whose kernels have been compiled. Used by one thread.

    Args:
        compile_for: compiles the kernels that gather (True) or scatter (False) chunks of a route. Another thread
            calls it once for each, one at a time; an exception is logged.
    """

    def __init__(self, compile_for: Callable[[Route, bool], None]) -> None:
        self._compile_for = compile_for
        self._turn = threading.Lock()
        self._compiles: dict[tuple[Route, bool], BackgroundCompile] = {}

    def begin(self, route: Route, gathers: bool) -> bool:
        """Start the compilation, unless it has begun; returns whether it has ended, with or without an error."""
        key = route, gathers
        if key not in self._compiles:
            work = functools.partial(self._compile, route, gathers)
            # Not a daemon: see `BackgroundCompile`.
            compiling = BackgroundCompile(work, "pd-compile", turn=self._turn, daemon=False)
            self._compiles[key] = compiling
            compiling.begin()
        return self._compiles[key].ended

    def usable(self, route: Route, gathers: bool) -> bool:
        """Whether kernels may take a chunk. Waits for a compilation that `begin` has started. Other kernels are
        compiled at their first launch."""
        compiling = self._compiles.get((route, gathers))
        return compiling is None or compiling.wait()

    def _compile(self, route: Route, gathers: bool) -> None:
        try:
            self._compile_for(route, gathers)
        except Exception as error:
            logger.error(
                "the kernels that %s layers %d-%d as %s cannot be compiled, and torch moves them plane by "
                "plane: %r",
                "gather" if gathers else "scatter",
                route.layers[0],
                route.layers[-1],
                route.codec,
                error,
            )
            raise


class Moving(NamedTuple):
    """A gather or scatter that has been queued.

    Attributes:
        sums: sums of the payload, in host memory, once the work is done.
        done: event after the whole work, on the device; None on a CPU, where the work is already done.
    """

    sums: torch.Tensor
    nbytes: int
    done: torch.cuda.Event | None

    def finish(self) -> bytes:
        """Wait until the work is done; returns the payload's checksum."""
        if self.done is not None:
            self.done.synchronize()
        return finish(self.sums, self.nbytes)


logger = logging.getLogger("pd_connector.pages.paged_cache")

_KNOWN_PLANES = 512
"""Most cached planes: those for the layer ranges of a few dozen routes."""


class _Part(NamedTuple):
    """Some layers of a cache, as they pass along one route."""

    planes: Planes | None  # None if kernels cannot reach them
    pages: int  # of the engine, in every layer
    view_pages: int  # per page of the engine


class KernelPages:
    """Pages of one cache. Used by one thread, with the cache's own stream current.

    Args:
        layers: the views of each layer, by its number in the model; not copied.
        device: device of all layers.
        copies: a second stream, for copies between host and device. They then run beside the kernels of the next
            chunk. Without it copies are on the current stream.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerPages],
        device: torch.device,
        copies: torch.cuda.Stream | None = None,
    ) -> None:
        self._layers = layers
        self._device = device
        self._stagings = Stagings(device, copies)
        # Making a table on the device takes longer than moving most chunks.
        self._part = functools.lru_cache(_KNOWN_PLANES)(self._make_part)
        self._warm_up = WarmUp(self._compile_for)

    def prepare(self, route: Route, *, gathers: bool) -> bool:
        """Begin to compile the kernels that gather, or scatter, chunks of this route. Returns whether the
        compilation has ended. Until then, a call for such a chunk waits for the compiler."""
        return self._warm_up.begin(route, gathers)

    def gather(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: torch.Tensor
    ) -> torch.Tensor | None:
        """Queue the kernel that copies a chunk out of its pages.

        Args:
            pages: ids of `chunk.source_pages(route)`.
            payload: uint8 `[chunk.nbytes(route)]`, dense, on the cache's device, aligned to 16
                bytes; every byte is written.

        Returns:
            The payload's sums, on the device: `pd_kernels.transfer.finish` makes its checksum from them. None if
            kernels cannot take this chunk; nothing has been queued then.

        Raises:
            IndexError: a page is outside this cache. The device would not notice.
        """
        launch = self._launch(route, chunk, pages, payload, gathers=True)
        return launch and _run(gather_pages, launch)

    def scatter(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: torch.Tensor
    ) -> torch.Tensor | None:
        """Queue the kernel that copies a payload into its pages; see `gather`. `payload` is only read. `pages`
        are ids of `chunk.destination_pages(route)`. The sums are those of the bytes that were read."""
        launch = self._launch(route, chunk, pages, payload, gathers=False)
        return launch and _run(scatter_pages, launch)

    def begin_gather(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> Moving | None:
        """Queue all work that brings a chunk into a slot (`payload`). Returns None if kernels cannot take the chunk.

        A kernel writes directly to a slot on the device. For a slot in host memory, the kernel writes to device
        memory, and a copy engine moves the bytes on. A kernel that wrote across the bus would take multiprocessors
        from the prefill for as long as the bus needs, which is tens of times longer. The copy also works with a slot
        that is not pinned.

        Raises:
            IndexError: a page is outside this cache.
        """
        nbytes = len(payload)
        if isinstance(payload, DeviceBytes):
            sums = self.gather(route, chunk, pages, payload.tensor)
            if sums is None:
                return None
            return Moving(_to_host(sums), nbytes, record(self._device))
        staging = self._stagings.empty(nbytes)
        sums = self.gather(route, chunk, pages, staging.room[:nbytes])
        if sums is None:
            return None
        on_host = _to_host(sums)
        self._stagings.unload(staging, torch.from_numpy(np.frombuffer(payload, np.uint8)))
        return Moving(on_host, nbytes, staging.free)

    def stage(self, payload: Payload) -> None:
        """Begin to copy the payload of the scatter after the next one."""
        self._stagings.load(payload, _source(payload))

    def begin_scatter(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> Moving | None:
        """Queue all work that brings a payload into pages. Returns None if kernels cannot take the chunk.

        The slot is read once, into memory that no peer can write. So a late write by a peer cannot change bytes
        between the sum and the pages.

        Raises:
            IndexError: a page is outside this cache.
        """
        staging = self._stagings.loaded(payload, lambda: _source(payload))
        launch = self._launch(route, chunk, pages, staging.room[: len(payload)], gathers=False)
        if launch is None:
            self._stagings.settle()
            return None
        sums = _to_host(_run(scatter_pages, launch))
        staging.free = record(self._device)
        return Moving(sums, len(payload), staging.free)

    def settle(self) -> None:
        """Wait for all copies, and forget staged payloads."""
        self._stagings.settle()

    def _launch(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        payload: torch.Tensor,
        *,
        gathers: bool,
    ) -> ChunkLaunch | None:
        """The arguments of the operators; None if the operators would not use a kernel."""
        part = self._part(route, chunk.first_layer, chunk.stop_layer, chunk.verbatim, gathers)
        if min(pages) < 0 or max(pages) >= part.pages:
            raise IndexError(f"pages {min(pages)}-{max(pages)} of a cache of {part.pages}")
        if part.planes is None or not self._warm_up.usable(route, gathers):
            return None
        ids = torch.tensor(pages, dtype=torch.int32).to(self._device, non_blocking=True)
        first, tokens = 0, len(pages) * part.view_pages
        if not chunk.verbatim:
            group = route.source if gathers else route.destination
            first, tokens = chunk.first_token % group.page_size, chunk.tokens
        sums = new_sums(len(payload), self._device)
        launch = ChunkLaunch(part.planes, ids, payload, first, tokens, sums)
        return launch if launch.fits_kernels or self._device.type == "cpu" else None

    def _compile_for(self, route: Route, gathers: bool) -> None:
        """Launch every kernel that chunks of a route may need, once, on separate memory."""
        own_thread(self._device)
        apart = route.source.dtype in DTYPES  # other dtypes pass only as whole pages
        ways = [v for v in (True, False) if (route.verbatim if v else apart)]
        with _own_stream(self._device):
            for verbatim in ways:
                for planes in self._kinds(route, verbatim, gathers):
                    room = torch.zeros(planes.nbytes(1), dtype=torch.uint8, device=self._device)
                    page = torch.zeros(1, dtype=torch.int32, device=self._device)
                    sums = new_sums(len(room), self._device)
                    _run(
                        gather_pages if gathers else scatter_pages,
                        ChunkLaunch(planes, page, room, 0, 1, sums),
                    )

    def _kinds(self, route: Route, verbatim: bool, gathers: bool) -> Iterator[Planes]:
        """Small planes that need the kernels of every range of the route's layers. Ranges differ if layers are
        not all aligned, or do not all convert. In these two respects each range is like one of its layers, or
        like all."""
        count = len(route.layers)
        whole = self._make_part(route, 0, count, verbatim, gathers).planes
        if whole is None:
            return
        seen = {(whole.wide, whole.step)}
        yield whole.stand_in()
        if seen == {(True, "none")}:
            return
        for layer in range(count):
            planes = self._make_part(route, layer, layer + 1, verbatim, gathers).planes
            if planes is not None and (planes.wide, planes.step) not in seen:
                seen.add((planes.wide, planes.step))
                yield planes.stand_in()

    def _make_part(
        self, route: Route, first_layer: int, stop_layer: int, verbatim: bool, gathers: bool
    ) -> _Part:
        group = route.source if gathers else route.destination
        head = route.source_head if gathers else route.destination_head
        layers = route.layers[first_layer:stop_layer]
        views = [self._layers[layer] for layer in layers]
        view_pages = group.page_size // tokens_of(views[0].key)
        pages = min(view.key.shape[0] for view in views) // view_pages
        heads = range(head, head + len(route.heads))
        try:
            if verbatim:
                rows = [plane for view in views for plane in _planes(view, heads)]
                planes = Planes.of_rows(rows, view_pages)
            else:
                planes = Planes.of(
                    [view.key for view in views],
                    [view.value for view in views if view.value is not None],
                    group.page_size,
                    route.codec,
                    _stored(route.source, layers),
                    _stored(route.destination, layers),
                    heads,
                )
        except ValueError as error:  # for example pages more than 2 GiB apart
            logger.warning("kernels cannot move layers %d-%d: %s", layers[0], layers[-1], error)
            return _Part(None, pages, view_pages)
        return _Part(planes, pages, view_pages)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A context in which the calling thread uses a GPU stream other than the engine's; at its end the stream's work
    is done."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _run(operator: Callable[..., None], launch: ChunkLaunch) -> torch.Tensor:
    """Queue the operator; returns the payload's sums."""
    sums = launch.sums
    assert sums is not None
    operator(launch.planes, launch.pages, launch.slot, launch.first_token, launch.tokens, sums)
    return sums


def _to_host(sums: torch.Tensor) -> torch.Tensor:
    """Queue a copy of sums into host memory, pinned by torch. Does not wait."""
    return sums.to("cpu", non_blocking=True)


def _source(payload: Payload) -> torch.Tensor:
    if isinstance(payload, DeviceBytes):
        return payload.tensor
    return as_tensor(np.frombuffer(payload, np.uint8))


def _planes(view: LayerPages, heads: range) -> list[torch.Tensor]:
    """Bytes of these heads in each plane, `[page, head, bytes]`; of all heads if heads do not lie apart."""
    assert view.planes, "whole pages pass only where they are dense"
    return [p if p.shape[1] == 1 else p[:, heads.start : heads.stop] for p in view.planes]


def _stored(group: Group, layers: Sequence[int]) -> Stored:
    """How a group's layers are stored, K and V in turn."""
    if group.dtype != "fp8_e4m3" or not group.scales:
        return Stored(DTYPES[group.dtype])
    parts = 2 if group.value_dim else 1
    scales = (scale for layer in layers for scale in group.scale(layer)[:parts])
    return Stored(DTYPES[group.dtype], tuple(scales))
