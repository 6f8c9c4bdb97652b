# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The work of the two warpgroups of `mla_gluon_kernel.py`; see there."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pd_kernels.attention.mla_call import GLUON_TILE, LATENT, ROPE
from pd_kernels.attention.online_softmax import LOG2E
from pd_kernels.attention.plan_kernel import COUNTERS, FIRST_WORKER, current_piece, rows_of
from pd_kernels.attention.split_merge import (
    DIM,
    GROUP,
    HEADS,
    HEIGHT,
    LINES,
    PAIRED,
    WITH_LSE,
)

_TILE = gl.constexpr(GLUON_TILE)
_HALF = gl.constexpr(LATENT // 2)
_ROPE = gl.constexpr(ROPE)
_LATENT = gl.constexpr(LATENT)
_COUNTERS = gl.constexpr(COUNTERS)
_LN2 = gl.constexpr(1 / LOG2E)
_TAIL = gl.constexpr(2)  # the part with RoPE among the buffers of a tile

# Triton 3.6 has another name for it than later versions.
_synchronize = getattr(gl, "barrier", None) or gl.thread_barrier

_SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
_RESULT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
)
_LINE = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_TOKEN = gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_RESULT_LINE = gl.constexpr(gl.SliceLayout(1, _RESULT.value))
_RESULT_COLUMN = gl.constexpr(gl.SliceLayout(0, _RESULT.value))

