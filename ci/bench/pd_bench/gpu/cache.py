# SPDX-License-Identifier: Apache-2.0
"""A rank's paged cache in a GPU's memory, or in host memory to try the benchmark out."""

import torch

from pd_bench.kernels.caches import Model
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.tools.wire import WireCache


class GpuCache(WireCache):
    """All layers of one rank.

    Args:
        model: the part of a model that the rank holds.
        role, tokens: see `WireCache`.
        device: device of the memory.
    """

    def __init__(self, role: str, model: Model, tokens: int, device: torch.device) -> None:
        self.model = model
        self.device = device
        shape = model.layers, model.heads, model.key_dim, model.value_dim
        super().__init__(role, tokens, shape, str(device))
        self.wait()

    @property
    def memory(self) -> str:
        """NIXL's name for this kind of memory."""
        return "VRAM" if self.device.type == "cuda" else "DRAM"

    @property
    def page_bytes(self) -> int:
        """Size of one page of one layer."""
        return int(self.layers[0][0].nbytes)

    def paged(self) -> PagedCache:
        """The cache in the form that an agent takes."""
        return PagedCache(self.layer_pages(), self.geometry, by_kernels=True)

    def wipe(self) -> None:
        super().wipe()
        self.wait()

    def wait(self) -> None:
        """Wait until all work queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
