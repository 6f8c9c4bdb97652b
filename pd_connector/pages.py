# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between a paged cache and a slot.

`[layer][page][page bytes]` in the slot, as `plan.Chunk` says. On CPU the calling thread copies;
on a GPU the copies run on a stream of their own and are waited for.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.geometry import Geometry
from pd_connector.plan import Chunk

Bytes = npt.NDArray[np.uint8]


class PagedCache:
    """The cache of one rank.

    Args:
        layers: one tensor per layer of the shard, in order, shaped `[page, head, token,
            K and V]` with any strides that leave each page dense; not copied.
        geometry: what the tensors hold.

    Raises:
        UnsupportedGeometryError: a page is not one dense run of `geometry.page_bytes` bytes.
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
        filled = slot[: chunk.nbytes(self.geometry)]
        target = self._by_layer(chunk, filled)
        layers = self._rows[chunk.first_layer : chunk.stop_layer]
        if self._stream is None:
            index = self._checked(pages)
            for rows, out in zip(layers, target, strict=True):
                # numpy moves whole rows; torch's index_copy on CPU is thirty times slower
                np.take(rows.numpy(), index, axis=0, out=out, mode="clip")
            return filled
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            on_device = torch.from_numpy(self._checked(pages)).to(self._device)
            for rows, out in zip(layers, target, strict=True):
                torch.from_numpy(out).copy_(rows.index_select(0, on_device))
        self._stream.synchronize()
        return filled

    def scatter(self, chunk: Chunk, pages: Sequence[int], payload: memoryview) -> None:
        """Copy a landed chunk into pages of this cache."""
        source = self._by_layer(chunk, payload)
        layers = self._rows[chunk.first_layer : chunk.stop_layer]
        if self._stream is None:
            index = self._checked(pages)
            for rows, data in zip(layers, source, strict=True):
                rows.numpy()[index] = data
            return
        with torch.cuda.stream(self._stream):
            on_device = torch.from_numpy(self._checked(pages)).to(self._device)
            for rows, data in zip(layers, source, strict=True):
                # a copy, because a received buffer is read-only and torch wants none such
                rows.index_copy_(0, on_device, torch.from_numpy(data.copy()).to(self._device))
        self._stream.synchronize()

    def _checked(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        index = np.asarray(pages, dtype=np.int64)
        if index.min() < 0 or index.max() >= self.pages:
            raise IndexError(f"pages {index.min()}-{index.max()} of a cache of {self.pages}")
        return index

    def _by_layer(self, chunk: Chunk, buffer: memoryview) -> Bytes:
        layers = chunk.stop_layer - chunk.first_layer
        flat = np.frombuffer(buffer, dtype=np.uint8)
        return flat.reshape(layers, chunk.pages, self.geometry.page_bytes)


def _page_rows(layer: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The layer as bytes, one row a page: a view `[page, page_bytes]`."""
    size = layer.element_size()
    inner = layer.numel() // layer.shape[0] * size
    if inner != geometry.page_bytes or not _dense(layer.shape[1:], layer.stride()[1:]):
        raise UnsupportedGeometryError(
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
