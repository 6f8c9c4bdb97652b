# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A schedule on the device, with the scratch of the kernels that follow it.

Planning is one small kernel, queued like any other: it reads the lengths where they are, so that a
CUDA graph that holds it plans anew at each replay, and nobody waits for a copy to the host. In the
prologue of the attention kernel it would be done by every program of every layer.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pd_kernels.attention.work_partition import FIELDS, TILES, UNIT, RowShape, TileCosts, schedule

COUNTERS = 4
"""Of a worker, for the row whose first piece it has: arrived, parts taken, departed, unused."""

_UNIT = tl.constexpr(UNIT)
_TILES = tl.constexpr(TILES)
_FIELDS = tl.constexpr(FIELDS)


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Who does what in a batch, and scratch; made once, filled once a step, used by every layer.

    Kernels that share a plan must be queued on one stream. Counters are zero whenever no kernel runs.

    Attributes:
        rows: what it is for.
        costs: that its stretches are balanced by.
        records: int32 `[workers, 8]`, see `schedule.WorkerRange`.
        cuts: int64 `[batch + workers + 1]`, of the planning kernel.
        counters: int32 `[workers, 4]`.
        partials: float32 `[workers, 2, height, dim]`: results of a worker's two split rows at most.
        weights: float32 `[workers, 2, height]`, base-2 logarithms of their sums.
    """

    rows: RowShape
    costs: TileCosts
    records: torch.Tensor
    cuts: torch.Tensor
    counters: torch.Tensor
    partials: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(
        cls,
        rows: RowShape,
        costs: TileCosts,
        batch: int,
        workers: int,
        height: int,
        dim: int,
        device: torch.device,
    ) -> "DecodePlan":
        """Room for a plan of at most `batch` sequences, not yet filled."""

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            rows,
            costs,
            room(workers, FIELDS, dtype=torch.int32),
            room(batch + workers + 1, dtype=torch.int64),
            room(workers, COUNTERS, dtype=torch.int32),
            torch.empty(workers, 2, height, dim, dtype=torch.float32, device=device),
            torch.empty(workers, 2, height, dtype=torch.float32, device=device),
        )

    @property
    def workers(self) -> int:
        return int(self.records.shape[0])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What kernels read and write of it."""
        return [self.records, self.counters, self.partials, self.weights]

    def fill(self, lengths: torch.Tensor) -> "DecodePlan":
        """Plan for these lengths, int32 or int64 `[batch]`; returns itself.

        Queues one kernel and returns (CPU: torch). In a CUDA graph it belongs before the first layer.

        Raises:
            ValueError: there are no sequences, or more than there is room for.
        """
        room = self.cuts.numel() - self.workers - 1
        if not 0 < lengths.numel() <= room:
            raise ValueError(f"{lengths.numel()} lengths: the plan has room for 1 to {room}")
        if lengths.is_cuda:
            with torch.cuda.device(lengths.device):
                launch_plan(self, lengths)
        else:
            self.records.copy_(schedule(lengths, self.rows, self.workers, self.costs))
        return self


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU, where plans say only that there is one worker."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_plan(plan: DecodePlan, lengths: torch.Tensor) -> None:
    """`DecodePlan.fill` by the kernel."""
    plan_rows[(1,)](
        *(lengths, plan.cuts, plan.records),
        *(lengths.numel(), lengths.stride(0), plan.workers, plan.rows.heads),
        *(plan.rows.queries, plan.rows.window, plan.costs.row, plan.costs.partial),
        TILE=plan.rows.tile,
        BATCH=triton.next_power_of_2(lengths.numel()),
        WORKERS=triton.next_power_of_2(plan.workers + 1),
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=[
        *("batch", "stride", "workers", "heads", "queries", "window", "row_cost", "partial_cost")
    ]
)
def plan_rows(
    lengths,
    cuts,
    records,
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
    sequence = tl.arange(0, BATCH)
    length = tl.load(lengths + sequence * stride, mask=sequence < batch, other=0)
    tiles = visible_tiles(length.to(tl.int32), queries, window, TILE)
    cost = tl.where(sequence < batch, row_cost + tiles * _UNIT, 0).to(tl.int64)
    ends = tl.cumsum(cost * heads, 0)
    tl.store(cuts + sequence, ends, mask=sequence < batch)
    total = tl.sum(cost * heads, 0)
    longest = tl.max(tiles, 0) * (_UNIT * partial_cost)
    least = tl.maximum(tl.sqrt_rn(longest.to(tl.float32)).to(tl.int64), _UNIT)
    used = tl.minimum(tl.maximum(total // least, 1), workers)
    tl.debug_barrier()  # below, threads read what others have stored

    worker = tl.arange(0, WORKERS)
    at = tl.minimum(worker * total // used, total)
    place = _count(cuts, batch, at, BATCH)
    there = tl.minimum(place, batch - 1)
    own_tiles = visible_tiles(tl.load(lengths + there * stride).to(tl.int32), queries, window, TILE)
    own = (row_cost + own_tiles * _UNIT).to(tl.int64)
    into = at - (tl.load(cuts + there) - own * heads)
    head = into // own
    tile = tl.maximum(into - head * own - row_cost + _UNIT // 2, 0) // _UNIT
    over = (tile > 0) & (tile >= own_tiles)
    row = there * heads + head + over.to(tl.int64)
    key = row * _TILES + tl.where(over, 0, tile)
    key = tl.where(place == batch, (batch * heads).to(tl.int64) * _TILES, key)
    keys = cuts + batch
    tl.store(keys + worker, key, mask=worker <= workers)
    tl.debug_barrier()

    real = worker < workers
    end = tl.load(keys + worker + 1, mask=real, other=0)
    row, end_row = key // _TILES, end // _TILES
    record = records + worker * _FIELDS
    tl.store(record, row.to(tl.int32), mask=real)
    tl.store(record + 1, (key % _TILES).to(tl.int32), mask=real)
    tl.store(record + 2, end_row.to(tl.int32), mask=real)
    tl.store(record + 3, (end % _TILES).to(tl.int32), mask=real)
    first = _count(keys, workers + 1, row * _TILES, WORKERS) - 1
    last = _count(keys, workers + 1, (row + 1) * _TILES - 1, WORKERS) - 1
    end_last = _count(keys, workers + 1, (end_row + 1) * _TILES - 1, WORKERS) - 1
    tl.store(record + 4, first, mask=real)
    tl.store(record + 5, last, mask=real)
    tl.store(record + 6, end_last, mask=real)


@triton.jit
def visible_tiles(length, queries, window, TILE: tl.constexpr):
    """As `schedule.tile_counts`, int32."""
    length = tl.maximum(length, 0)
    return (length + TILE - 1) // TILE - first_tile(length, queries, window, TILE)


@triton.jit
def first_tile(length, queries, window, TILE: tl.constexpr):
    """Of a sequence, that some query sees: int32. `window` 0 is for all tokens."""
    unseen = tl.maximum(length - queries - window + 1, 0) // TILE
    return tl.where(window > 0, unseen, 0)


@triton.jit
def touched_rows(record):
    """How many rows a worker has something of."""
    return tl.load(record + 2) - tl.load(record) + (tl.load(record + 3) > 0).to(tl.int32)


@triton.jit
def current_piece(
    record,
    done,
    lengths,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the row that a worker is at: its number, first tile and end of the worker's piece (counted from
    the first visible tile), tokens and visible tiles of its sequence."""
    begin, end = tl.load(record), tl.load(record + 2)
    row = begin + done
    length = tl.maximum(tl.load(lengths + row // HEADS), 0).to(tl.int32)
    tiles = visible_tiles(length, QUERIES, WINDOW, TILE)
    start = tl.where(row == begin, tl.load(record + 1), 0)
    stop = tl.where(row == end, tl.load(record + 3), tiles)
    return row, start, stop, length, tiles


@triton.jit
def _count(ordered, count, value, SIZE: tl.constexpr):
    """How many of `count` ordered numbers are at most `value`, for each: SIZE bounds them."""
    found = tl.zeros_like(value).to(tl.int32)
    step = tl.full((), SIZE, tl.int32)
    while step > 0:
        probe = found + step
        there = tl.load(ordered + probe - 1, mask=probe <= count, other=0)
        found = tl.where((probe <= count) & (there <= value), probe, found)
        step = step // 2
    return found
