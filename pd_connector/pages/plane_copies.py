# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter plane by plane. Copiers read and write pages; codecs code and decode the planes between."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pd_connector.codec import load_codec
from pd_connector.kv.coding import Elements, Part
from pd_connector.kv.geometry import Group
from pd_connector.memory.device_bytes import DeviceBytes, Payload
from pd_connector.memory.device_slab import filled_on_host
from pd_connector.pages.cache_layers import CacheLayers
from pd_connector.pages.comparing import distances
from pd_connector.pages.copiers import Copier, HostCopier, TorchCopier, as_tensor
from pd_connector.pages.row_matrix import Words
from pd_connector.pages.state_copies import gather_states, scatter_states
from pd_connector.plan.chunks import Chunk, Plane, planes
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.audit import Distance, can_compare
from pd_kernels.checksum import checksum_of


class PlaneCopies:
    """Copies between the pages of one cache and slots, for chunks that kernels cannot take.

    `gather` and `scatter` take payloads in host memory. On a GPU their work is queued on the current stream, and may
    still run when they return. `fill`, `empty` and `compare` take payloads in host or device memory, and their work has
    ended when they return. A payload in device memory passes through host memory, where it is hashed, and they return
    the checksum. For a payload in host memory the caller computes the checksum.

    Args:
        wait: waits until all work queued on the cache's stream is done.

    Attributes:
        copier: copies single planes.
    """

    def __init__(self, layers: CacheLayers, wait: Callable[[], None]) -> None:
        self._layers = layers
        self._wait = wait
        self._device = layers.device
        self._on_gpu = self._device.type == "cuda"
        self.copier: Copier = TorchCopier() if self._on_gpu else HostCopier()

    def gather(self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Words) -> None:
        """Fill a payload, uint8 `[chunk.nbytes(route)]`; see `PagedCache.gather`."""
        if route.section is not None:
            gather_states(self._layers.states, route, chunk, pages, payload)
            return
        heads = slice(route.source_head, route.source_head + len(route.heads))
        if chunk.verbatim:
            where = route, chunk, route.source, heads, pages
            for rows, index, part in self._layers.payload_by_plane(*where, payload):
                self.copier.take_rows(rows, index, part)
            return
        for plane in planes(route, chunk):
            span = self._layers.source_tokens(route, chunk, plane.layer, pages)
            view = self._layers.view(plane)[:, heads]
            out = torch.from_numpy(payload[plane.offset : plane.offset + plane.nbytes])
            if route.codec == "raw" and not self._on_gpu:  # the bits unchanged
                self.copier.read(view, span, out.view(view.dtype).view(plane.shape))
                continue
            x = torch.empty(plane.shape, dtype=view.dtype, device=self._device)
            self.copier.read(view, span, x)
            coded = torch.empty_like(out, device=self._device) if self._on_gpu else out
            source, target = _elements(route.source, plane), _elements(route.destination, plane)
            load_codec(route.codec).encode(plane.part, x, source, target, coded)
            if coded is not out:
                out.copy_(coded, non_blocking=True)

    def scatter(self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Words) -> None:
        """Write a payload into pages; see `PagedCache.scatter`. The payload is only read."""
        if route.section is not None:
            scatter_states(self._layers.states, route, chunk, pages, payload)
            return
        heads = slice(route.destination_head, route.destination_head + len(route.heads))
        if chunk.verbatim:
            where = route, chunk, route.destination, heads, pages
            for rows, index, part in self._layers.payload_by_plane(*where, payload):
                self.copier.put_rows(rows, index, part)
            return
        for plane in planes(route, chunk):
            coded = as_tensor(payload[plane.offset : plane.offset + plane.nbytes])
            decoded = load_codec(route.codec).decode(
                plane.part,
                coded.to(self._device, non_blocking=True),
                plane.shape,
                _elements(route.source, plane),
                _elements(route.destination, plane),
            )
            span = self._layers.destination_tokens(route, chunk, plane.layer, pages)
            self.copier.write(self._layers.view(plane)[:, heads], span, decoded)

    def fill(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> bytes | None:
        """As `PagedCache.gather`, into exactly the payload's bytes."""
        with filled_on_host(payload) as data:
            self.gather(route, chunk, pages, np.frombuffer(data, np.uint8))
            self._wait()
            if isinstance(payload, DeviceBytes):
                return checksum_of(data)
        return None

    def empty(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> bytes | None:
        """As `PagedCache.scatter`."""
        on_host, summed = self._on_host(payload)
        self.scatter(route, chunk, pages, np.frombuffer(on_host, np.uint8))
        self._wait()
        return summed

    def compare(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> tuple[bytes | None, list[Distance]]:
        """As `PagedCache.compare`."""
        on_host, summed = self._on_host(payload)
        if not can_compare(route):
            return summed, []
        words = np.frombuffer(on_host, np.uint8)
        away = distances(self._layers, self.copier, route, chunk, pages, words)
        self._wait()
        return summed, away

    def _on_host(self, payload: Payload) -> tuple[memoryview, bytes | None]:
        """The payload in host memory. Bytes on a device are copied once, and the copy is hashed: a peer may
        still write into the slot."""
        if not isinstance(payload, DeviceBytes):
            return payload, None
        copied = payload.to_host()
        return copied, checksum_of(copied)


def _elements(group: Group, plane: Plane) -> Elements:
    key, value = group.scale(plane.layer)
    return Elements(group.dtype, value if plane.part is Part.VALUE else key)
