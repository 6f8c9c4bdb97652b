# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The tiles that a mask mod keeps. No other tile is read or computed.

FlexAttention calls this a block mask. Here the device makes it from the function, once a step with
the plan, because lengths change. All layers of the step share it. CUDA graphs may contain it. A
tile is kept if any query of any head sees any token of it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pd_kernels.attention.mods import Mod
from pd_kernels.attention.paged_tile import visible_scores
from pd_kernels.attention.plan_kernel import first_tile
from pd_kernels.attention.work_partition import RowShape

_PROGRAMS = 32
"""The number of programs that share the tiles of a sequence."""

_CHUNK = 1_024
"""Tiles that are listed in one turn."""

_LINES = tl.constexpr(16)
"""The number of lines (query x head) for which a tile is tested at a time."""


@dataclass(frozen=True, eq=False)
class TileMask:
    """The tiles of each sequence that a mask mod keeps. Part of a `DecodePlan`.

    Attributes:
        mod: the mask mod.
        rows: the shape of the rows: tokens of a tile, queries and window.
        heads: query heads.
        marks: int8 `[batch, tiles]`, scratch: which tiles are seen.
        tiles: int32 `[batch, tiles]`: the numbers of the tiles that are seen, in order.
        tokens: int32 `[batch]`: the number of seen tiles times the tokens of a tile. The work is
            partitioned as if these were the lengths.
    """

    mod: Mod
    rows: RowShape
    heads: int
    marks: torch.Tensor
    tiles: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(
        cls, mod: Mod, rows: RowShape, heads: int, batch: int, tokens: int, device: torch.device
    ) -> "TileMask":
        """Allocate an empty mask for `batch` sequences of up to `tokens` tokens."""
        shape = batch, max(1, -(-tokens // rows.tile))
        return cls(
            mod=mod,
            rows=rows,
            heads=heads,
            marks=torch.zeros(shape, dtype=torch.int8, device=device),
            tiles=torch.zeros(shape, dtype=torch.int32, device=device),
            tokens=torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def fill(self, lengths: torch.Tensor) -> torch.Tensor:
        """Find the seen tiles of sequences of these lengths, in place.

        Returns:
            `tokens` of these sequences.
        """
        if lengths.is_cuda:
            launch_tile_mask(self, lengths)
        else:
            self._define(lengths)
        return self.tokens[: len(lengths)]

    def _define(self, lengths: torch.Tensor) -> None:
        """`fill` in torch, with the same result as the kernels."""
        for number, tiles in enumerate(self.seen_tiles(lengths)):
            self.tiles[number, : len(tiles)] = tiles
            self.tokens[number] = len(tiles) * self.rows.tile

    def seen_tiles(self, lengths: torch.Tensor) -> list[torch.Tensor]:
        """The seen tiles of each sequence, in torch. This defines the kernels' result."""
        return [self._seen(row, max(0, length)) for row, length in enumerate(lengths.tolist())]

    def _seen(self, sequence: int, length: int) -> torch.Tensor:
        tile, queries, window = self.rows.tile, self.rows.queries, self.rows.window
        device = self.tiles.device
        if length == 0:
            return torch.zeros(0, dtype=torch.long, device=device)
        token = torch.arange(length, device=device)[None, None, :]
        position = torch.arange(length - queries, length, device=device)[:, None, None]
        head = torch.arange(self.heads, device=device)[None, :, None]
        own = torch.tensor(sequence, device=device)
        seen = self.mod.reference(own, head, position.clamp(min=0), token, self.mod.args)
        seen = seen & (token > position - window) if window else seen
        seen = seen.expand(queries, self.heads, length).flatten(0, 1).any(0)
        return (seen.nonzero()[:, 0] // tile).unique()


def launch_tile_mask(mask: TileMask, lengths: torch.Tensor) -> None:
    """Run `TileMask.fill` with the kernels."""
    batch, room = len(lengths), mask.tiles.shape[1]
    shape = {"QUERIES": mask.rows.queries, "WINDOW": mask.rows.window, "TILE": mask.rows.tile}
    mark_tiles[(batch, min(room, _PROGRAMS))](
        marks=mask.marks,
        lengths=lengths,
        mask_args=mask.mod.args,
        stride=lengths.stride(0),
        room=room,
        HEADS=mask.heads,
        MASK_MOD=mask.mod.kernel,
        **shape,
    )
    list_tiles[(batch,)](
        tiles=mask.tiles,
        tokens=mask.tokens,
        marks=mask.marks,
        lengths=lengths,
        stride=lengths.stride(0),
        room=room,
        CHUNK=_CHUNK,
        **shape,
    )


@triton.jit
def _tile_range(
    lengths,
    stride,
    room,
    sequence,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """A sequence's length, its first tile in the window, and the end of its tiles."""
    length = tl.maximum(tl.load(lengths + sequence * stride), 0).to(tl.int32)
    end = tl.minimum((length + TILE - 1) // TILE, room)
    return length, first_tile(length, QUERIES, WINDOW, TILE), end


@triton.jit(do_not_specialize=["stride", "room"])
def mark_tiles(
    marks,
    lengths,
    mask_args,
    stride,
    room,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MASK_MOD: tl.constexpr,
):
    """Mark the tiles that any query of any head sees. The programs of a sequence take its tiles in
    turn. Causality is ignored: queries are the last tokens, so causality hides only part of the
    last tiles."""
    sequence = tl.program_id(0)
    length, first, end = _tile_range(lengths, stride, room, sequence, QUERIES, WINDOW, TILE)
    for tile in range(first + tl.program_id(1), end, tl.num_programs(1)):
        token = tile * TILE + tl.arange(0, TILE)
        seen = tl.zeros((_LINES, TILE), tl.int1)
        for begin in range(0, HEADS * QUERIES, _LINES):
            line = tl.minimum(begin + tl.arange(0, _LINES), HEADS * QUERIES - 1)
            score = visible_scores(
                tl.zeros((_LINES, TILE), tl.float32), token, token < length,
                length - QUERIES + line // HEADS, length, sequence, line % HEADS, (), mask_args,
                False, WINDOW, None, MASK_MOD,
            )  # fmt: skip
            seen = seen | (score == 0.0)
        any_seen = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        tl.store(marks + sequence.to(tl.int64) * room + tile, any_seen.to(tl.int8))


@triton.jit(do_not_specialize=["stride", "room"])
def list_tiles(
    tiles,
    tokens,
    marks,
    lengths,
    stride,
    room,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the marked tiles of a sequence in order, and count their tokens."""
    sequence = tl.program_id(0)
    _, first, end = _tile_range(lengths, stride, room, sequence, QUERIES, WINDOW, TILE)
    row = sequence.to(tl.int64) * room
    count = tl.zeros((), tl.int32)
    for begin in range(first, end, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        mark = tl.load(marks + row + tile, mask=tile < end, other=0).to(tl.int32)
        tl.store(tiles + row + count + tl.cumsum(mark, 0) - mark, tile, mask=mark > 0)
        count += tl.sum(mark, 0)
    tl.store(tokens + sequence, count * TILE)
