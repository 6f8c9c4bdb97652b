# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that gathers as `int8`: K with a scale per channel of 128 tokens, V with one per token.

A program has some channels of a super-page of K, or some whole tokens of V: all that a scale needs,
in registers. Codes of a group whose scale is NaN, because an element is not finite, say nothing.
"""

import triton
import triton.language as tl

from pd_kernels.transfer.copy_kernel import UNSPECIALISED
from pd_kernels.transfer.numerics import (
    byte_words,
    int8_codes,
    int8_scale,
    magnitude_bits,
    near_quotient,
)
from pd_kernels.transfer.paging import block_row, token_offsets
from pd_kernels.transfer.payload import SUPER_PAGE
from pd_kernels.transfer.sums import add_pieces, add_words

ELEMENTS = 8_192  # of a program, where dims are enough
WARPS = 4
REGISTERS = 112  # of a thread, so that four programs fit on a multiprocessor

_SUPER_PAGE = tl.constexpr(SUPER_PAGE)


def key_channels(dim: int) -> int:
    """Channels of a program: the power of two that divides `dim`, 128 at most."""
    return min(dim & -dim, ELEMENTS // SUPER_PAGE)


def value_tokens(padded_dim: int) -> int:
    """Tokens of a program; `padded_dim` is the power of two from dim up."""
    return max(1, ELEMENTS // 2 // padded_dim)  # half a tile: it needs more registers


@triton.jit
def _tile(
    cached, pages, token, index, inside, first, page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32 `[token, index]`, zero where not `inside`, which has that shape."""
    there = token_offsets(pages, first + token, token >= 0, page_stride, token_stride, VIEW, PAGES)
    if not WIDE:
        index = index * dim_stride
    found = tl.load(cached + (there[:, None] + index[None, :]), mask=inside, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _write_codes(
    slot, sums, codes, begin, inside, copy,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PITCH: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Store `[ROWS, WIDTH * 8]` codes from word `begin` of the payload on, rows PITCH words apart.

    `inside` broadcasts to `[ROWS, WIDTH]` and says which words there are.
    """
    eights = tl.reshape(codes.to(tl.uint8, bitcast=True), (ROWS * WIDTH, 8))
    words = tl.reshape(byte_words(eights, ROWS * WIDTH), (ROWS, WIDTH))
    place = tl.arange(0, ROWS)[:, None] * PITCH + tl.arange(0, WIDTH)[None, :]
    tl.store((slot + begin * 8).to(tl.pointer_type(tl.int64)) + place, words, mask=inside)
    if CHECK:
        words = tl.where(inside, words, 0)
        if WIDTH == PITCH:
            add_words(sums, begin, tl.reshape(words, (ROWS * WIDTH // 256, 256)), 256, copy)
        else:
            add_words(sums, begin, words, PITCH, copy)


@triton.jit
def _gather_key(
    cached, pages, slot, sums, first, tokens, super_pages, section, scales, head, tile, copy,
    page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Some channels of a super-page of a head of K."""
    SLICES: tl.constexpr = DIM // CHANNELS
    super_page, piece = tile // SLICES, tile % SLICES
    channel = piece * CHANNELS + tl.arange(0, CHANNELS)
    token = super_page * _SUPER_PAGE + tl.arange(0, _SUPER_PAGE)
    inside = (token < tokens)[:, None]
    value = _tile(
        cached, pages, tl.minimum(token, tokens - 1), channel, inside, first, page_stride,
        token_stride, dim_stride, VIEW, PAGES, WIDE,
    )  # fmt: skip
    scale = int8_scale(tl.max(magnitude_bits(value), axis=0))
    reciprocal = tl.div_rn(1.0, scale)
    codes = int8_codes(near_quotient(value, scale[None, :], reciprocal[None, :]))
    first_token = head * tokens + super_page * _SUPER_PAGE
    begin = (section + scales) * 2 + first_token * (DIM // 8) + piece * (CHANNELS // 8)
    _write_codes(
        slot, sums, codes, begin, inside, copy, _SUPER_PAGE, CHANNELS // 8, DIM // 8, CHECK
    )
    at = section * 16 + ((head * super_pages + super_page) * DIM + channel) * 2
    scaled = scale.to(tl.bfloat16)
    tl.store((slot + at).to(tl.pointer_type(tl.bfloat16)), scaled)
    if CHECK:
        add_pieces(sums, at, scaled.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF, 2, copy)


@triton.jit
def _gather_value(
    cached, pages, slot, sums, first, tokens, section, scales, head, tile, copy,
    page_stride, token_stride, dim_stride,
    HEADS: tl.constexpr, VIEW: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head of V; with the last ones, the zeros behind the scales."""
    channel = tl.arange(0, PADDED)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    if DIM == PADDED:
        inside = there[:, None]
        kept = inside
    else:
        inside = there[:, None] & (channel < DIM)[None, :]
        kept = there[:, None] & (tl.arange(0, PADDED // 8) < DIM // 8)[None, :]
    value = _tile(
        cached, pages, tl.minimum(token, tokens - 1), channel, inside, first, page_stride,
        token_stride, dim_stride, VIEW, PAGES, WIDE,
    )  # fmt: skip
    scale = int8_scale(tl.max(magnitude_bits(value), axis=1))
    reciprocal = tl.div_rn(1.0, scale)
    codes = int8_codes(near_quotient(value, scale[:, None], reciprocal[:, None]))
    begin = (section + scales) * 2 + (head * tokens + tile * TOKENS) * (DIM // 8)
    _write_codes(slot, sums, codes, begin, kept, copy, TOKENS, PADDED // 8, DIM // 8, CHECK)
    at = section * 16 + (head * tokens + token) * 2
    scaled = scale.to(tl.bfloat16)
    tl.store((slot + at).to(tl.pointer_type(tl.bfloat16)), scaled, mask=there)
    if CHECK:
        bits = scaled.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        add_pieces(sums, at, tl.where(there, bits, 0), 2, copy)
    if (head == HEADS - 1) & ((tile + 1) * TOKENS >= tokens):
        end = HEADS * tokens + tl.arange(0, 8)  # a section holds 8 scales
        padding = (slot + section * 16).to(tl.pointer_type(tl.int16)) + end
        tl.store(padding, tl.zeros((8,), tl.int16), mask=end < scales * 8)


@triton.jit(do_not_specialize=UNSPECIALISED)
def gather_int8(
    table,
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
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,  # VALUE_DIM or the next power of two
    SOURCE: tl.constexpr,
    WIDE: tl.constexpr,
    CHECK: tl.constexpr,
):
    column, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head = column % PARTS, column // PARTS
    section = layer.to(tl.int64) * layer_sections + part * key_sections
    address, page_stride, head_stride, token_stride, dim_stride = block_row(
        table, layer * PARTS + part, WIDE, SOURCE.primitive_bitwidth // 8
    )
    cached = address.to(tl.pointer_type(SOURCE))
    if WIDE:
        cached = tl.multiple_of(cached, 16)
    cached += head * head_stride
    copy = tile + column
    if part == 0:
        if tile < super_pages * (KEY_DIM // CHANNELS):
            _gather_key(
                cached, pages, slot, sums, first, tokens, super_pages, section, key_scales, head,
                tile, copy, page_stride, token_stride, dim_stride,
                VIEW, PAGES, KEY_DIM, CHANNELS, WIDE, CHECK,
            )  # fmt: skip
    elif tile * TOKENS < tokens:
        _gather_value(
            cached, pages, slot, sums, first, tokens, section, value_scales, head, tile, copy,
            page_stride, token_stride, dim_stride,
            HEADS, VIEW, PAGES, VALUE_DIM, TOKENS, PADDED, WIDE, CHECK,
        )  # fmt: skip
