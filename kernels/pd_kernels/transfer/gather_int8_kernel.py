# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that gathers as `int8`: K has one scale per channel and 128 tokens, V has one scale
per token.

A program holds some channels of a super-page of K, or some whole tokens of V, in registers. That is
all data on which a scale depends. If an element of a group is not finite, its scale is NaN and its
codes are arbitrary.
"""

import triton
import triton.language as tl

from pd_kernels.payload import SUPER_PAGE
from pd_kernels.transfer.numerics import (
    byte_words,
    int8_codes,
    int8_scale,
    magnitude_bits,
    near_quotient,
    upper_half,
)
from pd_kernels.transfer.packed_numerics import (
    int8_pairs,
    joined_pairs,
    larger_halves,
    magnitudes,
    wide_bits,
)
from pd_kernels.transfer.prologue import (
    UNSPECIALISED,
    cache_plane,
    payload_plane,
    token_offsets,
)
from pd_kernels.transfer.sums import add_pieces, add_words

ELEMENTS = 8_192
"""Elements per program, if the dims allow it."""
WARPS = 4
REGISTERS = 112
"""Registers of a thread: four programs fit on a multiprocessor."""

_SUPER_PAGE = tl.constexpr(SUPER_PAGE)


def key_channels(dim: int) -> int:
    """Channels of K per program: the largest power of two that divides `dim`, at most 64."""
    return min(dim & -dim, ELEMENTS // SUPER_PAGE)


def value_tokens(padded_dim: int) -> int:
    """Tokens of V per program; `padded_dim` is dim, rounded up to a power of two."""
    return max(
        1, ELEMENTS // 2 // padded_dim
    )  # half the elements of K, because V needs more registers


@triton.jit
def _tile(
    cached, pages, token, index, inside, first, page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load elements or words of two elements, `[token, index]`. They are zero where `inside` is
    false. `inside` broadcasts to that shape."""
    there = token_offsets(pages, first + token, token >= 0, page_stride, token_stride, VIEW, PAGES)
    if not WIDE:
        index = index * dim_stride
    return tl.load(
        cached + (there[:, None] + index[None, :]),
        mask=inside,
        other=0,
        eviction_policy="evict_first",
    )


