# SPDX-License-Identifier: Apache-2.0
"""A rank's cache. Both sides know every byte of it."""

import functools
from collections.abc import Sequence

import torch

from chaos.faults import PAGES
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.layer import LayerPages
from pd_connector.pages.paged_cache import PagedCache

LAYERS, HEADS, DIM, PAGE_SIZE = 4, 4, 32, 32
"""A page of one layer has 32 KiB; with half the heads, 16 KiB. This is enough to seal it in place."""
_SPARE = 64
"""Pages for a producer's request after its preemption."""
_ANOTHERS = 7.0
"""The value that another request writes into pages that were taken back."""
_STEP = 2.0**-5


class KnownPages:
    """The pages of a rank.

    Args:
        shard: the heads that it holds.
        filled: whether the pages have their content from the start, like a producer's.
    """

    def __init__(self, shard: Shard, *, filled: bool) -> None:
        group = Group(
            "attention",
            tuple(range(LAYERS)),
            HEADS,
            DIM,
            DIM,
            PAGE_SIZE,
            0,
            "float32",
            "chaos",
            True,
        )
        self.geometry = Geometry(shard, (group,))
        heads = shard.heads(HEADS)
        self._wanted = [
            content(number)[:, heads.start : heads.stop].contiguous() for number in range(LAYERS)
        ]
        spare = [torch.zeros_like(wanted[:_SPARE]) for wanted in self._wanted]
        if filled:
            self._layers = [torch.cat(pair) for pair in zip(self._wanted, spare, strict=True)]
        else:
            self._layers = [torch.zeros_like(wanted) for wanted in self._wanted]
        self.cache = PagedCache(
            {number: _view(layer) for number, layer in enumerate(self._layers)}, self.geometry
        )
        self._reused: list[list[int]] = []
        self._spare = list(range(PAGES, PAGES + _SPARE))

    def wipe(self, pages: Sequence[int]) -> None:
        """Prepare pages for a load."""
        for layer in self._layers:
            layer[pages] = 0

    def right(self, theirs: Sequence[int], ours: Sequence[int]) -> bool:
        """Whether our pages hold what the producer's pages hold."""
        return all(
            torch.equal(layer[ours], wanted[theirs])
            for layer, wanted in zip(self._layers, self._wanted, strict=True)
        )

    def reuse(self, pages: Sequence[int]) -> None:
        """Another request writes into them."""
        for layer in self._layers:
            layer[pages] = _ANOTHERS
        self._reused.append(list(pages))

    def move(self, pages: Sequence[int], content_of: Sequence[int]) -> list[int]:
        """Reuse a producer's pages, and compute the same content again in other pages. Returns the other pages, or
        nothing if there are too few."""
        self.reuse(pages)
        if len(self._spare) < len(pages):
            return []
        moved, self._spare = self._spare[: len(pages)], self._spare[len(pages) :]
        for layer, wanted in zip(self._layers, self._wanted, strict=True):
            layer[moved] = wanted[content_of]
        return moved

    def restore(self) -> int:
        """Forget the reused pages. A producer's pages get their content back.

        Returns:
            The number of cases in which reused pages had been written.
        """
        spoilt = sum(
            not all(bool((layer[pages] == _ANOTHERS).all()) for layer in self._layers)
            for pages in self._reused
        )
        if len(self._layers[0]) > PAGES:
            for layer, wanted in zip(self._layers, self._wanted, strict=True):
                for pages in self._reused:
                    kept = [page for page in pages if page < PAGES]
                    layer[kept] = wanted[kept]
        self._reused.clear()
        self._spare = list(range(PAGES, PAGES + _SPARE))
        return spoilt


@functools.cache
def content(layer: int) -> torch.Tensor:
    """`[page, head, token, K and V]` of a layer, the same in every process.

    INT8 codes it without loss: every group with its own scale (a channel of K in a page, a token of V) has the largest
    magnitude, 127 steps.
    """
    numbers = torch.Generator().manual_seed(layer)
    shape = PAGES, HEADS, PAGE_SIZE, 2 * DIM
    codes = torch.randint(-126, 127, shape, generator=numbers)
    codes[:, :, 0, :DIM] = 127
    codes[:, :, :, DIM] = -127
    return codes * _STEP


def _view(layer: torch.Tensor) -> LayerPages:
    rows = layer.view(torch.uint8).flatten(2)
    return LayerPages(layer[..., :DIM], layer[..., DIM:], (rows,))
