# SPDX-License-Identifier: Apache-2.0
"""The layers of a cache, and where the parts of a chunk lie in them."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from pd_connector.kv.coding import Part
from pd_connector.kv.geometry import Geometry, Group
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.layer import LayerPages, StatePages, check_layer, check_states
from pd_connector.pages.row_matrix import Words
from pd_connector.pages.spans import Index, Span, StripedSpan, TokenSpan
from pd_connector.pages.tiles import tokens_of
from pd_connector.plan.chunks import Chunk, Plane
from pd_connector.plan.route import Route


class CacheLayers:
    """The layers of one rank's cache.

    Attributes:
        by_number: each layer of KV by its number in the model.
        states: each layer of states by its number in the model.

    Args:
        layers: the views of each layer, by its number in the model; not copied.
        geometry: what the layers hold.

    Raises:
        UnsupportedGeometryError: a layer differs from the geometry.
    """

    def __init__(self, layers: Mapping[int, LayerPages | StatePages], geometry: Geometry) -> None:
        self.geometry = geometry
        self.by_number = {n: each for n, each in layers.items() if isinstance(each, LayerPages)}
        self.states = {n: each for n, each in layers.items() if isinstance(each, StatePages)}
        for group in geometry.groups:
            for layer in group.layers:
                if group.kind == "state":
                    check_states(layer, self.states[layer], geometry, group)
                else:
                    check_layer(layer, self.by_number[layer], geometry, group)

    @property
    def device(self) -> torch.device:
        """The device of all layers."""
        keys = (pages.key for pages in self.by_number.values())
        states = (pages.sections[0] for pages in self.states.values())
        return next(itertools.chain(keys, states)).device

    @property
    def pages(self) -> int:
        """The number of pages in the layer with the fewest."""
        return min(
            self._pages_of(layer, group) for group in self.geometry.groups for layer in group.layers
        )

    def _pages_of(self, layer: int, group: Group) -> int:
        if group.kind == "state":
            return int(self.states[layer].sections[0].shape[0])
        return int(self.by_number[layer].key.shape[0] // self._parts_per_page(layer, group))

    def zero(self, group: Group, page: int) -> None:
        """Zero one page of the engine in all layers of a group of KV.

        Raises:
            IndexError: the page is outside this cache.
        """
        for layer in group.layers:
            parts = self._parts_per_page(layer, group)
            pages = self.by_number[layer]
            _check_pages((page,), len(pages.key) // parts)
            for view in (pages.key, pages.value):
                if view is not None:
                    view[page * parts : (page + 1) * parts].zero_()

    def view(self, plane: Plane) -> torch.Tensor:
        """The layer's cache of K or V, as the plane says: `[page, kv head, token, dim]`, or tiled."""
        return self.part(plane.layer, plane.part)

    def part(self, number: int, part: Part) -> torch.Tensor:
        """K or V of the layer with this number; see `view`."""
        layer = self.by_number[number]
        view = layer.value if part is Part.VALUE else layer.key
        assert view is not None
        return view

    def source_tokens(self, route: Route, chunk: Chunk, layer: int, pages: Sequence[int]) -> Span:
        """The chunk's tokens in the pages of the layer's view, in the cache of the source.

        Raises:
            IndexError: a page is outside this cache.
        """
        return self._tokens(route, chunk, layer, route.source, True, pages)

    def destination_tokens(
        self, route: Route, chunk: Chunk, layer: int, pages: Sequence[int]
    ) -> Span:
        """The same in the cache of the destination."""
        return self._tokens(route, chunk, layer, route.destination, False, pages)

    def _tokens(
        self,
        route: Route,
        chunk: Chunk,
        layer: int,
        group: Group,
        is_source: bool,
        pages: Sequence[int],
    ) -> Span:
        view = self.by_number[layer].key
        _check_pages(pages, view.shape[0] // self._parts_per_page(layer, group))
        first, stop, each = chunk.first_token, chunk.stop_token, group.state_tokens
        if (stripes := route.stripes) is not None:
            stripe = stripes.source if is_source else stripes.destination
            size = group.page_entries, tokens_of(view)
            return StripedSpan(tuple(pages), first, stop, *size, each, stripes, stripe)
        return TokenSpan(
            tuple(pages), first // each, stop // each, group.page_entries, tokens_of(view)
        )

    def rows_of_pages(
        self, layer: int, group: Group, heads: slice, pages: Sequence[int]
    ) -> tuple[list[torch.Tensor], Index]:
        """The rows of these heads in each of the layer's planes, uint8 `[page, kv head, bytes]`, and the row numbers
        of the pages.

        Raises:
            IndexError: a page is outside this cache.
        """
        planes = self._planes(layer)
        parts = self._parts_per_page(layer, group)
        index = _parts_of_pages(tuple(pages), planes[0].shape[0] // parts, parts)
        count = heads.stop - heads.start
        return [p if p.shape[1] in (1, count) else p[:, heads] for p in planes], index

    def payload_by_plane(
        self,
        route: Route,
        chunk: Chunk,
        group: Group,
        heads: slice,
        pages: Sequence[int],
        payload: Words,
    ) -> Iterator[tuple[torch.Tensor, Index, Words]]:
        """A verbatim chunk's payload, `[layer][plane][page][kv head][bytes]`, with the place of each part in the
        cache.

        Args:
            group: the route's source or destination, whichever is this cache's.
            heads: indices of the route's heads in this cache.
            pages: ids of the chunk's pages in this cache.
            payload: uint8 `[chunk.nbytes(route)]`.

        Returns:
            For each plane of each layer: its rows, the row numbers of the pages, and its part of the payload,
            `[page, kv head, bytes]`.

        Raises:
            IndexError: a page is outside this cache.
        """
        first = 0
        for layer in chunk.layers(route):
            planes, index = self.rows_of_pages(layer, group, heads, pages)
            for rows in planes:
                shape = len(index), *rows.shape[1:]
                stop = first + math.prod(shape)
                yield rows, index, payload[first:stop].reshape(shape)
                first = stop

    def pieces(
        self, group: Group, first_head: int, route: Route, chunk: Chunk, pages: Sequence[int]
    ) -> Pieces:
        """The memory of a verbatim chunk's payload, in order. The cache must be in host memory. See
        `PagedCache.pieces`."""
        heads = slice(first_head, first_head + len(route.heads))
        by_plane: list[Pieces] = []
        for layer in chunk.layers(route):
            planes, index = self.rows_of_pages(layer, group, heads, pages)
            by_plane += [_pieces(rows, index) for rows in planes]
        return Pieces.together(by_plane)

    def run_of_pages(self, route: Route, chunk: Chunk, pages: Sequence[int]) -> memoryview | None:
        """A verbatim chunk's payload in place, if it is one run of full pages of one layer; else None. The cache must
        be in host memory. Raises IndexError as `tokens` does."""
        group = route.source
        one_run = all(b - a == 1 for a, b in itertools.pairwise(pages))
        one_layer = chunk.stop_layer - chunk.first_layer == 1
        all_heads = len(route.heads) == len(self.geometry.heads(group))
        full = chunk.stop_token % route.source_page_tokens == 0
        if not (one_run and one_layer and all_heads and full):
            return None
        (layer,) = chunk.layers(route)
        rows, *others = self._planes(layer)
        if others:
            return None
        parts = self._parts_per_page(layer, group)
        _check_pages(pages, rows.shape[0] // parts)
        first, count = pages[0] * parts, len(pages) * parts
        run = rows[first : first + count]
        return memoryview(run.reshape(-1).numpy()) if run.is_contiguous() else None

    def _planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        planes = self.by_number[layer].planes
        assert planes, f"layer {layer} has no dense pages"
        return planes

    def _parts_per_page(self, layer: int, group: Group) -> int:
        """Pages of the layer's view that make up one page of the engine."""
        return int(group.page_entries // tokens_of(self.by_number[layer].key))


@functools.lru_cache(maxsize=8)
def _parts_of_pages(pages: tuple[int, ...], count: int, parts: int) -> Index:
    """Numbers of the rows that make up the pages, `parts` rows per page. Cached, because all layers of a chunk need the
    same.

    Raises:
        IndexError: a page is outside a cache of `count` pages.
    """
    _check_pages(pages, count)
    index = np.asarray(pages, np.int64)[:, None] * parts + np.arange(parts)
    return index.reshape(-1)


def _check_pages(pages: Sequence[int], count: int) -> None:
    if min(pages) < 0 or max(pages) >= count:
        raise IndexError(f"pages {min(pages)}-{max(pages)} of a cache of {count}")


def _pieces(rows: torch.Tensor, index: Index) -> Pieces:
    """The memory of these rows of a plane, in order."""
    _, parts, piece_bytes = rows.shape
    addresses = rows.data_ptr() + index * rows.stride(0)
    if rows.stride(1) == piece_bytes:  # the heads lie side by side
        piece_bytes *= parts
    elif parts > 1:
        addresses = (addresses[:, None] + np.arange(parts) * rows.stride(1)).reshape(-1)
    return Pieces(addresses.astype(np.uint64), piece_bytes)
