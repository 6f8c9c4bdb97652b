# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that partitions the work of a batch, and the functions with which attention kernels
read its result.

One program partitions the work, once a step. Otherwise every program of every layer would do it at
the start of its attention kernel.
"""

import triton
import triton.language as tl

from pd_kernels.attention.work_partition import FIELDS, TILES, UNIT, WorkRange

COUNTERS = 4
"""Counters of a worker, see `DecodePlan.counters`."""

_UNIT = tl.constexpr(UNIT)
_TILES = tl.constexpr(TILES)
_FIELDS = tl.constexpr(FIELDS)

# Places of the fields of a work range.
ROW, FIRST_TILE, END_ROW, END_TILE, FIRST_WORKER, LAST_WORKER, END_LAST_WORKER = (
    tl.constexpr(place) for place in range(len(WorkRange._fields))
)


@triton.jit(
    do_not_specialize=[
        *("batch", "stride", "workers", "heads", "queries", "window", "row_cost", "partial_cost")
    ]
)
def partition_rows(
    lengths,
    boundaries,
    ranges,
    batch,
    stride,
    workers,
    heads,
    queries,
    window,
    row_cost,
    partial_cost,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    WORKERS: tl.constexpr,
):
    """Write a `WorkRange` per worker, as `work_partition.partition` defines it.

    Runs as one program. BATCH and WORKERS are powers of two, at least `batch` and `workers + 1`.
    """
    sequence = tl.arange(0, BATCH)
    length = tl.load(lengths + sequence * stride, mask=sequence < batch, other=0)
    tiles = visible_tiles(length.to(tl.int32), queries, window, TILE)
    cost = tl.where(sequence < batch, row_cost + tiles * _UNIT, 0).to(tl.int64)
    ends = tl.cumsum(cost * heads, 0)
    tl.store(boundaries + sequence, ends, mask=sequence < batch)
    total = tl.sum(cost * heads, 0)
    longest = tl.max(tiles, 0) * (_UNIT * partial_cost)
    least = tl.maximum(tl.sqrt_rn(longest.to(tl.float32)).to(tl.int64), _UNIT)
    used = tl.minimum(tl.maximum(total // least, 1), workers)
    tl.debug_barrier()  # below, threads read values that other threads have stored above

    worker = tl.arange(0, WORKERS)
    at = tl.minimum(worker * total // used, total)
    place = _count(boundaries, batch, at, BATCH)
    there = tl.minimum(place, batch - 1)
    own_tiles = visible_tiles(tl.load(lengths + there * stride).to(tl.int32), queries, window, TILE)
    own = (row_cost + own_tiles * _UNIT).to(tl.int64)
    into = at - (tl.load(boundaries + there) - own * heads)
    head = into // own
    tile = tl.maximum(into - head * own - row_cost + _UNIT // 2, 0) // _UNIT
    over = (tile > 0) & (tile >= own_tiles)
    row = there * heads + head + over.to(tl.int64)
    key = row * _TILES + tl.where(over, 0, tile)
    key = tl.where(place == batch, (batch * heads).to(tl.int64) * _TILES, key)
    keys = boundaries + batch
    tl.store(keys + worker, key, mask=worker <= workers)
    tl.debug_barrier()

    real = worker < workers
    end = tl.load(keys + worker + 1, mask=real, other=0)
    row, end_row = key // _TILES, end // _TILES
    own_range = ranges + worker * _FIELDS
    tl.store(own_range + ROW, row.to(tl.int32), mask=real)
    tl.store(own_range + FIRST_TILE, (key % _TILES).to(tl.int32), mask=real)
    tl.store(own_range + END_ROW, end_row.to(tl.int32), mask=real)
    tl.store(own_range + END_TILE, (end % _TILES).to(tl.int32), mask=real)
    first = _count(keys, workers + 1, row * _TILES, WORKERS) - 1
    last = _count(keys, workers + 1, (row + 1) * _TILES - 1, WORKERS) - 1
    end_last = _count(keys, workers + 1, (end_row + 1) * _TILES - 1, WORKERS) - 1
    tl.store(own_range + FIRST_WORKER, first, mask=real)
    tl.store(own_range + LAST_WORKER, last, mask=real)
    tl.store(own_range + END_LAST_WORKER, end_last, mask=real)


@triton.jit
def visible_tiles(length, queries, window, TILE: tl.constexpr):
    """The number of tiles of a sequence that at least one query sees, int32, as in
    `work_partition.tile_counts`."""
    length = tl.maximum(length, 0)
    return (length + TILE - 1) // TILE - first_tile(length, queries, window, TILE)


@triton.jit
def first_tile(length, queries, window, TILE: tl.constexpr):
    """The first tile of a sequence that at least one query sees, int32. `window` 0 stands for all
    tokens."""
    unseen = tl.maximum(length - queries - window + 1, 0) // TILE
    return tl.where(window > 0, unseen, 0)


@triton.jit
def rows_of(work_range):
    """The number of rows of which a worker has a piece, or all."""
    whole = tl.load(work_range + END_ROW) - tl.load(work_range + ROW)
    return whole + (tl.load(work_range + END_TILE) > 0).to(tl.int32)


@triton.jit
def current_piece(
    work_range,
    done,
    lengths,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """The worker's next piece after it has finished `done` rows.

    Returns:
        row: number of the row.
        start, stop: first tile and end of the worker's piece, counted from the row's first visible
            tile.
        length: tokens of the sequence.
        tiles: visible tiles of the row.
    """
    begin, end = tl.load(work_range + ROW), tl.load(work_range + END_ROW)
    row = begin + done
    length = tl.maximum(tl.load(lengths + row // HEADS), 0).to(tl.int32)
    tiles = visible_tiles(length, QUERIES, WINDOW, TILE)
    start = tl.where(row == begin, tl.load(work_range + FIRST_TILE), 0)
    stop = tl.where(row == end, tl.load(work_range + END_TILE), tiles)
    return row, start, stop, length, tiles


@triton.jit
def _count(ordered, count, value, SIZE: tl.constexpr):
    """For each `value`, how many of the `count` sorted numbers are not larger; SIZE >= `count`."""
    position = tl.zeros_like(value).to(tl.int32)
    step = tl.full((), SIZE, tl.int32)
    while step > 0:
        probe = position + step
        there = tl.load(ordered + probe - 1, mask=probe <= count, other=0)
        position = tl.where((probe <= count) & (there <= value), probe, position)
        step = step // 2
    return position
