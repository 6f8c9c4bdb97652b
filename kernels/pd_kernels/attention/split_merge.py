# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The merge of a row's split-KV partials, within the launch that computes them.

A worker writes the partial of a split row to its slot and then counts it as arrived. When a worker
has finished its whole range, it checks whether all pieces of its split rows have arrived. If so, it
claims merge parts until none is left, and counts itself as done. A merge part is some columns of
some lines.

The worker whose piece arrives last always finds all pieces there. So every part is merged even if
no other worker is running. The merge does not depend on co-resident programs. Polling for late
pieces (`max_polls` times) only spreads the merge over more workers. The last worker to finish sets
the counters to zero for the next launch. This also lets CUDA graphs replay.

A partial is a normalised result and its weight. The weight is the base-2 log-sum-exp of its scores,
or -inf if no token was visible.
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
from pd_kernels.attention.work_partition import FIELDS

MAX_POLLS = 64
"""The most polls of a counter. Each poll is a round trip to the L2 cache."""

_COUNTERS = tl.constexpr(COUNTERS)
_FIELDS = tl.constexpr(FIELDS)
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(1 / LOG2E)


# A row's shape, `SHAPE`: rows of a sequence, blocks of lines that run side by side, lines per KV head,
# lines of a row (padded), query heads per KV head, elements of a line of the result, whether lse is
# wanted, whether sequences have different numbers of queries, whether query heads have sinks, elements of a
# line of the result (padded), whether KV heads have scales of their own.
HEADS, PAIRED, LINES, HEIGHT, GROUP, DIM, WITH_LSE, JAGGED, SINKS, PADDED_DIM, SCALED = (
    tl.constexpr(place) for place in range(11)
)

# How a split row is merged, `PARTS`: pieces merged at a time, lines of a merge part, elements of
# each of these lines.
DEPTH, PART, COLUMNS = (tl.constexpr(place) for place in range(3))


@triton.jit
def own_place(scratch, ranges, workers, program, SHAPE: tl.constexpr):
    """The worker and the memory of a program.

    Args:
        scratch: `DecodePlan.counters`, `partials` and `weights`.
        ranges: `DecodePlan.ranges`.
        program: number of the program.

    Returns:
        worker, block: the worker, and the program's block of lines in the worker's rows.
        work_range: the worker's record.
        scratch: the scratch memory of this block. It lies behind the memory of earlier blocks.
    """
    counters, partials, weights = scratch
    worker, block = program // SHAPE[PAIRED], program % SHAPE[PAIRED]
    before = block * workers
    slots = before * (2 * SHAPE[HEIGHT])
    partials += slots.to(tl.int64) * SHAPE[DIM]
    own = (counters + before * _COUNTERS, partials, weights + slots)
    return worker, block, ranges + worker * _FIELDS, own


@triton.jit
def result_lines(row, line, SHAPE: tl.constexpr):
    """Where lines of a row belong: sequence, KV head, and number among that head's lines.

    A line is one query of one query head. The lines of a KV head are cut into rows.
    """
    BLOCKS: tl.constexpr = (SHAPE[LINES] + SHAPE[HEIGHT] - 1) // SHAPE[HEIGHT]
    sequence, place = row // SHAPE[HEADS], row % SHAPE[HEADS]
    return sequence, place // BLOCKS, place % BLOCKS * SHAPE[HEIGHT] + line


@triton.jit
def line_queries(starts, sequence, number, SHAPE: tl.constexpr):
    """The queries of some lines of a sequence.

    Args:
        starts: where each sequence's queries begin among all queries of the batch, `[batch + 1]`;
            read only if the batch is jagged.
        number: the number of each line among the lines of its KV head.

    Returns:
        first: the sequence's first query among all queries of the batch, int64.
        count: the sequence's number of queries.
        exists: which of the lines exist.
    """
    QUERIES: tl.constexpr = SHAPE[LINES] // SHAPE[GROUP]
    if SHAPE[JAGGED]:
        first = tl.load(starts + sequence).to(tl.int64)
        count = tl.load(starts + sequence + 1).to(tl.int64) - first
        count = tl.minimum(count, QUERIES).to(tl.int32)
        return first, count, number < count * SHAPE[GROUP]
    return sequence.to(tl.int64) * QUERIES, QUERIES, number < SHAPE[LINES]


