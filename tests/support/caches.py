# SPDX-License-Identifier: Apache-2.0
"""Caches of made-up engines, whose every byte can be told.

The layouts here say by themselves where an element lies in memory (`Layout.place`), without the
views that are handed to `PagedCache`, so that a wrong view cannot hide itself.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pd_connector.codec import DTYPES, Part
from pd_connector.kv.geometry import Geometry, Group, pages_for
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from support.setups import HEADS_APART


class Layout(NamedTuple):
    """An order of elements in memory.

    Attributes:
        order: of a page's axes, outermost first: H(ead), N (token), and C, the dims of K and then V.
        transposed: K of each head lies as `[dim][token]`, and V follows it as `[token][dim]`.
        halves: K's pages lie before all of V's; then pages are not dense.
        parts: pages of the tensor that are one page of the engine.
        gap: elements between a page and the next.
        tile: K of each head lies as `[token / tile][dim / 2][tile tokens][2 dims]`, and V follows it as
            `[dim / tile][token / 2][tile dims][2 tokens]`; 0 for neither.
    """

    order: str = "HNC"
    transposed: bool = False
    halves: bool = False
    dense: bool = False
    parts: int = 1
    gap: int = 0
    tile: int = 0

    @property
    def heads_apart(self) -> bool:
        return self.order == "HNC" and not self.halves

    def place(self, shape: "Shape", page: int, head: int, token: int, dim: int, v: bool) -> int:
        """Where an element lies in the storage, counted in elements.

        Args:
            page: as the engine counts.
            token: within the page.
            dim: of K, or of V if `v`.
        """
        tokens = shape.tokens // self.parts
        page, token = page * self.parts + token // tokens, token % tokens
        width = shape.key_dim + shape.value_dim
        start = page * (shape.heads * tokens * width + self.gap)
        if self.halves:
            half = shape.pages * self.parts * shape.heads * tokens * shape.key_dim
            own = shape.value_dim if v else shape.key_dim
            return v * half + ((page * tokens + token) * shape.heads + head) * own + dim
        if self.tile:
            start += head * tokens * width + v * tokens * shape.key_dim
            along, across, length = (dim, token, tokens) if v else (token, dim, shape.key_dim)
            tile, within = divmod(along, self.tile)
            return start + (tile * length + across // 2 * 2) * self.tile + within * 2 + across % 2
        if self.transposed:
            start += head * tokens * width
            if v:
                return start + tokens * shape.key_dim + token * shape.value_dim + dim
            return start + dim * tokens + token
        place = head * tokens + token if self.order == "HNC" else token * shape.heads + head
        return start + place * width + v * shape.key_dim + dim

    def elements(self, shape: "Shape") -> int:
        """Elements of the whole storage."""
        width = shape.key_dim + shape.value_dim
        whole = shape.pages * (shape.heads * shape.tokens * width)
        return whole + shape.pages * self.parts * self.gap

    def views(self, storage: torch.Tensor, shape: "Shape") -> LayerPages:
        """The storage as an engine's door would hand it over."""
        pages, tokens = shape.pages * self.parts, shape.tokens // self.parts
        heads, k, v = shape.heads, shape.key_dim, shape.value_dim
        page = heads * tokens * (k + v) + self.gap
        if self.halves:
            split = pages * tokens * heads * k
            halves = [storage[:split], *([storage[split:]] if v else [])]
            seen = [half.view(pages, tokens, heads, -1).transpose(1, 2) for half in halves]
            planes = tuple(half.view(pages, 1, -1).view(torch.uint8) for half in halves)
            return LayerPages(seen[0], seen[1] if v else None, planes if self.dense else ())
        if self.tile:
            t, strides = self.tile, (page, tokens * (k + v))
            key = storage.as_strided(
                (pages, heads, tokens // t, t, k // 2, 2), (*strides, t * k, 2, 2 * t, 1)
            )
            value = storage.as_strided(
                (pages, heads, tokens // 2, 2, v // t, t),
                (*strides, 2 * t, 1, t * tokens, 2),
                tokens * k,
            )
        elif self.transposed:
            strides = page, tokens * (k + v)
            key = storage.as_strided((pages, heads, tokens, k), (*strides, 1, tokens))
            value = storage.as_strided((pages, heads, tokens, v), (*strides, v, 1), tokens * k)
        else:
            steps = {"HNC": (tokens * (k + v), k + v), "NHC": (k + v, heads * (k + v))}[self.order]
            whole = storage.as_strided((pages, heads, tokens, k + v), (page, *steps, 1))
            key, value = whole[..., :k], whole[..., k:]
        rows = (pages, heads) if self.heads_apart else (pages, 1)
        size = storage.element_size()
        each = heads * tokens * (k + v) // rows[1] * size
        as_bytes = storage.view(torch.uint8)
        dense = as_bytes.as_strided((*rows, each), (page * size, each, 1))
        return LayerPages(key, value if v else None, (dense,))


LAYOUTS = {
    "HND": Layout(),
    "NHD": Layout("NHC"),
    "HND in parts": Layout(parts=2),
    "NHD in parts": Layout("NHC", parts=4),
    "packed": Layout(transposed=True),
    "packed in parts": Layout(transposed=True, parts=2),
    "apart": Layout(gap=24),
    "": Layout(halves=True),
    "K, V": Layout(halves=True, dense=True),
    "K, V in parts": Layout(halves=True, dense=True, parts=2),
}
ON_THE_HOST = {"tiled": Layout(tile=4)}
"""Layouts that no GPU has, of caches whose dims are multiples of 4."""
_EVERY = LAYOUTS | ON_THE_HOST
assert {name for name, layout in _EVERY.items() if layout.heads_apart} == HEADS_APART


class Shape(NamedTuple):
    """Extents of one layer's cache on one rank."""

    pages: int
    heads: int
    tokens: int  # of an engine's page
    key_dim: int
    value_dim: int


class Rank:
    """One rank's cache, full of random bytes, and page tables of one prompt."""

    def __init__(
        self, geometry: Geometry, tokens: int, chance: random.Random, device: str = "cpu"
    ) -> None:
        self.geometry = geometry
        self.tables: list[list[int]] = []
        self.storage: dict[int, torch.Tensor] = {}
        self.shapes: dict[int, Shape] = {}
        self.groups = {layer: group for group in geometry.groups for layer in group.layers}
        self.views: dict[int, LayerPages] = {}
        for group in geometry.groups:
            wanted = pages_for(tokens, group.page_size)
            pages = wanted + 2
            self.tables.append(chance.sample(range(pages), wanted))
            for layer in group.layers:
                heads = len(geometry.heads(group))
                shape = Shape(pages, heads, group.page_size, group.key_dim, group.value_dim)
                layout, size = _EVERY[group.layout], DTYPES[group.dtype].itemsize
                noise = chance.randbytes(layout.elements(shape) * size)
                made = torch.frombuffer(bytearray(noise), dtype=torch.uint8).to(device)
                self.storage[layer] = made.view(DTYPES[group.dtype])
                self.shapes[layer] = shape
                self.views[layer] = layout.views(self.storage[layer], shape)
        self.cache = PagedCache(self.views, geometry)

    def view(self, layer: int, part: Part) -> torch.Tensor:
        """K (or the latent) or V of a layer, `[page, kv head, token, dim]`, or tiled."""
        seen = self.views[layer].value if part is Part.VALUE else self.views[layer].key
        assert seen is not None, f"layer {layer} has no V"
        return seen

    def pages(self, group: Group, span: range) -> list[int]:
        return self.tables[group.table][span.start : span.stop]

    def places(self, layer: int, head: int, token: int, v: bool) -> list[int]:
        """Where the elements of a token of the prompt lie in the layer's storage.

        Args:
            head: in model numbering.
        """
        group, shape = self.groups[layer], self.shapes[layer]
        layout = _EVERY[group.layout]
        page = self.tables[group.table][token // group.page_size]
        where = page, head - self.geometry.heads(group).start, token % group.page_size
        dims = shape.value_dim if v else shape.key_dim
        return [layout.place(shape, *where, dim, v) for dim in range(dims)]

    def parts(self, layer: int) -> list[bool]:
        """K, and V where there is one."""
        return [False, True] if self.groups[layer].value_dim else [False]


def everything(rank: Rank, tokens: Sequence[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Layer, head, token, and whether it is V, of all that a rank holds of these tokens."""
    for layer, group in rank.groups.items():
        heads = rank.geometry.heads(group)
        for head, token, v in itertools.product(heads, tokens, rank.parts(layer)):
            yield layer, head, token, v
