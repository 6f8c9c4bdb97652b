# SPDX-License-Identifier: Apache-2.0
"""Which worker attends to which KV: the work of a batch, cut into ranges of equal cost.

Words of this package:

- **line**: one query of one query head.
- **row**: what shares loads of KV: the lines of one sequence that attend to one KV head (at most
  64; more become several rows). Rows are numbered by sequence, then by KV head.
- **tile**: some consecutive tokens of KV, which one step of the loop reads.
- **worker**: a program of the persistent launch. There are as many as run at once on the GPU.
- **work range**: what one worker does. All tiles of all rows, laid end to end, are one line; each
  worker gets an equal stretch of it (Stream-K; FlashMLA's tile scheduler and ThunderMLA's scheduler
  do the same). So a batch of unequal lengths keeps all workers busy.
- **split row**: a row that a boundary between work ranges cuts (split-KV). Its pieces belong to
  consecutive workers, each of which computes a **partial**. Only the first and the last row of a
  range can be split, so that a worker needs room for two partials at most, whatever the batch.

Costs are whole numbers, in sixteenths of a tile's time. `partition` defines the result, in torch,
without waiting for the device. `plan_kernel.py` computes the same in one launch.
"""

from typing import NamedTuple

import torch

UNIT = 16
"""Cost of a tile."""

TILES = 1 << 24
"""More tiles than a row can have. `row * TILES + tile` is a place on the line, as one number that
sorts."""

NO_MOD = -1
"""Stands for no mod."""

FIELDS = 8
"""Words of a work range in memory: the 7 fields of `WorkRange` and one unused."""


class TileCosts(NamedTuple):
    """Work that is not tiles, in sixteenths of a tile's time.

    Attributes:
        row: to begin a row or a piece of one: load its queries, fill the pipeline, write the
            result.
        partial: to merge one more piece of a row.
    """

    row: int
    partial: int


class WorkRange(NamedTuple):
    """What one worker does: tiles from (row, tile) up to (end_row, end_tile), and who has the rest
    of its split rows.

    Attributes:
        row, tile: where the range begins. `tile` counts from the row's first visible tile.
        end_row, end_tile: where it ends, which is where the next worker's begins.
        first_worker, last_worker: workers that have the first and the last piece of `row`.
        end_last_worker: worker that has the last piece of `end_row`. Meaningless if `end_tile` is
            0.
    """

    row: int
    tile: int
    end_row: int
    end_tile: int
    first_worker: int
    last_worker: int
    end_last_worker: int


class RowShape(NamedTuple):
    """What all rows of a batch have in common.

    Attributes:
        heads: rows per sequence: KV heads, times the rows that the lines of one KV head need.
        tile: tokens of a tile.
        queries: queries per sequence; they are the last tokens of its KV.
        window: tokens that a query sees, itself included; 0 for all.
        mask: number of the mask mod whose unseen tiles are left out (`TileMask`); NO_MOD for none.
    """

    heads: int
    tile: int
    queries: int
    window: int
    mask: int = NO_MOD


def tile_counts(lengths: torch.Tensor, rows: RowShape) -> torch.Tensor:
    """Tiles of each sequence that at least one query sees, int64 `[batch]`. Tiles before the window
    do not count."""
    length = lengths.long().clamp(min=0)
    tiles = (length + rows.tile - 1) // rows.tile
    if rows.window:
        tiles -= (length - rows.queries - rows.window + 1).clamp(min=0) // rows.tile
    return tiles


def partition(
    lengths: torch.Tensor, rows: RowShape, workers: int, costs: TileCosts
) -> torch.Tensor:
    """Cut the work of a batch into one range per worker.

    Not all workers need get work. To split the longest row of T tiles into n pieces saves time as T
    / n and costs n * `costs.partial` for the merge; beyond n = sqrt(T / `costs.partial`) it costs
    more than it saves.

    Args:
        lengths: tokens of KV of each sequence, int32 or int64 `[batch]`, batch > 0.
        rows: what the rows have in common.
        workers: how many there are.
        costs: of work that is not tiles.

    Returns:
        int32 `[workers, 8]` on the device of `lengths`: a `WorkRange` per worker.

    Example:
        Two sequences of 4 and 2 tiles, one KV head, three workers: the first sequence is split in
        two.

        >>> rows = RowShape(heads=1, tile=64, queries=1, window=0)
        >>> ranges = partition(torch.tensor([256, 128]), rows, workers=3, costs=TileCosts(row=0, partial=0))
        >>> for each in ranges[:, :4].tolist():
        ...     print("tiles from {0}.{1} to {2}.{3}".format(*each))
        tiles from 0.0 to 0.2
        tiles from 0.2 to 1.0
        tiles from 1.0 to 2.0
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
    ranges = torch.zeros(workers, FIELDS, dtype=torch.int32, device=lengths.device)
    fields = WorkRange(
        row=row,
        tile=begin % TILES,
        end_row=end_row,
        end_tile=end % TILES,
        first_worker=torch.searchsorted(key, row * TILES, right=True) - 1,
        last_worker=torch.searchsorted(key, (row + 1) * TILES) - 1,
        end_last_worker=torch.searchsorted(key, (end_row + 1) * TILES) - 1,
    )
    for number, field in enumerate(fields):
        ranges[:, number] = field
    return ranges
