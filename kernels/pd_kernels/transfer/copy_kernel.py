# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that copies elements as they are, from pages into a slot or back: `raw` between caches
that store alike, `verbatim`, and the codes of `fp8_e4m3` on their way into an FP8 cache.

A vector is 16 bytes of the payload. A program has consecutive vectors of one head of one block, of
`verbatim` those of one layer; K and V of the same tokens, which engines store side by side, are
neighbours in the launch.
"""

import triton
import triton.language as tl

from pd_kernels.transfer.chunk_launch import WORDS, ChunkLaunch
from pd_kernels.transfer.paging import block_row, token_offsets
from pd_kernels.transfer.sums import add_section, add_words, launch_payload_sums

VECTORS = 1024
WARPS = 4
UNSPECIALISED = (
    *("first", "tokens", "layer_sections", "key_sections", "key_scales", "value_scales"),
    *("tiles", "ahead", "max_polls", "super_pages"),
)
"""Integers that change from chunk to chunk: a kernel is compiled once for all of them."""


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
    tiles,  # of codes; further ones sum the scales
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_VECTORS: tl.constexpr,  # in a token of one head
    VALUE_VECTORS: tl.constexpr,
    WORD: tl.constexpr,  # dtype that is moved, as wide as memory allows
    WIDE: tl.constexpr,
    VERBATIM: tl.constexpr,
    GATHER: tl.constexpr,
    CHECK: tl.constexpr,
    VECTORS: tl.constexpr,
):
    column, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head = column % PARTS, column // PARTS
    BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    N: tl.constexpr = 16 // BYTES
    scales = tl.where(part == 0, key_scales, value_scales)
    section = layer.to(tl.int64) * layer_sections + part * key_sections
    if CHECK and not GATHER:  # noqa: SIM102 - known when compiled, unlike the next
        if tile >= tiles:
            if head == 0:
                done = (tile - tiles) * VECTORS
                add_section(sums, slot, section + done, scales - done, VECTORS, tile)
            return
    if KEY_VECTORS == VALUE_VECTORS:
        width = KEY_VECTORS
    else:
        width = tl.where(part == 0, KEY_VECTORS, VALUE_VECTORS)
    vector = tile * VECTORS + tl.arange(0, VECTORS)
    row = vector // width
    if VERBATIM:
        place, first_vector = row // HEADS, 0
        inside = vector < tokens * (HEADS * width)
    else:
        place, first_vector = first + row, head * (tokens * width)
        inside = vector < tokens * width

    address, page, head_stride, token, dim = block_row(table, layer * PARTS + part, WIDE, BYTES)
    there = token_offsets(pages, place, inside, page, token, VIEW, PAGES)
    if VERBATIM:
        there += (row % HEADS) * head_stride
    else:
        there += head * head_stride
    index = (vector % width)[:, None] * N + tl.arange(0, N)[None, :]
    cache = address.to(tl.pointer_type(WORD))
    if WIDE:
        cache = tl.multiple_of(cache, 16)
        cached = cache + (there[:, None] + index)
    else:
        cached = cache + (there[:, None] + index * dim)
    begin = section + scales + first_vector + tile * VECTORS
    coded = (slot + begin * 16).to(tl.pointer_type(WORD)) + (
        tl.arange(0, VECTORS)[:, None] * N + tl.arange(0, N)[None, :]
    )
    mask = inside[:, None]
    if GATHER:
        words = tl.load(cached, mask=mask, other=0)
        tl.store(coded, words, mask=mask)
    else:
        words = tl.load(coded, mask=mask, other=0)
        tl.store(cached, words, mask=mask)
    if CHECK:
        tl.static_assert(BYTES == 8)
        add_words(sums, begin * 2, tl.reshape(words, (VECTORS // 128, 256)), 256, tile + column)


def launch_copy(chunk: ChunkLaunch, gather: bool) -> None:
    """Copy elements as they are, from the pages into the slot or back."""
    blocks, fused = chunk.blocks, chunk.sums is not None and chunk.blocks.wide
    element = blocks.views[0].element_size()
    widths = [dim * element // 16 for dim in blocks.dims]
    vectors = chunk.tokens * max(widths) * (blocks.heads if chunk.verbatim else 1)
    tiles = triton.cdiv(vectors, VECTORS)
    places = chunk.places()
    scales = max(places["key_scales"], places["value_scales"])
    further = triton.cdiv(scales, VECTORS) if fused and not gather else 0
    columns = 1 if chunk.verbatim else blocks.parts * blocks.heads
    if chunk.sums is not None and not fused and not gather:
        launch_payload_sums(chunk.payload, chunk.sums)
    copy_pages[(columns, tiles + further, blocks.layers)](
        *(blocks.table, chunk.pages, chunk.slot),
        chunk.sums if fused else blocks.table,
        *(chunk.first_token, chunk.tokens),
        **places,
        tiles=tiles,
        **chunk.paging(),
        HEADS=blocks.heads,
        KEY_VECTORS=widths[0],
        VALUE_VECTORS=widths[-1],
        WORD=WORDS[8 if blocks.wide else element],
        VERBATIM=chunk.verbatim,
        GATHER=gather,
        CHECK=fused,
        VECTORS=VECTORS,
        num_warps=WARPS,
    )
    if chunk.sums is not None and not fused and gather:
        launch_payload_sums(chunk.payload, chunk.sums)