@triton.jit
def _write_codes(
    slot, sums, words, begin, inside, copy,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PITCH: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Store codes, int64 `[ROWS * WIDTH]`, and add them to the sums.

    Args:
        begin: 8-byte word of the payload at which the first row begins; rows are PITCH words apart.
        inside: which words exist; broadcasts to `[ROWS, WIDTH]`.
    """
    words = tl.reshape(words, (ROWS, WIDTH))
    place = tl.arange(0, ROWS)[:, None] * PITCH + tl.arange(0, WIDTH)[None, :]
    tl.store((slot + begin * 8).to(tl.pointer_type(tl.int64)) + place, words, mask=inside)
    if CHECK:
        words = tl.where(inside, words, 0)
        if WIDTH == PITCH:
            add_words(sums, begin, tl.reshape(words, (ROWS * WIDTH // 256, 256)), 256, copy)
        else:
            add_words(sums, begin, words, PITCH, copy)


@triton.jit
def _key_codes(value, SOURCE: tl.constexpr, PACKED: tl.constexpr):
    """Code K.

    Args:
        value: a super-page of elements or words, `[token, index]`.

    Returns:
        words: the codes, int64 `[tokens * channels / 8]`.
        scale: float32 `[channels]`.
    """
    TOKENS: tl.constexpr = value.shape[0]
    if PACKED:
        EIGHTS: tl.constexpr = value.shape[1] // 4
        both = tl.reduce(magnitudes(value), 0, larger_halves)
        even = int8_scale(wide_bits(both & 0xFFFF, SOURCE))
        odd = int8_scale(wide_bits(both >> 16, SOURCE))
        pairs = int8_pairs(
            value, tl.div_rn(1.0, even)[None, :], tl.div_rn(1.0, odd)[None, :], SOURCE
        )
        words = joined_pairs(tl.reshape(pairs, (TOKENS * EIGHTS, 4)), TOKENS * EIGHTS)
        scale = tl.interleave(even, odd)
    else:
        value = value.to(tl.float32)
        scale = int8_scale(tl.max(magnitude_bits(value), axis=0))
        reciprocal = tl.div_rn(1.0, scale)
        words = _joined(int8_codes(near_quotient(value, scale[None, :], reciprocal[None, :])))
    return words, scale


@triton.jit
def _value_codes(value, SOURCE: tl.constexpr, PACKED: tl.constexpr):
    """Code V like `_key_codes`, with scales `[token]`."""
    TOKENS: tl.constexpr = value.shape[0]
    if PACKED:
        EIGHTS: tl.constexpr = value.shape[1] // 4
        both = tl.reduce(magnitudes(value), 1, larger_halves)
        scale = int8_scale(wide_bits(tl.maximum(both & 0xFFFF, both >> 16), SOURCE))
        reciprocal = tl.div_rn(1.0, scale)[:, None]
        pairs = int8_pairs(value, reciprocal, reciprocal, SOURCE)
        words = joined_pairs(tl.reshape(pairs, (TOKENS * EIGHTS, 4)), TOKENS * EIGHTS)
    else:
        value = value.to(tl.float32)
        scale = int8_scale(tl.max(magnitude_bits(value), axis=1))
        reciprocal = tl.div_rn(1.0, scale)
        words = _joined(int8_codes(near_quotient(value, scale[:, None], reciprocal[:, None])))
    return words, scale


@triton.jit
def _joined(codes):
    """int8 codes as 8-byte words, int64, on one axis."""
    EIGHTS: tl.constexpr = codes.shape[0] * codes.shape[1] // 8
    return byte_words(tl.reshape(codes.to(tl.uint8, bitcast=True), (EIGHTS, 8)), EIGHTS)


@triton.jit
def _gather_key(
    cached, pages, slot, sums, first, tokens, super_pages, section, scales, head, tile, copy,
    page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    SOURCE: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Code some channels of one super-page of a head of K."""
    SLICES: tl.constexpr = DIM // CHANNELS
    EACH: tl.constexpr = CHANNELS // 2 if PACKED else CHANNELS  # words or elements
    super_page, piece = tile // SLICES, tile % SLICES
    channel = piece * CHANNELS + tl.arange(0, CHANNELS)
    token = super_page * _SUPER_PAGE + tl.arange(0, _SUPER_PAGE)
    inside = (token < tokens)[:, None]
    value = _tile(
        cached, pages, tl.minimum(token, tokens - 1), piece * EACH + tl.arange(0, EACH), inside,
        first, page_stride, token_stride, dim_stride, VIEW, PAGES, WIDE,
    )  # fmt: skip
    words, scale = _key_codes(value, SOURCE, PACKED)
    first_token = head * tokens + super_page * _SUPER_PAGE
    begin = (section + scales) * 2 + first_token * (DIM // 8) + piece * (CHANNELS // 8)
    _write_codes(
        slot, sums, words, begin, inside, copy, _SUPER_PAGE, CHANNELS // 8, DIM // 8, CHECK
    )
    at = section * 16 + ((head * super_pages + super_page) * DIM + channel) * 2
    bits = upper_half(scale)
    tl.store((slot + at).to(tl.pointer_type(tl.int16)), bits)
    if CHECK:
        add_pieces(sums, at, bits.to(tl.int64) & 0xFFFF, 2, copy)


@triton.jit
def _gather_value(
    cached, pages, slot, sums, first, tokens, section, scales, head, tile, copy,
    page_stride, token_stride, dim_stride,
    HEADS: tl.constexpr, VIEW: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr, SOURCE: tl.constexpr, WIDE: tl.constexpr,
    PACKED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Code some tokens of a head of V. The last program also stores the zeros behind the scales."""
    PER: tl.constexpr = 2 if PACKED else 1  # elements of the loaded tensor
    index = tl.arange(0, PADDED // PER)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    if DIM == PADDED:
        inside = there[:, None]
        kept = inside
    else:
        inside = there[:, None] & (index < DIM // PER)[None, :]
        kept = there[:, None] & (tl.arange(0, PADDED // 8) < DIM // 8)[None, :]
    value = _tile(
        cached, pages, tl.minimum(token, tokens - 1), index, inside, first, page_stride,
        token_stride, dim_stride, VIEW, PAGES, WIDE,
    )  # fmt: skip
    words, scale = _value_codes(value, SOURCE, PACKED)
    begin = (section + scales) * 2 + (head * tokens + tile * TOKENS) * (DIM // 8)
    _write_codes(slot, sums, words, begin, kept, copy, TOKENS, PADDED // 8, DIM // 8, CHECK)
    at = section * 16 + (head * tokens + token) * 2
    bits = upper_half(scale)
    tl.store((slot + at).to(tl.pointer_type(tl.int16)), bits, mask=there)
    if CHECK:
        add_pieces(sums, at, tl.where(there, bits.to(tl.int64) & 0xFFFF, 0), 2, copy)
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
    PADDED: tl.constexpr,  # VALUE_DIM, rounded up to a power of two
    SOURCE: tl.constexpr,
    WIDE: tl.constexpr,
    CHECK: tl.constexpr,
    PACKED: tl.constexpr,  # elements of 16 bits are handled two at a time; only where WIDE
):
    READ: tl.constexpr = tl.int32 if PACKED else SOURCE
    column, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head, section, _ = payload_plane(
        column, layer, layer_sections, key_sections, key_scales, value_scales, PARTS
    )
    cached, page_stride, head_stride, token_stride, dim_stride = cache_plane(
        table, layer * PARTS + part, READ, WIDE
    )
    cached += head * head_stride
    copy = tile + column
    if part == 0:
        if tile < super_pages * (KEY_DIM // CHANNELS):
            _gather_key(
                cached, pages, slot, sums, first, tokens, super_pages, section, key_scales, head,
                tile, copy, page_stride, token_stride, dim_stride,
                VIEW, PAGES, KEY_DIM, CHANNELS, SOURCE, WIDE, PACKED, CHECK,
            )  # fmt: skip
    elif tile * TOKENS < tokens:
        _gather_value(
            cached, pages, slot, sums, first, tokens, section, value_scales, head, tile, copy,
            page_stride, token_stride, dim_stride,
            HEADS, VIEW, PAGES, VALUE_DIM, TOKENS, PADDED, SOURCE, WIDE, PACKED, CHECK,
        )  # fmt: skip
