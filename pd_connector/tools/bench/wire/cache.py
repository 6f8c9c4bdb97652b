# SPDX-License-Identifier: Apache-2.0
"""A paged cache without an engine. Both sides of a transfer know its every byte."""

import random

import numpy as np
import numpy.typing as npt
import torch

from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.tools.bench.wire.size import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PAGE_BYTES,
    PAGE_TOKENS,
    TOKEN_BYTES,
)

LOSSY_ERROR = 0.04
"""Relative L2 error that a page may have after a lossy codec. E4M3 rounds normal values by 0.026."""

_WIDTH = 2 * HEAD_DIM
_SHIFT = 977
"""Each layer has the values of the previous layer, moved by this many elements."""
_SIDES = ("producer", "consumer")


class WireCache:
    """32 layers x 8 KV heads x 128 in bfloat16, pages of 16 tokens as `[head][token][K, V]`.

    Args:
        role: `producer` or `consumer`. The producer's cache holds normal random values, the consumer's holds
            zeros. Each has its prompt's pages in its own random order.
        tokens: of the prompt, a multiple of 16; the cache holds nothing else.
    """

    def __init__(self, role: str, tokens: int) -> None:
        self.tokens = tokens
        self.page_count = tokens // PAGE_TOKENS
        self.tables = {side: _order(side, self.page_count) for side in _SIDES}
        self.pages = self.tables[role]
        shape = (self.page_count, KV_HEADS, PAGE_TOKENS, _WIDTH)
        random_values = torch.Generator().manual_seed(1)
        self._base = torch.randn(shape, generator=random_values).to(torch.bfloat16)
        self.layers = [torch.zeros_like(self._base) for _ in range(LAYERS)]
        if role == "producer":
            for number, layer in enumerate(self.layers):
                layer.copy_(self._values(number))
        layer_numbers = tuple(range(LAYERS))
        group = Group(
            "attention",
            layer_numbers,
            KV_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            PAGE_TOKENS,
            0,
            "bfloat16",
            "bench/HNC",
            heads_apart=True,
        )
        self.geometry = Geometry(Shard(0, LAYERS, 0, 1), (group,))

    @property
    def nbytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    def paged(self) -> PagedCache:
        """The cache in the form that an agent takes."""
        return PagedCache({n: _views(layer) for n, layer in enumerate(self.layers)}, self.geometry)

    def descriptors(self, bases: list[int]) -> npt.NDArray[np.uint64]:
        """Address, length and device of every page of every layer, `[layers * pages, 3]`.

        Args:
            bases: address of each layer.
        """
        offsets = np.arange(self.page_count, dtype=np.uint64) * np.uint64(PAGE_BYTES)
        found = np.zeros((len(bases), self.page_count, 3), np.uint64)
        found[:, :, 0] = np.asarray(bases, np.uint64)[:, None] + offsets
        found[:, :, 1] = PAGE_BYTES
        return found.reshape(-1, 3)

    def wipe(self) -> None:
        for layer in self.layers:
            layer.zero_()

    def check(self, lossy: bool) -> str:
        """Why a consumer's cache is wrong after a transfer; empty if all pages are right."""
        theirs, mine = self.tables["producer"], self.tables["consumer"]
        for number, layer in enumerate(self.layers):
            wanted, found = self._values(number)[theirs], layer[mine]
            if not lossy:
                if not torch.equal(found, wanted):
                    return f"layer {number} differs"
                continue
            exact, off = wanted.float(), found.float() - wanted.float()
            axes = (1, 2, 3)
            error = float((off.square().sum(axes) / exact.square().sum(axes)).max()) ** 0.5
            if not error <= LOSSY_ERROR:
                return f"layer {number}: a page has a relative error of {error:.3f}"
        return ""

    def _values(self, layer: int) -> torch.Tensor:
        return self._base.flatten().roll(layer * _SHIFT).view_as(self._base)


def _order(role: str, count: int) -> list[int]:
    return random.Random(role).sample(range(count), count)


def _views(layer: torch.Tensor) -> LayerPages:
    rows = layer.view(torch.uint8).view(len(layer), KV_HEADS, -1)
    return LayerPages(layer[..., :HEAD_DIM], layer[..., HEAD_DIM:], (rows,))
