# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How split-KV partials of a row become one result, within the launch that computes them.

A worker writes the partial of a split row to its slot and then counts it as arrived. When a worker
has finished its whole range, it looks whether all pieces of its split rows have arrived. If so, it
claims merge parts (some columns of some lines each) until none is left, and counts itself as done.

The worker whose piece arrives last always finds all pieces there. So every part is merged even if
no other worker is running: nobody depends on co-resident programs. Polling for late pieces
(`max_polls` times) only spreads the merge over more workers. The last worker that is done sets the
counters to zero for the next launch, which also makes CUDA graphs replayable.

A partial is a normalised result, and its weight: the base-2 log-sum-exp of its scores, -inf if
nothing was visible.
"""

import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import LOG2E, softmax_step
from pd_kernels.attention.plan_kernel import (
    COUNTERS,
    END_LAST_WORKER,
    END_ROW,
    END_TILE,
    FIRST_TILE,
    FIRST_WORKER,
    LAST_WORKER,
    ROW,
)

MAX_POLLS = 64
"""Polls of a counter, each a round trip to the L2."""

_COUNTERS = tl.constexpr(COUNTERS)
_LN2 = tl.constexpr(1 / LOG2E)


@triton.jit
def own_scratch(counters, partials, weights, before, HEIGHT: tl.constexpr, DIM: tl.constexpr):
    """The scratch of one block of lines, behind that of the `before` programs of other blocks."""
    slots = before * (2 * HEIGHT)
    return counters + before * _COUNTERS, partials + slots.to(tl.int64) * DIM, weights + slots


@triton.jit
def result_lines(row, line, HEADS: tl.constexpr, LINES: tl.constexpr, HEIGHT: tl.constexpr):
    """Where lines of a row belong: sequence, KV head, and number among that head's LINES lines.

    A line is one query of one query head. The lines of a KV head are cut into rows of HEIGHT.
    """
    BLOCKS: tl.constexpr = (LINES + HEIGHT - 1) // HEIGHT
    sequence, place = row // HEADS, row % HEADS
    return sequence, place // BLOCKS, place % BLOCKS * HEIGHT + line


@triton.jit
def store_lines(
    out,
    lse,
    row,
    line,
    column,
    results,
    weight,
    HEADS: tl.constexpr,
    LINES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Write finished lines of a row to the output.

    Args:
        out: `[batch, query, query head, DIM]`, dense.
        lse: float32 `[batch, query, query head]`.
        row: number of the row.
        line: which of its lines.
        column: which element of a line is the first of `results`.
        results: their elements, side by side in one or several tensors, float32 `[lines, BLOCK]`.
        weight: their base-2 log-sum-exp.
    """
    BLOCKS: tl.constexpr = (LINES + HEIGHT - 1) // HEIGHT
    QUERIES: tl.constexpr = LINES // GROUP
    sequence, head, number = result_lines(row, line, HEADS, LINES, HEIGHT)
    query = sequence.to(tl.int64) * QUERIES + number // GROUP
    index = query * (HEADS // BLOCKS * GROUP) + head * GROUP + number % GROUP
    exists = (number < LINES) & (line < HEIGHT)
    _store(out, index, column, results, exists, DIM)
    if WITH_LSE:
        tl.store(lse + index, weight * _LN2, mask=exists)


@triton.jit
def _store(out, index, first_column, results, exists, DIM: tl.constexpr):
    """Write elements, from `first_column` on, of the lines `index` of `out`, which have DIM
    elements, where they exist."""
    BLOCK: tl.constexpr = results[0].shape[1]
    column = first_column + tl.arange(0, BLOCK)[None, :]
    for number in tl.static_range(len(results)):
        place = out + index.to(tl.int64)[:, None] * DIM + number * BLOCK + column
        mask = exists[:, None] & (number * BLOCK + column < DIM)
        tl.store(place, results[number].to(out.dtype.element_ty), mask=mask)


@triton.jit
def finish_row(
    partials,
    weights,
    counters,
    out,
    lse,
    work_range,
    worker,
    row,
    start,
    whole,
    results,
    weight,
    HEADS: tl.constexpr,
    LINES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Write a worker's result of a row: to the output if it is the whole row, otherwise to a slot
    as a partial.

    Args:
        start: first tile of the worker's piece.
        whole: whether the piece is the whole row.
        results, weight: see `store_lines`.
    """
    line = tl.arange(0, HEIGHT)
    if whole:
        store_lines(
            out=out,
            lse=lse,
            row=row,
            line=line,
            column=0,
            results=results,
            weight=weight,
            HEADS=HEADS,
            LINES=LINES,
            HEIGHT=HEIGHT,
            GROUP=GROUP,
            DIM=DIM,
            WITH_LSE=WITH_LSE,
        )
    else:
        leaves = (start == 0).to(tl.int32)  # slot 1: the row goes on with the next worker
        place = (worker * 2 + leaves) * HEIGHT + line
        _store(partials, place, 0, results, line < HEIGHT, DIM)
        tl.store(weights + place, weight)
        first = tl.where(leaves > 0, worker, tl.load(work_range + FIRST_WORKER))
        tl.debug_barrier()  # all threads have stored before one thread counts the arrival
        tl.atomic_add(counters + first * _COUNTERS, 1, sem="acq_rel", scope="gpu")


@triton.jit
def merge_split_rows(
    partials,
    weights,
    counters,
    out,
    lse,
    work_range,
    worker,
    block,
    max_polls,
    HEADS: tl.constexpr,
    PAIRED: tl.constexpr,
    LINES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Help to merge the split rows of a worker that has finished its range, see `merge_row`.

    There are two at most: the row that it continued, and the row that it left to others.
    """
    begin, end = tl.load(work_range + ROW), tl.load(work_range + END_ROW)
    continued = (tl.load(work_range + FIRST_TILE) > 0).to(tl.int32)
    left = (tl.load(work_range + END_TILE) > 0) & ((end > begin) | (continued == 0))
    for number in range(1 - continued, 1 + left.to(tl.int32)):
        row = tl.where(number == 0, begin, end)
        first = tl.where(number == 0, tl.load(work_range + FIRST_WORKER), worker)
        last = tl.load(work_range + tl.where(number == 0, LAST_WORKER, END_LAST_WORKER))
        merge_row(
            partials=partials,
            weights=weights,
            counters=counters,
            out=out,
            lse=lse,
            row=row * PAIRED + block,
            first=first,
            last=last,
            max_polls=max_polls,
            HEADS=HEADS,
            LINES=LINES,
            HEIGHT=HEIGHT,
            GROUP=GROUP,
            DIM=DIM,
            DEPTH=DEPTH,
            PART=PART,
            COLUMNS=COLUMNS,
            WITH_LSE=WITH_LSE,
        )


@triton.jit
def merge_row(
    partials,
    weights,
    counters,
    out,
    lse,
    row,
    first,
    last,
    max_polls,
    HEADS: tl.constexpr,
    LINES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DEPTH: tl.constexpr,  # pieces that are merged at a time
    PART: tl.constexpr,  # lines of a part
    COLUMNS: tl.constexpr,  # elements of each of these lines
    WITH_LSE: tl.constexpr,
):
    """Help to merge a row whose pieces workers `first` to `last` have, and count this worker as
    done with it."""
    STRIPS: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    PARTS: tl.constexpr = (min(HEIGHT, LINES) + PART - 1) // PART * STRIPS
    pieces = last - first + 1
    counter = counters + first * _COUNTERS
    arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    polls = 0
    while (arrived < pieces) & (polls < max_polls):
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        polls += 1
    if arrived == pieces:
        part = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
        while part < PARTS:
            line = part // STRIPS * PART + tl.arange(0, PART)
            column = part % STRIPS * COLUMNS
            result, weight = _merged(
                partials, weights, first, pieces, line, column, HEIGHT, DIM, COLUMNS, DEPTH, PART
            )
            store_lines(
                out=out,
                lse=lse,
                row=row,
                line=line,
                column=column,
                results=(result,),
                weight=weight,
                HEADS=HEADS,
                LINES=LINES,
                HEIGHT=HEIGHT,
                GROUP=GROUP,
                DIM=DIM,
                WITH_LSE=WITH_LSE,
            )
            part = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
    done = tl.atomic_add(counter + 2, 1, sem="acq_rel", scope="gpu")
    if done == pieces - 1:
        tl.store(counter, 0)
        tl.store(counter + 1, 0)
        tl.store(counter + 2, 0)


@triton.jit
def _merged(
    partials,
    weights,
    first,
    pieces,
    line,
    first_column,
    HEIGHT: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Merge some columns of some lines of a row: the result, float32 `[PART, COLUMNS]`, and the
    lines' weight, `[PART]`."""
    column = first_column + tl.arange(0, COLUMNS)
    top = tl.full((PART,), float("-inf"), tl.float32)
    total = tl.zeros((PART,), tl.float32)
    result = tl.zeros((PART, COLUMNS), tl.float32)
    for begin in range(0, pieces, DEPTH):
        piece = begin + tl.arange(0, DEPTH)
        # The worker of the first piece left the row to others: slot 1. All others continued it:
        # slot 0.
        slot = (first + piece) * 2 + (piece == 0).to(tl.int32)
        place = slot[:, None] * HEIGHT + line[None, :]
        there = (piece < pieces)[:, None] & (line < HEIGHT)[None, :]
        weight = tl.load(weights + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        spot = partials + place.to(tl.int64)[:, :, None] * DIM + column[None, None, :]
        mask = there[:, :, None] & (column < DIM)[None, None, :]
        value = tl.load(spot, mask=mask, other=0.0, cache_modifier=".cg")
        share, before, top, total = softmax_step(weight, top, total, 0)
        result = result * before[:, None] + tl.sum(value * share[:, :, None], 0)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    return result, top + tl.log2(total)
