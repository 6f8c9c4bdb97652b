# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How the pieces of a split row become one result, within the launch that makes them.

Each piece's worker publishes its partial result and **arrives**. When a worker has finished its whole
stretch, it polls whether all pieces of its split rows have arrived; if so, it takes **parts** of the
merge (some lines of the result each) until none is left, and **departs**. The last arriver always
finds all pieces there, so that every part is taken, whoever else may be running: waiting for others
(`max_polls` polls) only spreads the merge over more programs. The last to depart makes the counters
zero for the next launch, which is all that CUDA graphs need.

A partial is a result, normalised, and the base-2 logarithm of its sum: -inf if nothing was visible.
"""

import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import LOG2E, weigh
from pd_kernels.attention.plan_kernel import COUNTERS

MAX_POLLS = 64
"""Looks at a counter, each a round trip to the L2."""

_COUNTERS = tl.constexpr(COUNTERS)
_LN2 = tl.constexpr(1 / LOG2E)


@triton.jit
def result_lines(row, line, HEADS: tl.constexpr, LINES: tl.constexpr, HEIGHT: tl.constexpr):
    """Where lines of a row lie: its sequence, KV head, and number among that head's `LINES`.

    A line is a query of one head. A KV head's lines are cut into rows of HEIGHT.
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
    results,
    weight,
    HEADS: tl.constexpr,
    LINES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Write lines of a row, which are done, to the output `[batch, query, query head, DIM]`.

    `results` are their elements, side by side in one or several tensors, float32 `[lines, BLOCK]`;
    `weight` is their base-2 logarithm.
    """
    BLOCKS: tl.constexpr = (LINES + HEIGHT - 1) // HEIGHT
    QUERIES: tl.constexpr = LINES // GROUP
    sequence, head, number = result_lines(row, line, HEADS, LINES, HEIGHT)
    query = sequence.to(tl.int64) * QUERIES + number // GROUP
    index = query * (HEADS // BLOCKS * GROUP) + head * GROUP + number % GROUP
    exists = (number < LINES) & (line < HEIGHT)
    _store(out, index, results, exists, DIM)
    if WITH_LSE:
        tl.store(lse + index, weight * _LN2, mask=exists)


@triton.jit
def _store(out, index, results, exists, DIM: tl.constexpr):
    """Write lines of DIM elements, those that exist, at `index`."""
    BLOCK: tl.constexpr = results[0].shape[1]
    column = tl.arange(0, BLOCK)[None, :]
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
    record,
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
    """Write what a worker has of a row (see `store_lines`) where it belongs: to the output if that is
    the whole row, else to a slot of the worker. `start` is its first tile."""
    line = tl.arange(0, HEIGHT)
    if whole:
        store_lines(
            *(out, lse, row, line, results, weight),
            *(HEADS, LINES, HEIGHT, GROUP, DIM, WITH_LSE),
        )
    else:
        leaves = (start == 0).to(tl.int32)
        place = (worker * 2 + leaves) * HEIGHT + line
        _store(partials, place, results, line < HEIGHT, DIM)
        tl.store(weights + place, weight)
        first = tl.where(leaves > 0, worker, tl.load(record + 4))
        tl.debug_barrier()  # the arrival is one thread's, the stores are everybody's
        tl.atomic_add(counters + first * _COUNTERS, 1, sem="acq_rel", scope="gpu")


@triton.jit
def merge_split_rows(
    partials,
    weights,
    counters,
    out,
    lse,
    record,
    worker,
    max_polls,
    HEADS: tl.constexpr,
    LINES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """What a worker does when its stretch is done: see `merge_row`. There are two such rows at most:
    the one that it continued, and the one that it left to others."""
    begin, end = tl.load(record), tl.load(record + 2)
    continued = (tl.load(record + 1) > 0).to(tl.int32)
    left = (tl.load(record + 3) > 0) & ((end > begin) | (continued == 0))
    for number in range(1 - continued, 1 + left.to(tl.int32)):
        row = tl.where(number == 0, begin, end)
        first = tl.where(number == 0, tl.load(record + 4), worker)
        last = tl.where(number == 0, tl.load(record + 5), tl.load(record + 6))
        merge_row(
            *(partials, weights, counters, out, lse, row, first, last, max_polls),
            *(HEADS, LINES, HEIGHT, GROUP, DIM, BLOCK, DEPTH, PART, WITH_LSE),
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
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,  # pieces that are merged at a time
    PART: tl.constexpr,  # lines of a part
    WITH_LSE: tl.constexpr,
):
    """Help merge a row whose pieces workers `first` to `last` have, and depart from it."""
    FILLED: tl.constexpr = min(HEIGHT, LINES)
    pieces = last - first + 1
    counter = counters + first * _COUNTERS
    arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    polls = 0
    while (arrived < pieces) & (polls < max_polls):
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        polls += 1
    if arrived == pieces:
        part = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
        while part * PART < FILLED:
            line = part * PART + tl.arange(0, PART)
            result, weight = _merged(
                partials, weights, first, pieces, line, HEIGHT, DIM, BLOCK, DEPTH, PART
            )
            store_lines(
                *(out, lse, row, line, (result,), weight),
                *(HEADS, LINES, HEIGHT, GROUP, DIM, WITH_LSE),
            )
            part = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
    departed = tl.atomic_add(counter + 2, 1, sem="acq_rel", scope="gpu")
    if departed == pieces - 1:
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
    HEIGHT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Lines of the merged row: the result, float32 `[PART, BLOCK]`, and its weight, `[PART]`."""
    column = tl.arange(0, BLOCK)
    top = tl.full((PART,), float("-inf"), tl.float32)
    total = tl.zeros((PART,), tl.float32)
    result = tl.zeros((PART, BLOCK), tl.float32)
    for begin in range(0, pieces, DEPTH):
        piece = begin + tl.arange(0, DEPTH)
        # A row's first piece is its worker's last, in the second slot; of the others, in the first.
        slot = (first + piece) * 2 + (piece == 0).to(tl.int32)
        place = slot[:, None] * HEIGHT + line[None, :]
        there = (piece < pieces)[:, None] & (line < HEIGHT)[None, :]
        weight = tl.load(weights + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        spot = partials + place.to(tl.int64)[:, :, None] * DIM + column[None, None, :]
        mask = there[:, :, None] & (column < DIM)[None, None, :]
        value = tl.load(spot, mask=mask, other=0.0, cache_modifier=".cg")
        share, before, top, total = weigh(weight, top, total, 0)
        result = result * before[:, None] + tl.sum(value * share[:, :, None], 0)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    return result, top + tl.log2(total)
