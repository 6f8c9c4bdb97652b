# SPDX-License-Identifier: Apache-2.0
"""Caches whose tokens and dims lie in tiles, as matrix units (AMX) read them, seen and copied by numpy.

No strides of four axes tell where elements lie there. Views have six instead:
`[page, head, token tile, token, dim tile, dim]`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from pd_connector.codec.elements import Words, words

_AXES = 6
_SHORT = 2
"""numpy's innermost loop is over the axis that is densest where it writes. Where that is one of so few
tokens, writing each of them by itself is three times as fast."""


class Cut(NamedTuple):
    """Tokens [first, stop) of a page that are whole tiles, or lie within one."""

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
    """A view as `[page, head, token, dim]`; of a tiled one a copy."""
    return view.flatten(4, 5).flatten(2, 3) if is_tiled(view) else view


def read_tiles(
    view: torch.Tensor, spans: Iterable[tuple[int, int, int, int]], block: torch.Tensor
) -> None:
    """Fill a dense block `[head, token, dim]` from a tiled view on the host.

    Args:
        spans: page, first and stop token in it, and the token of the block that the first one is.
    """
    for tiles, dense in _pairs(view, spans, block):
        dense[...] = tiles


def write_tiles(
    view: torch.Tensor, spans: Iterable[tuple[int, int, int, int]], block: torch.Tensor
) -> None:
    """Write a dense block into a tiled view on the host; see `read_tiles`."""
    for tiles, dense in _pairs(view, spans, block):
        if tiles.shape[2] > _SHORT:
            tiles[...] = dense
            continue
        for token in range(tiles.shape[2]):
            tiles[:, :, token] = dense[:, :, token]


def _pairs(
    view: torch.Tensor, spans: Iterable[tuple[int, int, int, int]], block: torch.Tensor
) -> Iterator[tuple[Words, Words]]:
    """Memory of the view and the memory of the block that belongs to it, in equal shapes."""
    tiles, dense = words(view), words(block)
    _, heads, _, tile_tokens, dim_tiles, tile_dims = tiles.shape
    dense = dense.reshape(heads, -1, dim_tiles, tile_dims)
    # The dims of a tile, if they lie side by side, as one word.
    wide = tile_dims * tiles.itemsize
    if wide in (2, 4, 8) and tiles.strides[-1] == tiles.itemsize:
        tiles, dense = tiles.view(f"u{wide}"), dense.view(f"u{wide}")
    for page, first, stop, start in spans:
        for cut in _cuts(first, stop, tile_tokens):
            part = tiles[page, :, cut.tiles, cut.within]
            begin = start + cut.first - first
            found = dense[:, begin : begin + cut.stop - cut.first]
            yield part, found.reshape(part.shape)  # an axis in two: a view


def _cuts(first: int, stop: int, tile: int) -> Iterator[Cut]:
    """Tokens [first, stop) of a page: the rest of a tile, whole tiles, the beginning of one."""
    begin = min(stop, -(-first // tile) * tile)
    end = max(begin, stop // tile * tile)
    for start, last in ((first, begin), (begin, end), (end, stop)):
        if start < last:
            base = start // tile
            whole = last - start >= tile
            within = slice(None) if whole else slice(start - base * tile, last - base * tile)
            yield Cut(start, last, slice(base, -(-last // tile)), within)
