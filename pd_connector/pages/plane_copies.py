# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter plane by plane. Copiers read and write pages; codecs code and decode the planes between."""

from collections.abc import Sequence

import torch

from pd_connector.codec import load_codec
from pd_connector.kv.coding import Elements, Part
from pd_connector.kv.geometry import Group
from pd_connector.pages.cache_layers import CacheLayers
from pd_connector.pages.copiers import Copier, HostCopier, TorchCopier, as_tensor
from pd_connector.pages.row_matrix import Words
from pd_connector.pages.state_copies import gather_states, scatter_states
from pd_connector.plan.chunks import Chunk, Plane, planes
from pd_connector.plan.route import Route


class PlaneCopies:
    """Copies between the pages of one cache and payloads in host memory. On a GPU all work is queued on the current
    stream, and may still run when a call returns.

    Attributes:
        copier: copies single planes.
    """

    def __init__(self, layers: CacheLayers) -> None:
        self._layers = layers
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
            source, wanted = _elements(route.source, plane), _elements(route.destination, plane)
            load_codec(route.codec).encode(plane.part, x, source, wanted, coded)
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


def _elements(group: Group, plane: Plane) -> Elements:
    key, value = group.scale(plane.layer)
    return Elements(group.dtype, value if plane.part is Part.VALUE else key)
