# SPDX-License-Identifier: Apache-2.0
"""The work of a batch, cut into ranges of equal cost, one per worker.

Words of this package:

- **line**: one query of one query head.
- **row**: the lines of one sequence that attend to one KV head. They share loads of KV. A row has
  at most 64 lines; more lines become several rows. Rows are numbered by sequence, then by KV head.
- **tile**: consecutive tokens of KV that one step of the loop reads.
- **worker**: a program of the persistent launch. The launch has as many programs as run at once on
  the GPU.
- **work range**: the work of one worker. All tiles of all rows are laid end to end, and each worker
  gets an equal stretch. Stream-K, FlashMLA's tile scheduler and ThunderMLA's scheduler do the same.
  So a batch of unequal lengths keeps all workers busy.
- **split row**: a row that a boundary between work ranges cuts (split-KV). Its pieces belong to
  consecutive workers. Each worker computes a **partial**. Only the first and the last row of a
  range can be split. So a worker needs room for at most two partials.

Costs are whole numbers, in sixteenths of a tile's time. `partition` defines the result, in torch,
without waiting for the device. `plan_kernel.py` computes the same in one launch.
"""

from typing import NamedTuple

import torch

UNIT = 16
"""Cost of a tile."""

TILES = 1 << 24
"""More tiles than a row can have. So `row * TILES + tile` is one number that sorts by row, then by
tile."""

NO_MOD = -1
"""Stands for no mod."""

FIELDS = 8
"""Words of a work range in memory: the 7 fields of `WorkRange` and one unused."""


class TileCosts(NamedTuple):
    """Costs of work other than tiles, in sixteenths of a tile's time.

    Attributes:
        row: beginning a row or a piece of a row: loading its queries, filling the pipeline, writing
            the result.
        partial: merging one more piece of a row.
    """

    row: int
    partial: int


class WorkRange(NamedTuple):
    """The work of one worker: tiles from (row, tile) up to (end_row, end_tile), and the workers
    that have the rest of its split rows.

    Attributes:
        row, tile: where the range begins. `tile` counts from the row's first visible tile.
        end_row, end_tile: where the range ends and the next worker's range begins.
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
    """The shape that all rows of a batch share.

    Attributes:
        heads: rows per sequence: the number of KV heads, times the rows per KV head.
        tile: tokens of a tile.
        queries: queries per sequence; they are the last tokens of the sequence's KV.
        window: tokens that a query sees, itself included; 0 for all.
        mask: number of the mask mod that hides tiles (`TileMask`); NO_MOD for none.
    """

    heads: int
    tile: int
    queries: int
    window: int
    mask: int = NO_MOD


def tile_counts(lengths: torch.Tensor, rows: RowShape) -> torch.Tensor:
    """The number of tiles of each sequence that at least one query sees, int64 `[batch]`. Tiles
    before the window do not count."""
    length = lengths.long().clamp(min=0)
    tiles = (length + rows.tile - 1) // rows.tile
    if rows.window:
        tiles -= (length - rows.queries - rows.window + 1).clamp(min=0) // rows.tile
    return tiles


def partition(
    lengths: torch.Tensor, rows: RowShape, workers: int, costs: TileCosts
) -> torch.Tensor:
    """Cut the work of a batch into one range per worker.

    Some workers may get no work. Splitting the longest row of T tiles into n pieces reduces its
    time to T / n, and costs n * `costs.partial` for the merge. Beyond n = sqrt(T / `costs.partial`)
    it costs more than it saves.

    Args:
        lengths: tokens of KV of each sequence, int32 or int64 `[batch]`, batch > 0.
        rows: the shape of the rows.
        workers: the number of workers.
        costs: the costs of work other than tiles.

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
