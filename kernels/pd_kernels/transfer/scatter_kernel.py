# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that scatters a payload into pages, and decodes or converts its elements on the way.

A vector is 16 elements. Each element is decoded separately, so one kernel serves all codecs.
"""

import triton
import triton.language as tl

from pd_kernels.payload import SUPER_PAGE
from pd_kernels.transfer.numerics import stored
from pd_kernels.transfer.prologue import (
    UNSPECIALISED,
    cache_plane,
    payload_plane,
    row_vectors,
    token_offsets,
)
from pd_kernels.transfer.sums import add_scales, add_words

VECTORS = 512
WARPS = 8
REGISTERS = 64
MORE_REGISTERS = 80  # with sums, or if K and V differ in dim
MOST_REGISTERS = 128  # if each element needs its own address

_SUPER_PAGE = tl.constexpr(SUPER_PAGE)


def registers(wide: bool, check: bool, alike: bool) -> int:
    """Registers of a thread. Nothing spills, and loads of several programs overlap.

    Args:
        wide: see `Planes.wide`.
        check: whether the kernel adds to the sums.
        alike: whether K and V have the same dim.
    """
    if not wide:
        return MOST_REGISTERS
    return REGISTERS if alike and not check else MORE_REGISTERS


@triton.jit(do_not_specialize=UNSPECIALISED)
def scatter_decoded(
    table,
    factors,
    pages,
    slot,
    sums,
    first,  # token, counted from the start of the first page
    tokens,
    super_pages,
    layer_sections,  # 16 bytes each, in one layer of the payload
    key_sections,  # of K, scales included
    key_scales,  # sections of K's scales
    value_scales,
    tiles,  # tiles of codes; programs of further tiles add the scales to the sums
    PARTS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_VECTORS: tl.constexpr,  # in one token of one head
    VALUE_VECTORS: tl.constexpr,
    CODE: tl.constexpr,  # dtype on the wire
    SCALES: tl.constexpr,  # `none`; `super-page` for fp8_e4m3; `group` for int8
    STEP: tl.constexpr,
    DESTINATION: tl.constexpr,
    WIDE: tl.constexpr,
    CHECK: tl.constexpr,
    VECTORS: tl.constexpr,
):
    column, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head, section, scales = payload_plane(
        column, layer, layer_sections, key_sections, key_scales, value_scales, PARTS
    )
    if CHECK:  # noqa: SIM102 - known at compile time, unlike the next
        if tile >= tiles:
            add_scales(sums, slot, section, scales, head, tile - tiles, VECTORS, tile)
            return
    BYTES: tl.constexpr = CODE.primitive_bitwidth // 8
    width = row_vectors(part, KEY_VECTORS, VALUE_VECTORS)
    limit = tokens * width
    vector = tile * VECTORS + tl.arange(0, VECTORS)
    token, inside = vector // width, vector < limit
    index = (vector % width)[:, None] * 16 + tl.arange(0, 16)[None, :]
    begin = section + scales + (head * limit + tile * VECTORS).to(tl.int64) * BYTES
    coded = (slot + begin * 16).to(tl.pointer_type(CODE))
    within = tl.arange(0, VECTORS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = inside[:, None]
    codes = tl.load(coded + within, mask=mask, other=0.0, eviction_policy="evict_first")
    if CHECK:
        N: tl.constexpr = 2 * BYTES
        each = tl.arange(0, VECTORS)[:, None] * N + tl.arange(0, N)[None, :]
        words = tl.load((slot + begin * 16).to(tl.pointer_type(tl.int64)) + each, mask, other=0)
        add_words(sums, begin * 2, tl.reshape(words, (VECTORS * N // 256, 256)), 256, tile + column)

    value = codes.to(tl.float32)
    if SCALES == "super-page":
        scaled = (slot + section * 16).to(tl.pointer_type(tl.float32))
        group = head * super_pages + token // _SUPER_PAGE
        value = value * tl.load(scaled + group, mask=inside, other=0.0)[:, None]
    elif SCALES == "group":
        scaled = (slot + section * 16).to(tl.pointer_type(tl.bfloat16))
        if part == 0:
            group = (head * super_pages + token // _SUPER_PAGE) * (KEY_VECTORS * 16)
            factor = tl.load(scaled + (group[:, None] + index), mask=mask, other=0.0)
        else:
            factor = tl.load(scaled + (head * tokens + token), mask=inside, other=0.0)[:, None]
            factor = tl.broadcast_to(factor, (VECTORS, 16))
        value = value * factor.to(tl.float32)
    converted = stored(value, tl.load(factors + layer * PARTS + part), STEP, DESTINATION)

    cached, page_stride, head_stride, token_stride, dim_stride = cache_plane(
        table, layer * PARTS + part, DESTINATION, WIDE
    )
    there = token_offsets(pages, first + token, inside, page_stride, token_stride, VIEW, PAGES)
    there += head * head_stride
    if not WIDE:
        index = index * dim_stride
    tl.store(cached + (there[:, None] + index), converted, mask=mask)
