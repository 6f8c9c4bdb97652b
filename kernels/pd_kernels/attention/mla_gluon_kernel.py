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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from pd_kernels.attention.mla_call import GLUON_TILE, LATENT, ROPE
from pd_kernels.attention.mla_gluon_sides import attend_side
from pd_kernels.attention.plan_kernel import COUNTERS, current_piece, rows_of
from pd_kernels.attention.split_merge import DIM, GROUP, HEADS, HEIGHT, LINES, PAIRED
from pd_kernels.attention.work_partition import FIELDS

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

    asked = gl.allocate_shared_memory(halves.dtype, [2, SHAPE[HEIGHT], _HALF], halves.layout)
    asked_tail = gl.allocate_shared_memory(tails.dtype, [SHAPE[HEIGHT], _ROPE], tails.layout)
    kept = gl.allocate_shared_memory(halves.dtype, [4, _TILE, _HALF], halves.layout)
    kept_tails = gl.allocate_shared_memory(tails.dtype, [2, _TILE, _ROPE], tails.layout)
    notes = gl.allocate_shared_memory(gl.float32, [2, SHAPE[HEIGHT]], _NOTES)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(6):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(told.index(place), count=1)
        # Both sides read the weights, which lie in the buffer of the part with RoPE.
        mbarrier.init(empty.index(place), count=2 if place % 3 == 2 else 1)
    fence_async_shared()  # the TMA sees the new barriers, too

    buffers = (kept, kept_tails, full, empty)
    own = (query, lengths, out, lse, counters, partials, weights, work_range)
    numbers = (worker, block, query_stride, scale)
    gl.warp_specialize(
        [
            (attend_side, (asked, asked_tail, notes, told, buffers, own, numbers, SHAPE, CAUSAL, QUERY, 0)),
            (attend_side, (asked, asked_tail, notes, told, buffers, own, numbers, SHAPE, CAUSAL, QUERY, 1)),
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
