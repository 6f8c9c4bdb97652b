# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that copies elements unchanged between pages and a payload, in either direction.

It serves `raw` between caches of the same dtype and scales, `verbatim`, and `fp8_e4m3` codes that
go into an FP8 cache. A vector is 16 bytes of the payload. A program copies consecutive vectors of
one head of one plane, or, for `verbatim`, of one layer. K and V of the same tokens are neighbours
in the launch, because engines store them side by side.
"""

import triton
import triton.language as tl

from pd_kernels.transfer.chunk_launch import WORDS, ChunkLaunch
from pd_kernels.transfer.prologue import (
    UNSPECIALISED,
    cache_plane,
    payload_plane,
    row_vectors,
    token_offsets,
)
from pd_kernels.transfer.sums import add_scales, add_words, launch_payload_sums

VECTORS = 1024
"""Vectors of a program."""
WARPS = 4
NARROW_REGISTERS = 192
"""Registers of a thread if each element needs its own address. Without this limit ptxas takes fewer
registers and spills."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def copy_pages(
    table,
    pages,
    slot,
    sums,
    first,  # token, counted from the start of the first page
    tokens,
    layer_sections,  # 16 bytes each, in one layer of the payload
    key_sections,  # of K, scales included
    key_scales,  # sections of K's scales
    value_scales,
    tiles,  # tiles of codes; programs of further tiles add the scales to the sums
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_VECTORS: tl.constexpr,  # in one token of one head
    VALUE_VECTORS: tl.constexpr,
    WORD: tl.constexpr,  # dtype that is moved: as wide as the strides allow
    WIDE: tl.constexpr,
    VERBATIM: tl.constexpr,
    GATHER: tl.constexpr,
    CHECK: tl.constexpr,
    VECTORS: tl.constexpr,
):
    column, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head, section, scales = payload_plane(
        column, layer, layer_sections, key_sections, key_scales, value_scales, PARTS
    )
    if CHECK and not GATHER:  # noqa: SIM102 - known at compile time, unlike the next
        if tile >= tiles:
            add_scales(sums, slot, section, scales, head, tile - tiles, VECTORS, tile)
            return
    BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    N: tl.constexpr = 16 // BYTES
    width = row_vectors(part, KEY_VECTORS, VALUE_VECTORS)
    vector = tile * VECTORS + tl.arange(0, VECTORS)
    row = vector // width
    if VERBATIM:
        place, first_vector = row // HEADS, 0
        inside = vector < tokens * (HEADS * width)
    else:
        place, first_vector = first + row, head * (tokens * width)
        inside = vector < tokens * width

    cache, page, head_stride, token, dim = cache_plane(table, layer * PARTS + part, WORD, WIDE)
    there = token_offsets(pages, place, inside, page, token, VIEW, PAGES)
    if VERBATIM:
        there += (row % HEADS) * head_stride
    else:
        there += head * head_stride
    index = (vector % width)[:, None] * N + tl.arange(0, N)[None, :]
    if not WIDE:
        index = index * dim
    cached = cache + (there[:, None] + index)
    begin = section + scales + first_vector + tile * VECTORS
    coded = (slot + begin * 16).to(tl.pointer_type(WORD)) + (
        tl.arange(0, VECTORS)[:, None] * N + tl.arange(0, N)[None, :]
    )
    mask = inside[:, None]
    if GATHER:
        words = tl.load(cached, mask=mask, other=0, eviction_policy="evict_first")
        tl.store(coded, words, mask=mask)
    else:
        words = tl.load(coded, mask=mask, other=0, eviction_policy="evict_first")
        tl.store(cached, words, mask=mask)
    if CHECK:
        tl.static_assert(BYTES == 8)
        add_words(sums, begin * 2, tl.reshape(words, (VECTORS // 128, 256)), 256, tile + column)


def launch_copy(chunk: ChunkLaunch, gather: bool) -> None:
    """Copy the elements of a chunk from the pages into the slot (`gather`) or back.

    The kernel sums 8-byte words only. A separate launch sums rows that are not aligned to 16 bytes.
    """
    planes, fused = chunk.planes, chunk.sums is not None and chunk.planes.wide
    element = planes.views[0].element_size()
    widths = [dim * element // 16 for dim in planes.dims]
    vectors = chunk.tokens * max(widths) * (planes.heads if chunk.verbatim else 1)
    tiles = triton.cdiv(vectors, VECTORS)
    scale_tiles = triton.cdiv(chunk.most_scale_sections, VECTORS) if fused and not gather else 0
    columns = 1 if chunk.verbatim else planes.parts * planes.heads
    if chunk.sums is not None and not fused and not gather:
        launch_payload_sums(chunk.payload, chunk.sums)
    copy_pages[(columns, tiles + scale_tiles, planes.layers)](
        **chunk.operands(summed=fused),
        tiles=tiles,
        HEADS=planes.heads,
        KEY_VECTORS=widths[0],
        VALUE_VECTORS=widths[-1],
        WORD=WORDS[8 if planes.wide else element],
        VERBATIM=chunk.verbatim,
        GATHER=gather,
        CHECK=fused,
        VECTORS=VECTORS,
        num_warps=WARPS,
        maxnreg=None if planes.wide else NARROW_REGISTERS,
    )
    if chunk.sums is not None and not fused and gather:
        launch_payload_sums(chunk.payload, chunk.sums)
