# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot.

`[layer][page][page bytes]` in the slot, as `plan.Chunk` says. On CPU these are torch copies in
the calling thread; on a GPU they run on a stream of their own and are waited for.
"""

import warnings
from collections.abc import Sequence

import torch

from pd_connector.errors import UnsupportedGeometry
from pd_connector.geometry import Geometry
from pd_connector.plan import Chunk

# Received buffers are read-only and are only read here.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class PagedCache:
    """The cache of one rank.

    Args:
        layers: one tensor per layer of the shard, in order, shaped `[page, head, token,
            K and V]` with any strides that leave each page dense; not copied.
        geometry: what the tensors hold.

    Raises:
        UnsupportedGeometry: a page is not one dense run of `geometry.page_bytes` bytes.
    """

    def __init__(self, layers: Sequence[torch.Tensor], geometry: Geometry) -> None:
        self.geometry = geometry
        self.pages = layers[0].shape[0]
        self._rows = [_page_rows(layer, geometry) for layer in layers]
        self._device = layers[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fence(self) -> torch.cuda.Event | None:
        """A point in the calling thread's stream; work before it is done when `gather`
        with this fence reads. None on CPU, where that is so already."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def gather(
        self,
        chunk: Chunk,
        pages: Sequence[int],
        slot: memoryview,
        fence: torch.cuda.Event | None = None,
    ) -> memoryview:
        """Copy a chunk's pages into the slot; returns the part of it that is filled."""
        nbytes = chunk.nbytes(self.geometry)
        filled = slot[:nbytes]
        out = self._by_layer(chunk, filled)
        with torch.cuda.stream(self._stream):
            if self._stream is not None and fence is not None:
                self._stream.wait_event(fence)
            index = torch.tensor(pages, device=self._device)
            for layer, rows in enumerate(self._rows[chunk.first_layer : chunk.stop_layer]):
                if self._stream is None:
                    torch.index_select(rows, 0, index, out=out[layer])
                else:
                    out[layer].copy_(rows.index_select(0, index))
        self._wait()
        return filled

    def scatter(self, chunk: Chunk, pages: Sequence[int], payload: memoryview) -> None:
        """Copy a landed chunk into pages of this cache."""
        source = self._by_layer(chunk, payload)
        with torch.cuda.stream(self._stream):
            index = torch.tensor(pages, device=self._device)
            for layer, rows in enumerate(self._rows[chunk.first_layer : chunk.stop_layer]):
                rows.index_copy_(0, index, source[layer].to(self._device))
        self._wait()

    def _by_layer(self, chunk: Chunk, buffer: memoryview) -> torch.Tensor:
        layers = chunk.stop_layer - chunk.first_layer
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        return flat.view(layers, chunk.pages, self.geometry.page_bytes)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _page_rows(layer: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The layer as bytes, one row a page: a view `[page, page_bytes]`."""
    size = layer.element_size()
    inner = layer.numel() // layer.shape[0] * size
    if inner != geometry.page_bytes or not _dense(layer.shape[1:], layer.stride()[1:]):
        raise UnsupportedGeometry(
            f"cache layer of shape {tuple(layer.shape)}, strides {layer.stride()}: each page must "
            f"be one dense run of {geometry.page_bytes} bytes, as all layers of one kind are"
        )
    rows = torch.empty(0, dtype=torch.uint8, device=layer.device)
    return rows.set_(
        layer.untyped_storage(),
        layer.storage_offset() * size,
        (layer.shape[0], inner),
        (layer.stride(0) * size, 1),
    )


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
