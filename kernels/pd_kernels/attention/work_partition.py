# SPDX-License-Identifier: Apache-2.0
"""Which program attends to which KV: rows cut into pieces of equal cost.

A **row** is what one softmax runs over: a sequence and a KV head (or a part of its query heads). Its
KV is read in **tiles** of tokens. Laid end to end, all rows of a batch are one line; each **worker**
(a program of the persistent launch) gets a stretch of it, so that lengths, not the batch, decide who
does what (Stream-K; FlashMLA's metadata kernel and ThunderMLA's scheduler pursue the same end). Where
a cut falls within a row, that row is **split**: its pieces belong to consecutive workers, and only the
first and the last row of a stretch can be split, which bounds all scratch by the number of workers.

TileCosts are whole numbers, in sixteenths of a tile's time. This module is the definition, in torch,
without a wait for the device; `plan.py` has the kernel that computes the same in one launch.
"""

from typing import NamedTuple

import torch

UNIT = 16
"""Cost of a tile."""

TILES = 1 << 24
"""More than a row has tiles: `row * TILES + tile` orders cuts."""

FIELDS = 8
"""Of a worker's record: see `WorkerRange`."""


class TileCosts(NamedTuple):
    """What else takes time, in sixteenths of a tile.

    Attributes:
        row: to begin a row or a piece of it: its query, the first loads, writing its result.
        partial: to merge one more piece of a row.
    """

    row: int
    partial: int


class WorkerRange(NamedTuple):
    """A worker's stretch: from one place to another, and how far its split rows reach.

    Attributes:
        row, tile: where it begins; `tile` is counted from the row's first visible tile.
        end_row, end_tile: where it ends: the next worker's beginning.
        first, last: workers that have the first and the last piece of `row`.
        end_last: worker that has the last piece of `end_row`; means nothing if `end_tile` is 0.
    """

    row: int
    tile: int
    end_row: int
    end_tile: int
    first: int
    last: int
    end_last: int


class RowShape(NamedTuple):
    """What the rows of a batch have in common.

    Attributes:
        heads: rows of each sequence.
        tile: tokens of a tile.
        queries: of a sequence: the last tokens of its KV.
        window: tokens that a query sees, itself included; 0 for all.
    """

    heads: int
    tile: int
    queries: int
    window: int


def tile_counts(lengths: torch.Tensor, rows: RowShape) -> torch.Tensor:
    """Tiles of each sequence that some query sees, int64: those before its window are left out."""
    length = lengths.long().clamp(min=0)
    tiles = (length + rows.tile - 1) // rows.tile
    if rows.window:
        tiles -= (length - rows.queries - rows.window + 1).clamp(min=0) // rows.tile
    return tiles


def schedule(lengths: torch.Tensor, rows: RowShape, workers: int, costs: TileCosts) -> torch.Tensor:
    """A record for each worker, int32 `[workers, 8]` on the device of `lengths`.

    Not all workers get work: more pieces than `sqrt(tiles of the longest row / cost of a partial)`
    make that row's merge cost more than they save.

    Args:
        lengths: tokens of KV of each sequence, any integers `[batch]`, batch > 0.
    """
    tiles = tile_counts(lengths, rows)
    cost = costs.row + UNIT * tiles
    ends = (cost * rows.heads).cumsum(0)
    total = ends[-1]
    least = (tiles.max() * (UNIT * costs.partial)).float().sqrt().long().clamp(min=UNIT)
    used = (total // least).clamp(1, workers)

    worker = torch.arange(workers + 1, device=lengths.device)
    at = (worker * total // used).clamp(max=total)
    sequence = torch.searchsorted(ends, at, right=True)
    there = sequence.clamp(max=len(tiles) - 1)
    own = cost[there]
    into = at - (ends[there] - own * rows.heads)
    head, into = into // own, into % own
    tile = (into - costs.row + UNIT // 2).clamp(min=0) // UNIT
    over = (tile > 0) & (tile >= tiles[there])
    place = there * rows.heads + head + over
    key = place * TILES + torch.where(over, 0, tile)
    key = torch.where(sequence == len(tiles), len(tiles) * rows.heads * TILES, key)

    begin, end = key[:-1], key[1:]
    row, end_row = begin // TILES, end // TILES
    records = torch.zeros(workers, FIELDS, dtype=torch.int32, device=lengths.device)
    fields = (
        row,
        begin % TILES,
        end_row,
        end % TILES,
        torch.searchsorted(key, row * TILES, right=True) - 1,
        torch.searchsorted(key, (row + 1) * TILES) - 1,
        torch.searchsorted(key, (end_row + 1) * TILES) - 1,
    )
    for number, field in enumerate(fields):
        records[:, number] = field
    return records
