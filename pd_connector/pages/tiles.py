# SPDX-License-Identifier: Apache-2.0
"""Caches whose tokens and dims lie in tiles, as matrix units (AMX) read them; numpy copies them.

Four strides cannot describe the places of elements in a tiled cache. Its views have six axes instead:
`[page, head, token tile, token, dim tile, dim]`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from pd_connector.codec.elements import Words, words

_AXES = 6
_SHORT = 2
"""numpy's innermost loop runs over the axis whose elements lie closest in the output. If that axis has at most
this many tokens, writing each token separately is three times as fast."""


class TileSpan(NamedTuple):
    """Tokens [first, stop) of a page that are whole tiles, or lie within one tile.

    Attributes:
        tiles: the tiles.
        within: the tokens of each of these tiles.
    """

    first: int
    stop: int
    tiles: slice
    within: slice


def is_tiled(view: torch.Tensor) -> bool:
    return bool(view.ndim == _AXES)


def tokens_of(view: torch.Tensor) -> int:
    """Tokens of a page of a view, tiled or `[page, head, token, dim]`."""
    return int(view.shape[2] * view.shape[3]) if is_tiled(view) else int(view.shape[2])


def dims_of(view: torch.Tensor) -> int:
    """Dims of a view, tiled or `[page, head, token, dim]`."""
    return int(view.shape[4] * view.shape[5]) if is_tiled(view) else int(view.shape[3])


def untiled(view: torch.Tensor) -> torch.Tensor:
    """A view as `[page, head, token, dim]`. A tiled view is copied."""
    return view.flatten(4, 5).flatten(2, 3) if is_tiled(view) else view


def read_tiles(
    view: torch.Tensor, spans: Iterable[tuple[int, int, int, int]], plane: torch.Tensor
) -> None:
    """Fill a dense plane `[head, token, dim]` from a tiled view on the host.

    Args:
        spans: page, first and stop token in the page, and the plane's token at which the span begins.
    """
    for tiles, dense in _pairs(view, spans, plane):
        dense[...] = tiles


def write_tiles(
    view: torch.Tensor, spans: Iterable[tuple[int, int, int, int]], plane: torch.Tensor
) -> None:
    """Write a dense plane into a tiled view on the host; see `read_tiles`."""
    for tiles, dense in _pairs(view, spans, plane):
        if tiles.shape[2] > _SHORT:
            tiles[...] = dense
            continue
        for token in range(tiles.shape[2]):
            tiles[:, :, token] = dense[:, :, token]


def _pairs(
    view: torch.Tensor, spans: Iterable[tuple[int, int, int, int]], plane: torch.Tensor
) -> Iterator[tuple[Words, Words]]:
    """Parts of the view's memory, each with the matching part of the plane's memory, in equal shapes."""
    tiles, dense = words(view), words(plane)
    _, heads, _, tile_tokens, dim_tiles, tile_dims = tiles.shape
    dense = dense.reshape(heads, -1, dim_tiles, tile_dims)
    # The dims of a tile as one word, if they lie side by side.
    wide = tile_dims * tiles.itemsize
    if wide in (2, 4, 8) and tiles.strides[-1] == tiles.itemsize:
        tiles, dense = tiles.view(f"u{wide}"), dense.view(f"u{wide}")
    for page, first, stop, start in spans:
        for cut in _tile_spans(first, stop, tile_tokens):
            part = tiles[page, :, cut.tiles, cut.within]
            begin = start + cut.first - first
            tokens = dense[:, begin : begin + cut.stop - cut.first]
            yield part, tokens.reshape(part.shape)  # splits an axis in two: still a view


def _tile_spans(first: int, stop: int, tile: int) -> Iterator[TileSpan]:
    """Tokens [first, stop) of a page, split: the rest of a tile, whole tiles, the beginning of a tile."""
    begin = min(stop, -(-first // tile) * tile)
    end = max(begin, stop // tile * tile)
    for start, last in ((first, begin), (begin, end), (end, stop)):
        if start < last:
            base = start // tile
            whole = last - start >= tile
            within = slice(None) if whole else slice(start - base * tile, last - base * tile)
            yield TileSpan(start, last, slice(base, -(-last // tile)), within)