# Threads read queries and clear tokens in accesses of 16 bytes.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _load_queries(
    asked, asked_tail, query, sequence, number, tall, query_stride,
    SHAPE: gl.constexpr, QUERY: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Write a side's half of a row's queries to shared memory. Side 0 also writes the part with
    RoPE."""
    place = number // SHAPE[GROUP] * QUERY[0] + number % SHAPE[GROUP] * QUERY[1]
    place = query + sequence.to(gl.int64) * query_stride + place
    column = gl.arange(0, _HALF, layout=gl.SliceLayout(0, _WIDE))
    exists = (number < SHAPE[LINES])[:, None]
    found = gl.load(place[:, None] + SIDE * _HALF + column[None, :], mask=exists, other=0.0)
    asked.index(SIDE).store(found)
    if SIDE == 0:
        place = tall // SHAPE[GROUP] * QUERY[0] + tall % SHAPE[GROUP] * QUERY[1]
        place = query + sequence.to(gl.int64) * query_stride + place
        column = _LATENT + gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _NARROW))
        exists = (tall < SHAPE[LINES])[:, None]
        asked_tail.store(gl.load(place[:, None] + column[None, :], mask=exists, other=0.0))


@gluon.jit
def _tell(told, place: gl.constexpr):
    """Count this side at a barrier after all its threads have reached this point."""
    _synchronize()
    mbarrier.arrive(told.index(place))


@gluon.jit
def _scores(asked, asked_tail, kept, kept_tails, full, phase, SIDE: gl.constexpr):
    """The scores of a side's own tile, float32 `[HEIGHT, TILE]`. The half that comes first is
    multiplied first."""
    FIRST: gl.constexpr = SIDE
    SECOND: gl.constexpr = 1 - SIDE
    score = gl.full([asked.shape[1], _TILE], 0.0, gl.float32, layout=_SCORES)
    mbarrier.wait(full.index(SIDE * 3 + FIRST), phase)
    keys = kept.index(SIDE * 2 + FIRST).permute((1, 0))
    score = warpgroup_mma(asked.index(FIRST), keys, score, use_acc=False, is_async=True)
    mbarrier.wait(full.index(SIDE * 3 + SECOND), phase)
    keys = kept.index(SIDE * 2 + SECOND).permute((1, 0))
    score = warpgroup_mma(asked.index(SECOND), keys, score, is_async=True)
    mbarrier.wait(full.index(SIDE * 3 + _TAIL), phase)
    keys = kept_tails.index(SIDE).permute((1, 0))
    score = warpgroup_mma(asked_tail, keys, score, is_async=True)
    return warpgroup_mma_wait(0, deps=[score])


@gluon.jit
def _clear(tile, real):
    """Set all tokens of half a tile to zero except the first `real`. Memory behind a sequence may
    hold NaN, which a weight of 0 would not hide."""
    for part in gl.static_range(4):
        piece = tile.slice(part * 16, 16, dim=0)
        token = part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, _WIDE))
        found = piece.load(_WIDE)
        piece.store(gl.where((token < real)[:, None], found, gl.zeros_like(found)))


@gluon.jit
def attend_side(
    asked, asked_tail, notes, told, buffers, own, numbers,
    SHAPE: gl.constexpr, CAUSAL: gl.constexpr, QUERY: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Attend with all lines, and compute columns SIDE * 256 to SIDE * 256 + 255 of the result.

    Barriers in `told`, for sides 0 and 1: at 0 and 1 queries are ready, at 2 and 3 numbers are in
    `notes`, at 4 and 5 weights are ready.
    """
    OTHER: gl.constexpr = 1 - SIDE
    ROWS: gl.constexpr = SHAPE[HEADS] // SHAPE[PAIRED]
    QUERIES: gl.constexpr = SHAPE[LINES] // SHAPE[GROUP]
    TALL: gl.constexpr = SHAPE[HEIGHT]
    kept, kept_tails, full, empty = buffers
    query, lengths, _, _, _, _, _, work_range = own
    worker, block, query_stride, scale = numbers
    step = 0
    notices = 0
    for done in tl.range(0, rows_of(work_range), disable_licm=True):
        row, start, stop, length, tiles = current_piece(
            work_range, done, lengths, ROWS, QUERIES, 0, _TILE
        )
        place = row * SHAPE[PAIRED] + block
        sequence = place // SHAPE[HEADS]
        number = place % SHAPE[HEADS] * TALL
        _load_queries(
            asked, asked_tail, query, sequence,
            number + gl.arange(0, TALL, layout=gl.SliceLayout(1, _WIDE)),
            number + gl.arange(0, TALL, layout=gl.SliceLayout(1, _NARROW)),
            query_stride, SHAPE, QUERY, SIDE,
        )  # fmt: skip
        fence_async_shared()
        _tell(told, SIDE)
        mbarrier.wait(told.index(OTHER), done & 1)

        line = gl.arange(0, TALL, layout=_LINE)
        position = length - QUERIES + (number + line) // SHAPE[GROUP]
        end = gl.minimum(length, stop * _TILE)
        top = gl.full([TALL], float("-inf"), gl.float32, layout=_LINE)
        total = gl.full([TALL], 0.0, gl.float32, layout=_LINE)
        result = gl.full([TALL, _HALF], 0.0, gl.float32, layout=_RESULT)
        for pair in tl.range(0, (stop - start + 1) // 2, disable_licm=True):
            phase = step & 1
            score = _scores(asked, asked_tail, kept, kept_tails, full, phase, SIDE)
            begin = (start + pair * 2) * _TILE  # of the two tiles' tokens
            token = begin + SIDE * _TILE + gl.arange(0, _TILE, layout=_TOKEN)
            seen = (token < end)[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
            score = gl.where(seen, score * scale, float("-inf"))
            notes.index(SIDE).store(gl.max(score, 1))
            _tell(told, 2 + SIDE)
            mbarrier.wait(told.index(2 + OTHER), notices & 1)
            notices += 1
            above = gl.maximum(notes.index(SIDE).load(_LINE), notes.index(OTHER).load(_LINE))
            above = gl.maximum(top, above)
            safe = gl.where(above == float("-inf"), 0.0, above)
            share = gl.exp2(score - safe[:, None])
            before = gl.exp2(top - safe)
            total = total * before + gl.sum(share, 1)
            top = above
            kept_tails.index(SIDE).store(share.to(kept_tails.dtype))
            mine = kept.index(SIDE * 2 + SIDE)
            theirs = kept.index(OTHER * 2 + SIDE)
            # The other side has its scores already, so nothing reads the cleared tokens.
            if end < begin + 2 * _TILE:
                _clear(mine, end - begin - SIDE * _TILE)
                mbarrier.wait(full.index(OTHER * 3 + SIDE), phase)
                _clear(theirs, end - begin - OTHER * _TILE)
            fence_async_shared()
            _tell(told, 4 + SIDE)
            result = result * gl.convert_layout(before, _RESULT_LINE)[:, None]
            result = warpgroup_mma(kept_tails.index(SIDE), mine, result, is_async=True)
            mbarrier.wait(told.index(4 + OTHER), phase)
            mbarrier.wait(full.index(OTHER * 3 + SIDE), phase)
            result = warpgroup_mma(kept_tails.index(OTHER), theirs, result, is_async=True)
            result = warpgroup_mma_wait(1, deps=[result])
            _synchronize()
            mbarrier.arrive(empty.index(SIDE * 3 + SIDE))
            mbarrier.arrive(empty.index(SIDE * 3 + _TAIL))
            result = warpgroup_mma_wait(0, deps=[result])
            _synchronize()
            mbarrier.arrive(empty.index(OTHER * 3 + SIDE))
            mbarrier.arrive(empty.index(OTHER * 3 + _TAIL))
            step += 1

        # Each side has the weights of its own tiles only.
        notes.index(SIDE).store(total)
        _tell(told, 2 + SIDE)
        mbarrier.wait(told.index(2 + OTHER), notices & 1)
        notices += 1
        total = notes.index(SIDE).load(_LINE) + notes.index(OTHER).load(_LINE)
        share = 1.0 / gl.where(total > 0, total, 1.0)
        result = result * gl.convert_layout(share, _RESULT_LINE)[:, None]
        weight = top + gl.log2(total)
        whole = (start == 0) & (stop == tiles)
        _finish(own, worker, sequence, number, start, whole, result, weight, SHAPE, SIDE)


@gluon.jit
def _finish(
    own, worker, sequence, number, start, whole, result, weight,
    SHAPE: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Write a side's columns of a row, like `finish_row` of `split_merge.py`. The second launch
    merges split rows."""
    _, _, out, lse, counters, partials, weights, work_range = own
    tall = gl.arange(0, SHAPE[HEIGHT], layout=_RESULT_LINE)
    line = gl.arange(0, SHAPE[HEIGHT], layout=_LINE)
    column = SIDE * _HALF + gl.arange(0, _HALF, layout=_RESULT_COLUMN)
    if whole:
        first = sequence.to(gl.int64) * SHAPE[LINES] + number
        place = (first + tall)[:, None] * SHAPE[DIM] + column[None, :]
        exists = (number + tall < SHAPE[LINES])[:, None]
        gl.store(out + place, result.to(out.dtype.element_ty), mask=exists)
        if SHAPE[WITH_LSE]:  # noqa: SIM102 - known at compile time
            if SIDE == 0:
                gl.store(lse + first + line, weight * _LN2, mask=number + line < SHAPE[LINES])
    else:
        leaves = (start == 0).to(gl.int32)  # slot 1: the row goes on with the next worker
        slot = (worker * 2 + leaves) * SHAPE[HEIGHT]
        place = (slot + tall).to(gl.int64)[:, None] * SHAPE[DIM] + column[None, :]
        gl.store(partials + place, result)
        if SIDE == 0:
            gl.store(weights + slot + line, weight)
            first_worker = gl.where(leaves > 0, worker, gl.load(work_range + FIRST_WORKER))
            # Nothing in this launch waits for the count, and the next launch begins after this one
            # has ended.
            gl.atomic_add(counters + first_worker * _COUNTERS, 1, sem="relaxed")
