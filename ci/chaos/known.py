# SPDX-License-Identifier: Apache-2.0
"""A rank's cache. Both sides know every byte of it."""

import functools
from collections.abc import Sequence

import torch

from chaos.faults import PAGES
from pd_connector.kv.geometry import Geometry, Group, Section, Shard, state_group
from pd_connector.pages.layer import LayerPages, StatePages
from pd_connector.pages.paged_cache import PagedCache

LAYERS, HEADS, DIM, PAGE_SIZE = 4, 4, 32, 32
"""A page of one layer has 32 KiB; with half the heads, 16 KiB. This is enough to seal it in place."""
_SPARE = 64
"""Pages for a producer's request after its preemption."""
_ANOTHERS = 7.0
"""The value that another request writes into pages that were taken back."""
_STEP = 2.0**-5
STATE_LAYERS = range(LAYERS, LAYERS + 2)
ROWS = 3
SECTIONS = (
    Section("conv.q", HEADS, ROWS, DIM, "float32"),
    Section("conv.k", HEADS, ROWS, DIM, "float32"),
    Section("conv.v", HEADS, ROWS, DIM, "float32"),
    Section("ssm", HEADS, DIM, DIM, "float32"),
)
"""States as those of a gated delta net. Q, K and V of a convolution lie side by side in each of its rows."""


class KnownPages:
    """The pages of a rank.

    Args:
        shard: the heads that it holds.
        filled: whether the pages have their content from the start, like a producer's.
        states: whether there are layers of states, too. Those of a request are in the page with the number of its first
            page of KV, in a table of their own.
    """

    def __init__(self, shard: Shard, *, filled: bool, states: bool = False) -> None:
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
        groups = (group, state_group(tuple(STATE_LAYERS), SECTIONS, 1)) if states else (group,)
        self.geometry = Geometry(shard, groups)
        self.states = states
        heads = shard.heads(HEADS)
        self._wanted = [
            content(number)[:, heads.start : heads.stop].contiguous() for number in range(LAYERS)
        ]
        if states:
            self._wanted += [
                part[..., heads.start : heads.stop, :].contiguous()
                for layer in STATE_LAYERS
                for part in state_content(layer)
            ]
        spare = [torch.zeros_like(wanted[:_SPARE]) for wanted in self._wanted]
        if filled:
            self._layers = [torch.cat(pair) for pair in zip(self._wanted, spare, strict=True)]
        else:
            self._layers = [torch.zeros_like(wanted) for wanted in self._wanted]
        views: dict[int, LayerPages | StatePages] = {
            number: _view(layer) for number, layer in enumerate(self._layers[:LAYERS])
        }
        for place, number in enumerate(STATE_LAYERS if states else ()):
            first = LAYERS + 2 * place
            views[number] = _state_view(*self._layers[first : first + 2])
        self.cache = PagedCache(views, self.geometry)
        self._reused: list[list[int]] = []
        self._spare = list(range(PAGES, PAGES + _SPARE))

    def wipe(self, pages: Sequence[int]) -> None:
        """Prepare pages for a load."""
        for layer in self._layers:
            layer[pages] = 0

    def right(self, theirs: Sequence[int], ours: Sequence[int]) -> bool:
        """Whether our pages hold what the producer's pages hold."""
        return self.states_are(theirs, ours) and all(
            torch.equal(layer[ours], wanted[theirs])
            for layer, wanted in zip(self._layers[:LAYERS], self._wanted[:LAYERS], strict=True)
        )

    def states_are(self, theirs: Sequence[int], ours: Sequence[int]) -> bool:
        """Whether the states of a load are the producer's, and no other page of states was written."""
        return all(
            torch.equal(layer[ours[0]], wanted[theirs[0]]) and not layer[ours[1:]].any()
            for layer, wanted in zip(self._layers[LAYERS:], self._wanted[LAYERS:], strict=True)
        )

    def states_untouched(self, ours: Sequence[int]) -> bool:
        """Whether nothing was written into the states of a load since `wipe`."""
        return not any(bool(layer[ours].any()) for layer in self._layers[LAYERS:])

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


@functools.cache
def state_content(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's convolutions, `[page, row, Q, K and V, unit, dim]`, and its matrices, `[page, row, unit, dim]`, the same in
    every process."""
    numbers = torch.Generator().manual_seed(layer)
    return (
        torch.randint(1, 99, (PAGES, ROWS, 3, HEADS, DIM), generator=numbers).float(),
        torch.randint(1, 99, (PAGES, DIM, HEADS, DIM), generator=numbers).float(),
    )


def _state_view(convolution: torch.Tensor, matrix: torch.Tensor) -> StatePages:
    parts = [convolution[:, :, part].transpose(1, 2) for part in range(3)]
    return StatePages((*parts, matrix.transpose(1, 2)))


def _view(layer: torch.Tensor) -> LayerPages:
    rows = layer.view(torch.uint8).flatten(2)
    return LayerPages(layer[..., :DIM], layer[..., DIM:], (rows,))