@triton.jit
def store_lines(target, row, line, column, results, weight, SHAPE: tl.constexpr):
    """Write finished lines of a row to the output.

    Args:
        target: `out`, dense `[batch, query, query head, dim]`; `lse`, float32 `[batch, query, query
            head]`; `starts`, see `line_queries`; and `sinks`, `[query head]`, read only if
            there are some. In a jagged batch the first two axes are one.
        row: number of the row.
        line: numbers of the row's lines.
        column: the element of a line at which `results` begins.
        results: their elements, side by side in one or several tensors, float32 `[lines, BLOCK]`.
        weight: their base-2 log-sum-exp.
    """
    out, lse, starts, sinks = target
    BLOCKS: tl.constexpr = (SHAPE[LINES] + SHAPE[HEIGHT] - 1) // SHAPE[HEIGHT]
    sequence, head, number = result_lines(row, line, SHAPE)
    first, _, exists = line_queries(starts, sequence, number, SHAPE)
    index = (first + number // SHAPE[GROUP]) * (SHAPE[HEADS] // BLOCKS * SHAPE[GROUP])
    index += head * SHAPE[GROUP] + number % SHAPE[GROUP]
    exists = exists & (line < SHAPE[HEIGHT])
    if SHAPE[SINKS]:
        own = head * SHAPE[GROUP] + number % SHAPE[GROUP]
        share, weight = _with_sinks(tl.load(sinks + own, mask=exists, other=0.0), weight)
        results = (results[0] * share[:, None],)  # no kernel with several has sinks
    _store(out, index, column, results, exists, SHAPE[DIM])
    if SHAPE[WITH_LSE]:  # noqa: SIM102 - known at compile time
        if column == 0:  # programs that merge other columns of these lines have the same number
            tl.store(lse + index, weight * _LN2, mask=exists)


@triton.jit
def _with_sinks(sink, weight):
    """Finished lines take the score of their head's sink into their softmax. It has no value.

    Args:
        sink: its score, natural, `[lines]`.
        weight: base-2 log-sum-exp of the tokens' scores, float32 `[lines]`.

    Returns:
        share: of the tokens in the sum; the factor for the results.
        weight: base-2 log-sum-exp, the sink included.
    """
    sink = sink.to(tl.float32) * _LOG2E
    nothing = weight == float("-inf")
    more = tl.exp2(sink - weight)
    share = tl.where(nothing, 0.0, 1.0 / (1.0 + more))
    smaller = tl.exp2(-tl.abs(sink - weight))
    both = tl.maximum(sink, weight) + tl.log2(1.0 + smaller)
    return share, tl.where(nothing, sink, both)


@triton.jit
def _store(out, index, first_column, results, exists, WIDTH: tl.constexpr):
    """Write elements of the lines `index` of `out`, from `first_column` on. Lines have WIDTH
    elements. Lines that do not exist are skipped."""
    BLOCK: tl.constexpr = results[0].shape[1]
    column = first_column + tl.arange(0, BLOCK)[None, :]
    for number in tl.static_range(len(results)):
        place = out + index.to(tl.int64)[:, None] * WIDTH + number * BLOCK + column
        mask = exists[:, None] & (number * BLOCK + column < WIDTH)
        tl.store(place, results[number].to(out.dtype.element_ty), mask=mask)


@triton.jit
def finish_row(
    scratch,
    target,
    work_range,
    worker,
    row,
    start,
    whole,
    results,
    weight,
    SHAPE: tl.constexpr,
):
    """Write a worker's result of a row. If the piece is the whole row, this writes the output,
    otherwise a partial in a slot.

    Args:
        scratch: from `own_place`.
        start: first tile of the worker's piece.
        whole: whether the piece is the whole row.
        target, results, weight: see `store_lines`.
    """
    line = tl.arange(0, SHAPE[HEIGHT])
    if whole:
        store_lines(target, row, line, 0, results, weight, SHAPE)
    else:
        counters, partials, weights = scratch
        leaves = (start == 0).to(tl.int32)  # slot 1: the row goes on with the next worker
        place = (worker * 2 + leaves) * SHAPE[HEIGHT] + line
        _store(partials, place, 0, results, line < SHAPE[HEIGHT], SHAPE[DIM])
        tl.store(weights + place, weight)
        first = tl.where(leaves > 0, worker, tl.load(work_range + FIRST_WORKER))
        tl.debug_barrier()  # all threads must have stored before one thread counts the arrival
        tl.atomic_add(counters + first * _COUNTERS, 1, sem="acq_rel", scope="gpu")


@triton.jit
def merge_split_rows(
    scratch,
    target,
    work_range,
    worker,
    block,
    max_polls,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Help to merge the split rows of a worker that has finished its range, see `merge_row`.

    There are at most two: the row that the worker continued, and the row that it left unfinished.
    """
    begin, end = tl.load(work_range + ROW), tl.load(work_range + END_ROW)
    continued = (tl.load(work_range + FIRST_TILE) > 0).to(tl.int32)
    left = (tl.load(work_range + END_TILE) > 0) & ((end > begin) | (continued == 0))
    for number in range(1 - continued, 1 + left.to(tl.int32)):
        row = tl.where(number == 0, begin, end)
        first = tl.where(number == 0, tl.load(work_range + FIRST_WORKER), worker)
        last = tl.load(work_range + tl.where(number == 0, LAST_WORKER, END_LAST_WORKER))
        row = row * SHAPE[PAIRED] + block
        merge_row(scratch, target, row, first, last, max_polls, SHAPE, PARTS)


@triton.jit
def merge_row(
    scratch,
    target,
    row,
    first,
    last,
    max_polls,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Help to merge a row whose pieces belong to workers `first` to `last`, and count this worker
    as done with the row."""
    counters, partials, weights = scratch
    STRIPS: tl.constexpr = (SHAPE[DIM] + PARTS[COLUMNS] - 1) // PARTS[COLUMNS]
    REAL: tl.constexpr = min(SHAPE[HEIGHT], SHAPE[LINES])
    COUNT: tl.constexpr = (REAL + PARTS[PART] - 1) // PARTS[PART] * STRIPS
    pieces = last - first + 1
    counter = counters + first * _COUNTERS
    arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    polls = 0
    while (arrived < pieces) & (polls < max_polls):
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        polls += 1
    if arrived == pieces:
        part = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
        while part < COUNT:
            line = part // STRIPS * PARTS[PART] + tl.arange(0, PARTS[PART])
            column = part % STRIPS * PARTS[COLUMNS]
            result, weight = _merged(partials, weights, first, pieces, line, column, SHAPE, PARTS)
            store_lines(target, row, line, column, (result,), weight, SHAPE)
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
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge some columns of some lines of a row: the result, float32, and the lines' weight."""
    # Triton 3.6 takes no elements of a tuple as a shape.
    TALL: tl.constexpr = PARTS[PART]
    WIDE: tl.constexpr = PARTS[COLUMNS]
    column = first_column + tl.arange(0, WIDE)
    top = tl.full((TALL,), float("-inf"), tl.float32)
    total = tl.zeros((TALL,), tl.float32)
    result = tl.zeros((TALL, WIDE), tl.float32)
    for begin in range(0, pieces, PARTS[DEPTH]):
        piece = begin + tl.arange(0, PARTS[DEPTH])
        # The worker of the first piece left the row unfinished: slot 1. All other workers continued
        # it: slot 0.
        slot = (first + piece) * 2 + (piece == 0).to(tl.int32)
        place = slot[:, None] * SHAPE[HEIGHT] + line[None, :]
        there = (piece < pieces)[:, None] & (line < SHAPE[HEIGHT])[None, :]
        weight = tl.load(weights + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        spot = partials + place.to(tl.int64)[:, :, None] * SHAPE[DIM] + column[None, None, :]
        mask = there[:, :, None] & (column < SHAPE[DIM])[None, None, :]
        value = tl.load(spot, mask=mask, other=0.0, cache_modifier=".cg")
        share, before, top, total = softmax_step(weight, top, total, 0)
        result = result * before[:, None] + tl.sum(value * share[:, :, None], 0)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    return result, top + tl.log2(total)
