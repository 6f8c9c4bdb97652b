# SPDX-License-Identifier: Apache-2.0
"""States of models, shared among ranks, in the orders in which engines keep them. Elements are numbered."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from hypothesis import strategies as st

from pd_connector.kv.geometry import STATE_BYTES, Geometry, Section, Shard, state_group
from pd_connector.pages.paged_cache import PagedCache, StatePages

Order = Literal["SD", "DS", "apart"]
"""A convolution as `[page, row, dim]`, as `[page, dim, row]`, or a tensor `[page, unit, dim, row]` for each section."""
ORDERS: tuple[Order, ...] = ("SD", "DS", "apart")

Sections = tuple[Section, ...]


def gdn(keys: int, values: int, rows: int = 3, dim: int = 8) -> Sections:
    """Gated DeltaNet and KDA: a convolution of Q, K and V, and a matrix of each value head."""
    return (
        Section("conv.q", keys, rows, dim, "bfloat16"),
        Section("conv.k", keys, rows, dim, "bfloat16"),
        Section("conv.v", values, rows, dim, "bfloat16"),
        Section("ssm", values, dim, dim, "float32"),
    )


def mamba2(heads: int, groups: int, rows: int = 3, dim: int = 4, state: int = 16) -> Sections:
    """Mamba2: x by head, B and C by group, of which there may be fewer than ranks."""
    return (
        Section("conv.x", heads, rows, dim, "bfloat16"),
        Section("conv.b", groups, rows, state, "bfloat16"),
        Section("conv.c", groups, rows, state, "bfloat16"),
        Section("ssm", heads, dim, state, "float32"),
    )


def mamba1(inner: int, state: int = 4) -> Sections:
    """Mamba1: every channel is a unit."""
    return Section("conv.x", inner, 3, 1, "float16"), Section("ssm", inner, 1, state, "float32")


def short_conv(dims: int) -> Sections:
    """LFM2's short convolution: no matrix."""
    return (Section("conv.x", dims, 2, 1, "float32"),)


def linear(heads: int, dim: int = 8) -> Sections:
    """Linear attention: no convolution."""
    return (Section("ssm", heads, dim, dim, "float32"),)


def replicated(dims: int) -> Sections:
    """A convolution that every rank holds whole."""
    return (Section("conv.x", 1, 3, dims, "bfloat16"),)


KINDS = {
    "gdn": gdn(2, 4),
    "kda": gdn(4, 4),
    "mamba2": mamba2(8, 8),
    "mamba2 of one group": mamba2(8, 1),
    "mamba2 of two groups": mamba2(8, 2),
    "mamba1": mamba1(16),
    "short convolution": short_conv(8),
    "linear attention": linear(4),
    "replicated": replicated(12),
}


@st.composite
def sections(draw: st.DrawFn) -> Sections:
    """Any sections whose units up to 8 ranks can share."""
    count = draw(st.integers(1, 5))
    numbers = st.sampled_from([1, 2, 4, 8, 16])
    rows = draw(st.integers(1, 4))
    return tuple(
        Section(
            f"{'conv' if place < count - 1 else 'ssm'}.{place}",
            draw(numbers),
            rows if place < count - 1 else draw(st.integers(1, 4)),
            draw(st.integers(1, 6)),
            "bfloat16" if place < count - 1 else draw(st.sampled_from(sorted(STATE_BYTES))),
        )
        for place in range(count)
    )


