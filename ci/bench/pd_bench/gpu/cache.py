# SPDX-License-Identifier: Apache-2.0
"""A rank's paged cache in a GPU's memory, or in host memory to try the benchmark out."""

import random

import numpy as np
import numpy.typing as npt
import torch

from pd_bench.kernels.caches import Model
from pd_connector.kv.geometry import Geometry, Group, Shard, pages_for
from pd_connector.pages.layer import LayerPages
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.tools.wire import LOSSY_ERROR

PAGE_TOKENS = 16
_SHIFT = 977
"""Each layer has the values of the previous layer, moved by this many elements."""
_SIDES = ("producer", "consumer")


class GpuCache:
    """All layers of one rank in bfloat16, pages of 16 tokens as `[head][token][K, V]`.

    Args:
        role: `producer` or `consumer`. The producer's cache holds normal random values, the consumer's
            holds zeros. Each has its prompt's pages in its own random order.
        model: the part of a model that the rank holds.
        tokens: of the prompt; the last page may be partly filled. The cache holds nothing else.
        device: device of the memory.
    """

    def __init__(self, role: str, model: Model, tokens: int, device: torch.device) -> None:
        self.model = model
        self.tokens = tokens
        self.device = device
        self.page_count = pages_for(tokens, PAGE_TOKENS)
        pages = range(self.page_count)
        self.tables = {side: random.Random(side).sample(pages, len(pages)) for side in _SIDES}
        self.pages = self.tables[role]
        shape = (self.page_count, model.heads, PAGE_TOKENS, model.key_dim + model.value_dim)
        numbers = torch.Generator().manual_seed(1)
        self._base = torch.randn(shape, generator=numbers).to(torch.bfloat16).to(device)
        self.layers = [torch.zeros_like(self._base) for _ in range(model.layers)]
        if role == "producer":
            for number, layer in enumerate(self.layers):
                layer.copy_(self._values(number))
        self.wait()

    @property
    def memory(self) -> str:
        """NIXL's name for this kind of memory."""
        return "VRAM" if self.device.type == "cuda" else "DRAM"

    @property
    def page_bytes(self) -> int:
        """Size of one page of one layer."""
        return int(self.layers[0][0].nbytes)

    @property
    def geometry(self) -> Geometry:
        model = self.model
        group = Group(
            "attention" if model.value_dim else "latent",
            tuple(range(model.layers)),
            model.heads,
            model.key_dim,
            model.value_dim,
            PAGE_TOKENS,
            0,
            "bfloat16",
            "bench/HNC",
            heads_apart=True,
        )
        return Geometry(Shard(0, model.layers, 0, 1), (group,))

    def layer_pages(self) -> dict[int, LayerPages]:
        """The cache in the form that kernels take."""
        return {number: self._views(layer) for number, layer in enumerate(self.layers)}

    def paged(self) -> PagedCache:
        """The cache in the form that an agent takes."""
        return PagedCache(self.layer_pages(), self.geometry, by_kernels=True)

    def descriptors(self, bases: list[int], device: int) -> npt.NDArray[np.uint64]:
        """Address, length and device of every page of every layer, `[layers * pages, 3]`.

        Args:
            bases: address of each layer.
        """
        offsets = np.arange(self.page_count, dtype=np.uint64) * np.uint64(self.page_bytes)
        table = np.empty((len(bases), self.page_count, 3), np.uint64)
        table[:, :, 0] = np.asarray(bases, np.uint64)[:, None] + offsets
        table[:, :, 1] = self.page_bytes
        table[:, :, 2] = device
        return table.reshape(-1, 3)

    def wipe(self) -> None:
        for layer in self.layers:
            layer.zero_()
        self.wait()

    def wait(self) -> None:
        """Wait until all work queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self, lossy: bool) -> str:
        """Why a consumer's cache is wrong after a transfer; empty if all tokens are right."""
        theirs, mine = self.tables["producer"], self.tables["consumer"]
        tail = self.tokens - (self.page_count - 1) * PAGE_TOKENS
        for number, layer in enumerate(self.layers):
            expected, actual = self._values(number)[theirs], layer[mine]
            for pages in (expected, actual):  # the slots after the prompt belong to no token
                pages[-1, :, tail:] = 0
            if not lossy:
                if not torch.equal(actual, expected):
                    return f"layer {number} differs"
                continue
            exact, off = expected.float(), actual.float() - expected.float()
            error = float((off.square().sum((1, 2, 3)) / exact.square().sum((1, 2, 3))).max())
            if not error**0.5 <= LOSSY_ERROR:
                return f"layer {number}: a page has a relative error of {error**0.5:.3f}"
        return ""

    def _values(self, layer: int) -> torch.Tensor:
        return self._base.flatten().roll(layer * _SHIFT).view_as(self._base)

    def _views(self, layer: torch.Tensor) -> LayerPages:
        key_dim = self.model.key_dim
        rows = layer.view(torch.uint8).flatten(2)
        value = layer[..., key_dim:] if self.model.value_dim else None
        return LayerPages(layer[..., :key_dim], value, (rows,))
