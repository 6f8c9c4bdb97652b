# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""`mla_decode` for Hopper, written in Gluon: one warp loads tiles by TMA, and each of two
warpgroups has its own products.

It takes rows of more than 32 lines (`MlaCall.gluon`). It has not run on a GPU yet: its compiled
code has been executed without one (`tests/emulator`). The Triton kernel (`mla_kernel.py`) takes all
other calls, and other GPUs.

As in FlashMLA, a program has 64 lines, and the two warpgroups ("sides") share the results by
columns: side 0 has columns 0 to 255, side 1 the rest. The sides work on two tiles at a time. Each
side computes the scores of one tile, so no score is computed twice. Each side weighs its own
columns of both tiles. Through shared memory, the sides exchange each line's largest score and the
weights.

A tile of 64 tokens is three buffers: left half, right half, and the part with RoPE. Each has two
barriers: `full` (the TMA has written it) and `empty` (it may be written again). When a tile's
scores are computed, its part with RoPE is not needed any more, and that buffer takes the tile's
weights. This fills shared memory.

When a side is done with a row, it writes its columns. A second launch, of the Triton kernel with
the same plan, merges split rows.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
from pd_kernels.attention.work_partition import FIELDS

_LN2 = gl.constexpr(1 / LOG2E)

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
    queries, queries_tail, query, sequence, number, tall, query_stride,
    SHAPE: gl.constexpr, QUERY: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Write a side's half of a row's queries to shared memory. Side 0 also writes the part with
    RoPE."""
    place = number // SHAPE[GROUP] * QUERY[0] + number % SHAPE[GROUP] * QUERY[1]
    place = query + sequence.to(gl.int64) * query_stride + place
    column = gl.arange(0, _HALF, layout=gl.SliceLayout(0, _WIDE))
    exists = (number < SHAPE[LINES])[:, None]
    loaded = gl.load(place[:, None] + SIDE * _HALF + column[None, :], mask=exists, other=0.0)
    queries.index(SIDE).store(loaded)
    if SIDE == 0:
        place = tall // SHAPE[GROUP] * QUERY[0] + tall % SHAPE[GROUP] * QUERY[1]
        place = query + sequence.to(gl.int64) * query_stride + place
        column = _LATENT + gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _NARROW))
        exists = (tall < SHAPE[LINES])[:, None]
        queries_tail.store(gl.load(place[:, None] + column[None, :], mask=exists, other=0.0))


@gluon.jit
def _tell(signals, place: gl.constexpr):
    """Count this side at a barrier after all its threads have reached this point."""
    _synchronize()
    mbarrier.arrive(signals.index(place))


@gluon.jit
def _scores(queries, queries_tail, kept, kept_tails, full, phase, SIDE: gl.constexpr):
    """The scores of a side's own tile, float32 `[HEIGHT, TILE]`. The half that comes first is
    multiplied first."""
    FIRST: gl.constexpr = SIDE
    SECOND: gl.constexpr = 1 - SIDE
    score = gl.full([queries.shape[1], _TILE], 0.0, gl.float32, layout=_SCORES)
    mbarrier.wait(full.index(SIDE * 3 + FIRST), phase)
    keys = kept.index(SIDE * 2 + FIRST).permute((1, 0))
    score = warpgroup_mma(queries.index(FIRST), keys, score, use_acc=False, is_async=True)
    mbarrier.wait(full.index(SIDE * 3 + SECOND), phase)
    keys = kept.index(SIDE * 2 + SECOND).permute((1, 0))
    score = warpgroup_mma(queries.index(SECOND), keys, score, is_async=True)
    mbarrier.wait(full.index(SIDE * 3 + _TAIL), phase)
    keys = kept_tails.index(SIDE).permute((1, 0))
    score = warpgroup_mma(queries_tail, keys, score, is_async=True)
    return warpgroup_mma_wait(0, deps=[score])


@gluon.jit
def _clear(tile, real):
    """Set all tokens of half a tile to zero except the first `real`. Memory behind a sequence may
    hold NaN, which a weight of 0 would not hide."""
    for part in gl.static_range(4):
        piece = tile.slice(part * 16, 16, dim=0)
        token = part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, _WIDE))
        tokens = piece.load(_WIDE)
        piece.store(gl.where((token < real)[:, None], tokens, gl.zeros_like(tokens)))


@gluon.jit
def attend_side(
    queries, queries_tail, notes, signals, buffers, own, numbers,
    SHAPE: gl.constexpr, CAUSAL: gl.constexpr, TREE: gl.constexpr, QUERY: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Attend with all lines, and compute columns SIDE * 256 to SIDE * 256 + 255 of the result.

    Barriers in `signals`, for sides 0 and 1: at 0 and 1 queries are ready, at 2 and 3 numbers are in
    `notes`, at 4 and 5 weights are ready.
    """
    OTHER: gl.constexpr = 1 - SIDE
    ROWS: gl.constexpr = SHAPE[HEADS] // SHAPE[PAIRED]
    QUERIES: gl.constexpr = SHAPE[LINES] // SHAPE[GROUP]
    TALL: gl.constexpr = SHAPE[HEIGHT]
    kept, kept_tails, full, empty = buffers
    query, lengths, tree, _, _, _, _, _, work_range = own
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
            queries, queries_tail, query, sequence,
            number + gl.arange(0, TALL, layout=gl.SliceLayout(1, _WIDE)),
            number + gl.arange(0, TALL, layout=gl.SliceLayout(1, _NARROW)),
            query_stride, SHAPE, QUERY, SIDE,
        )  # fmt: skip
        fence_async_shared()
        _tell(signals, SIDE)
        mbarrier.wait(signals.index(OTHER), done & 1)

        line = gl.arange(0, TALL, layout=_LINE)
        if TREE > 0:
            words = tree + sequence * TREE + (number + line) // SHAPE[GROUP]
            position = gl.load(words, mask=number + line < SHAPE[LINES], other=0)
        else:
            position = length - QUERIES + (number + line) // SHAPE[GROUP]
        end = gl.minimum(length, stop * _TILE)
        top = gl.full([TALL], float("-inf"), gl.float32, layout=_LINE)
        total = gl.full([TALL], 0.0, gl.float32, layout=_LINE)
        result = gl.full([TALL, _HALF], 0.0, gl.float32, layout=_RESULT)
        for pair in tl.range(0, (stop - start + 1) // 2, disable_licm=True):
            phase = step & 1
            score = _scores(queries, queries_tail, kept, kept_tails, full, phase, SIDE)
            begin = (start + pair * 2) * _TILE  # of the two tiles' tokens
            token = begin + SIDE * _TILE + gl.arange(0, _TILE, layout=_TOKEN)
            seen = (token < end)[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
            if TREE > 0:
                draft = token - (length - TREE)
                shift = gl.minimum(gl.maximum(draft, 0), 31)[None, :]
                bit = (position[:, None] >> shift) & 1
                seen = seen & ((draft < 0)[None, :] | (bit != 0))
            score = gl.where(seen, score * scale, float("-inf"))
            notes.index(SIDE).store(gl.max(score, 1))
            _tell(signals, 2 + SIDE)
            mbarrier.wait(signals.index(2 + OTHER), notices & 1)
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
            _tell(signals, 4 + SIDE)
            result = result * gl.convert_layout(before, _RESULT_LINE)[:, None]
            result = warpgroup_mma(kept_tails.index(SIDE), mine, result, is_async=True)
            mbarrier.wait(signals.index(4 + OTHER), phase)
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
        _tell(signals, 2 + SIDE)
        mbarrier.wait(signals.index(2 + OTHER), notices & 1)
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
    _, _, _, out, lse, counters, partials, weights, work_range = own
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


REGISTERS = 168
"""Registers of a thread before the warps redistribute them. Three warpgroups have all registers of
a multiprocessor."""

_SIDE_REGISTERS = gl.constexpr(232)
_LOADER_REGISTERS = gl.constexpr(40)

_TILE = gl.constexpr(GLUON_TILE)
_HALF = gl.constexpr(LATENT // 2)
_ROPE = gl.constexpr(ROPE)
_LATENT = gl.constexpr(LATENT)
_FIELDS = gl.constexpr(FIELDS)
_COUNTERS = gl.constexpr(COUNTERS)
_NOTES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))

# The buffers of a tile. Each half has the number of the side that weighs it.
_LEFT = gl.constexpr(0)
_RIGHT = gl.constexpr(1)
_TAIL = gl.constexpr(2)

# Triton 3.6 has another name for it than later versions.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit(do_not_specialize=["workers", "table_stride", "scale", "pitch"])
def latent_attention_tma(
    halves,  # descriptor of the cache as `[tokens, 576]`, in boxes of 64 x 256
    tails,  # the same in boxes of 64 x 64
    query,
    table,
    lengths,
    tree,  # with TREE, a word of each query; see `tree_tokens`
    out,
    lse,
    ranges,
    counters,
    partials,
    weights,
    workers,
    query_stride,  # of a sequence
    table_stride,
    scale,
    pitch,  # tokens from the start of a page to that of the next
    SHAPE: gl.constexpr,  # see `split_merge.py`
    PAGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    TREE: gl.constexpr,  # queries of a sequence that are drafts of a tree; 0: they are none
    QUERY: gl.constexpr,  # strides of query, head
):
    worker = gl.program_id(0) // SHAPE[PAIRED]
    block = gl.program_id(0) % SHAPE[PAIRED]
    work_range = ranges + worker * _FIELDS
    before = block * workers
    slots = before * (2 * SHAPE[HEIGHT])
    counters += before * _COUNTERS
    weights += slots
    partials += slots.to(gl.int64) * SHAPE[DIM]

    queries = gl.allocate_shared_memory(halves.dtype, [2, SHAPE[HEIGHT], _HALF], halves.layout)
    queries_tail = gl.allocate_shared_memory(tails.dtype, [SHAPE[HEIGHT], _ROPE], tails.layout)
    kept = gl.allocate_shared_memory(halves.dtype, [4, _TILE, _HALF], halves.layout)
    kept_tails = gl.allocate_shared_memory(tails.dtype, [2, _TILE, _ROPE], tails.layout)
    notes = gl.allocate_shared_memory(gl.float32, [2, SHAPE[HEIGHT]], _NOTES)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    signals = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(6):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(signals.index(place), count=1)
        # Both sides read the weights, which lie in the buffer of the part with RoPE.
        mbarrier.init(empty.index(place), count=2 if place % 3 == 2 else 1)
    fence_async_shared()  # the TMA sees the new barriers, too

    buffers = (kept, kept_tails, full, empty)
    own = (query, lengths, tree, out, lse, counters, partials, weights, work_range)
    numbers = (worker, block, query_stride, scale)
    gl.warp_specialize(
        [
            (attend_side, (queries, queries_tail, notes, signals, buffers, own, numbers, SHAPE, CAUSAL, TREE, QUERY, 0)),
            (attend_side, (queries, queries_tail, notes, signals, buffers, own, numbers, SHAPE, CAUSAL, TREE, QUERY, 1)),
            (_load_tiles, (halves, tails, buffers, table, lengths, work_range, table_stride, pitch, SHAPE, PAGE)),
        ],
        [4, 1],
        [_SIDE_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _fetch(source, row, column, barriers, place, buffer, phase, BYTES: gl.constexpr):
    """Load a box of the cache into a buffer when it is empty."""
    full, empty = barriers
    mbarrier.wait(empty.index(place), phase)
    mbarrier.expect(full.index(place), BYTES)
    _load(source, [row, column], full.index(place), buffer)


@gluon.jit
def _load_tiles(
    halves, tails, buffers, table, lengths, work_range, table_stride, pitch,
    SHAPE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Load the tiles of all rows of a worker, two at a time, in the order in which buffers become
    empty. If a row has an odd number of tiles, its last tile is loaded twice."""
    ROWS: gl.constexpr = SHAPE[HEADS] // SHAPE[PAIRED]
    QUERIES: gl.constexpr = SHAPE[LINES] // SHAPE[GROUP]
    PIECES: gl.constexpr = PAGE // _TILE
    HALF_BYTES: gl.constexpr = _TILE * _HALF * 2
    TAIL_BYTES: gl.constexpr = _TILE * _ROPE * 2
    kept, kept_tails, full, empty = buffers
    barriers = (full, empty)
    step = 0
    for done in tl.range(0, rows_of(work_range), disable_licm=True):
        row, start, stop, _, _ = current_piece(work_range, done, lengths, ROWS, QUERIES, 0, _TILE)
        pages = table + (row // ROWS).to(gl.int64) * table_stride
        for pair in tl.range(0, (stop - start + 1) // 2, disable_licm=True):
            first = start + pair * 2
            second = gl.minimum(first + 1, stop - 1)
            row_0 = gl.load(pages + first // PIECES) * pitch + first % PIECES * _TILE
            row_1 = gl.load(pages + second // PIECES) * pitch + second % PIECES * _TILE
            phase = (step & 1) ^ 1
            _fetch(halves, row_0, 0, barriers, _LEFT, kept.index(0), phase, HALF_BYTES)
            _fetch(halves, row_1, _HALF, barriers, 3 + _RIGHT, kept.index(3), phase, HALF_BYTES)
            _fetch(halves, row_0, _HALF, barriers, _RIGHT, kept.index(1), phase, HALF_BYTES)
            _fetch(halves, row_1, 0, barriers, 3 + _LEFT, kept.index(2), phase, HALF_BYTES)
            _fetch(tails, row_0, _LATENT, barriers, _TAIL, kept_tails.index(0), phase, TAIL_BYTES)
            _fetch(
                tails, row_1, _LATENT, barriers, 3 + _TAIL, kept_tails.index(1), phase, TAIL_BYTES
            )
            step += 1