def whole_state(kept: Sections, layer: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The state of one layer of the whole model by section: `[unit, row, dim]` of unsigned words that are all unlike, as
    far as their width allows."""
    found, start = {}, 1 + 7919 * (layer + 1000 * seed)
    for section in kept:
        width = STATE_BYTES[section.dtype]
        shape = section.units, section.rows, section.dim
        numbers = np.arange(start, start + int(np.prod(shape)))
        found[section.name] = numbers.astype(f"u{width}").reshape(shape)
        start += len(numbers)
    return found


class StateRank:
    """One rank's states: a cache, with views whose order is the engine's.

    Args:
        page: of the request; others are filled with a mark.
    """

    MARK = 0xA5

    def __init__(
        self,
        shard: Shard,
        layers: Sequence[int],
        kept: Sections,
        order: Order = "SD",
        *,
        pages: int = 3,
        page: int = 1,
    ) -> None:
        self.geometry = Geometry(shard, (state_group(tuple(layers), kept),))
        self.page = page
        self.layers = {layer: self._layer(kept, order, pages) for layer in layers}
        self.cache = PagedCache(self.layers, self.geometry)

    def _layer(self, kept: Sections, order: Order, pages: int) -> StatePages:
        views: dict[str, torch.Tensor] = {}
        together = [one for one in kept if one.name.startswith("conv")]
        if order != "apart" and together:
            units = [len(self.geometry.shard.heads(one.units)) for one in together]
            dims = sum(count * one.dim for count, one in zip(units, together, strict=True))
            (rows,) = {one.rows for one in together}
            (width,) = {STATE_BYTES[one.dtype] for one in together}
            shape = (pages, rows, dims) if order == "SD" else (pages, dims, rows)
            tensor = torch.full((*shape[:2], shape[2] * width), self.MARK, dtype=torch.uint8)
            tensor = tensor.view(_words(width))
            tensor = tensor if order == "SD" else tensor.transpose(1, 2)
            start = 0
            for count, one in zip(units, together, strict=True):
                part = tensor[:, :, start : start + count * one.dim]
                views[one.name] = part.unflatten(2, (count, one.dim)).transpose(1, 2)
                start += count * one.dim
        for one in kept:
            if one.name not in views:
                count = len(self.geometry.shard.heads(one.units))
                width = STATE_BYTES[one.dtype]
                shape = pages, count, one.dim, one.rows * width
                dense = torch.full(shape, self.MARK, dtype=torch.uint8).view(_words(width))
                views[one.name] = dense.transpose(2, 3)
        return StatePages(tuple(views[one.name] for one in kept))

    def fill(self, seed: int = 0) -> None:
        """Give the request's page this rank's part of the model's states."""
        for layer in self.layers:
            for mine, wanted in self._pairs(layer, self.page, seed):
                mine[...] = wanted

    def problem(self, seed: int = 0) -> str:
        """Where the request's page differs from this rank's part of the model's states, or another page was written;
        empty: nowhere."""
        for layer, pages in self.layers.items():
            names = [section.name for section in self._kept]
            pairs = self._pairs(layer, self.page, seed)
            for name, (mine, wanted) in zip(names, pairs, strict=True):
                if not np.array_equal(mine, wanted):
                    return f"layer {layer} {name}"
            for view in pages.sections:
                rest = [n for n in range(len(view)) if n != self.page]
                if (np.ascontiguousarray(view[rest].numpy()).view(np.uint8) != self.MARK).any():
                    return f"layer {layer}: another page was written"
        return ""

    @property
    def _kept(self) -> Sections:
        return self.geometry.groups[0].sections

    def _pairs(self, layer: int, page: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        whole = whole_state(self._kept, layer, seed)
        pairs = []
        for section, view in zip(self._kept, self.layers[layer].sections, strict=True):
            units = self.geometry.shard.heads(section.units)
            words = view[page].view(_words(view.element_size())).numpy()
            wanted = whole[section.name][units.start : units.stop]
            pairs.append((words, wanted.view(words.dtype)))
        return pairs


def _words(width: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]


def state_ranks(
    kept: Sections, tp: int, starts: Sequence[int], layers: int, order: Order = "SD", page: int = 1
) -> list[StateRank]:
    """All ranks of an engine, with stages that begin at these layers."""
    stops = [*starts[1:], layers]
    return [
        StateRank(Shard(first, stop, rank, tp), range(first, stop), kept, order, page=page)
        for first, stop in zip(starts, stops, strict=True)
        for rank in range(tp)
    ]
