# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that gathers as `fp8_e4m3`: with the destination's scale, or with one scale per head
and 128 tokens.

A program has one head of a super-page: all data on which a scale depends. It is read in pieces,
which stay in registers until the scale is known, so the cache is read once.

A vector is 8 elements, which are one 8-byte word of the payload. With PACKED it is 16 elements and
two words, so a thread reads 32 bytes with one address and writes 16.
"""

from typing import Any, NamedTuple  # noqa: F401 - a type comment names Any: Triton takes no annotation

import triton
import triton.language as tl

from pd_kernels.payload import SUPER_PAGE
from pd_kernels.transfer.numerics import (
    byte_words,
    finite_or_nan,
    magnitude_bits,
    power_of_two,
    power_scale,
    stored,
)
from pd_kernels.transfer.packed_numerics import (
    finite_magnitudes,
    finite_or_nan_words,
    fp8_words,
    larger_halves,
    larger_magnitudes,
    wide_bits,
)
from pd_kernels.transfer.prologue import (
    UNSPECIALISED,
    cache_plane,
    payload_plane,
    row_vectors,
    token_offsets,
)
from pd_kernels.transfer.sums import add_pieces, add_words

PIECE_ELEMENTS = 8_192
WARPS = 8
FEW_PIECES = 4
"""Pieces that fit into the registers of WARPS warps. More pieces get twice as many warps."""
KIB_UNDER_WAY = 96
"""KiB of elements that the programs of a multiprocessor hold together, if registers suffice."""

_SUPER_PAGE = tl.constexpr(SUPER_PAGE)
_INFINITE = tl.constexpr(0x7F800000)


class Shape(NamedTuple):
    """How much of a super-page a program handles at once, and with what.

    Attributes:
        pieces: pieces of PIECE_ELEMENTS elements of a head's super-page, the last one rounded up.
        warps: warps of a program.
        registers: registers of a thread.
    """

    pieces: int
    warps: int
    registers: int

    @classmethod
    def of(cls, dim: int, element_bytes: int) -> "Shape":
        """For heads of `dim` elements, the larger of K and V.

        >>> Shape.of(128, element_bytes=2)
        Shape(pieces=2, warps=8, registers=80)
        """
        pieces = -(-SUPER_PAGE * dim // PIECE_ELEMENTS)
        warps = WARPS if pieces <= FEW_PIECES else 2 * WARPS
        tile = pieces * PIECE_ELEMENTS * element_bytes
        programs = max(1, min(4, KIB_UNDER_WAY * 1024 // tile))
        return cls(pieces, warps, 65_536 // (programs * warps * 32) // 8 * 8)


@triton.jit
def _read_vectors(
    cached, pages, vector, inside, first, width, page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Load the elements of vectors, `[vector, 8]`; with PACKED, words of two elements,
    `[vector, 4, 2]`, with a vector's second half behind the first. Elements of vectors that are not
    `inside` are zero."""
    place = first + vector // width
    there = token_offsets(pages, place, inside, page_stride, token_stride, VIEW, PAGES)
    mask = inside[:, None]
    if PACKED:
        place = cached + (there + (vector % width) * 8)[:, None] + tl.arange(0, 4)[None, :]
        loaded = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
        behind = tl.load(place + 4, mask=mask, other=0, eviction_policy="evict_first")
        loaded = tl.join(loaded, behind)
    else:
        index = (vector % width)[:, None] * 8 + tl.arange(0, 8)[None, :]
        if not WIDE:
            index = index * dim_stride
        place = cached + (there[:, None] + index)
        loaded = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
    return loaded


@triton.jit
def _write_codes(slot, sums, words, begin, inside, copy, CHECK: tl.constexpr):
    """Store codes, int64 `[vector, words of a vector]`, from word `begin` of the payload on, and add
    them to the sums."""
    VECTORS: tl.constexpr = words.shape[0]
    EACH: tl.constexpr = words.shape[1]
    place = tl.arange(0, VECTORS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    mask = inside[:, None]
    tl.store((slot + begin * 8).to(tl.pointer_type(tl.int64)) + place, words, mask=mask)
    if CHECK:
        words = tl.where(mask, words, 0)
        add_words(sums, begin, tl.reshape(words, (VECTORS * EACH // 256, 256)), 256, copy)


@triton.jit
def _write_scale(slot, sums, section, scales, number, count, scale, CHECK: tl.constexpr, copy):
    """Store scale `number` of the `count` scales of a plane, and add it to the sums. The last
    program also stores the zeros behind the scales."""
    at = section * 16 + number * 4
    tl.store((slot + at).to(tl.pointer_type(tl.float32)), scale)
    if CHECK:
        bits = scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        lane = tl.arange(0, 1)
        add_pieces(sums, at + lane, bits + lane, 4, copy)
    if number == count - 1:
        end = count + tl.arange(0, 4)  # a section holds 4 scales
        padding = (slot + section * 16).to(tl.pointer_type(tl.float32)) + end
        tl.store(padding, tl.zeros((4,), tl.float32), mask=end < scales * 4)


@triton.jit
def _larger(bits, value, PACKED: tl.constexpr):
    """The larger of magnitudes, as integers: a maximum of floats is undefined for signalling NaN."""
    if PACKED:
        bits = larger_magnitudes(bits, value)
    else:
        bits = tl.maximum(bits, magnitude_bits(value.to(tl.float32)))
    return bits


@triton.jit
def _finite(value, SOURCE: tl.constexpr, PACKED: tl.constexpr):
    """Magnitudes as integers, 0 for elements that are not finite."""
    if PACKED:
        bits = finite_magnitudes(value, SOURCE)
    else:
        bits = magnitude_bits(value.to(tl.float32))
        bits = tl.where(bits < _INFINITE, bits, 0)
    return bits


@triton.jit
def _largest(bits, SOURCE: tl.constexpr, PACKED: tl.constexpr):
    """The float32 bits of the largest of some magnitudes."""
    if PACKED:
        both = tl.reduce(tl.reshape(bits, (bits.numel,)), 0, larger_halves)
        largest = wide_bits(tl.maximum(both & 0xFFFF, both >> 16), SOURCE)
    else:
        largest = tl.max(bits)
    return largest


@triton.jit
def _scale_of(held, SOURCE: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr):
    """The scale of the pieces of a super-page.

    Returns:
        power: the scale's exponent.
        finite: whether all elements are finite.
    """
    bits = tl.zeros(held[0].shape, tl.int32)
    for piece in tl.static_range(PIECES):
        bits = _larger(bits, held[piece], PACKED)
    largest = _largest(bits, SOURCE, PACKED)
    finite = largest < _INFINITE
    if not finite:
        largest = 0
        for piece in tl.static_range(PIECES):  # one after another, which needs fewer registers
            piece_largest = _largest(_finite(held[piece], SOURCE, PACKED), SOURCE, PACKED)
            largest = tl.maximum(largest, piece_largest)
    return power_scale(largest), finite


@triton.jit
def _codes(value, factor, finite, SOURCE: tl.constexpr, PACKED: tl.constexpr):
    """A piece times `factor` as 8-byte words of codes, int64 `[vector, words of a vector]`."""
    VECTORS: tl.constexpr = value.shape[0]
    if PACKED:
        if not finite:
            value = finite_or_nan_words(value, SOURCE)
        words = fp8_words(value, factor, SOURCE)
    else:
        codes = (finite_or_nan(value.to(tl.float32)) * factor).to(tl.float8e4nv)
        words = byte_words(codes.to(tl.uint8, bitcast=True), VECTORS)[:, None]
    return words


@triton.jit(do_not_specialize=UNSPECIALISED)
def gather_fp8(
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
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_VECTORS: tl.constexpr,  # in one token of one head
    VALUE_VECTORS: tl.constexpr,
    SOURCE: tl.constexpr,
    WIDE: tl.constexpr,
    COMPUTE: tl.constexpr,  # compute the scale; if not, it is in `factors`
    CHECK: tl.constexpr,
    PACKED: tl.constexpr,  # elements of 16 bits are handled two at a time; only where WIDE
    VECTORS: tl.constexpr,  # of a piece
    PIECES: tl.constexpr,
):
    READ: tl.constexpr = tl.int32 if PACKED else SOURCE
    column, super_page, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head, section, scales = payload_plane(
        column, layer, layer_sections, key_sections, key_scales, value_scales, PARTS
    )
    plane = layer * PARTS + part
    width = row_vectors(part, KEY_VECTORS, VALUE_VECTORS)
    cached, page_stride, head_stride, token_stride, dim_stride = cache_plane(
        table, plane, READ, WIDE
    )
    cached += head * head_stride
    begin = super_page * _SUPER_PAGE * width  # vector of the head
    end = tl.minimum(super_page * _SUPER_PAGE + _SUPER_PAGE, tokens) * width
    held = ()  # type: Any
    for piece in tl.static_range(PIECES):
        vector = begin + piece * VECTORS + tl.arange(0, VECTORS)
        value = _read_vectors(
            cached, pages, vector, vector < end, first, width, page_stride, token_stride,
            dim_stride, VIEW, PAGES, WIDE, PACKED,
        )  # fmt: skip
        held += (value,)
    if COMPUTE:
        power, finite = _scale_of(held, SOURCE, PACKED, PIECES)
        scale, factor = power_of_two(power), power_of_two(-power)
    else:
        scale = tl.load(factors + plane)
    copy = super_page + column
    EACH: tl.constexpr = 2 if PACKED else 1
    first_word = (section + scales) * 2 + (head * tokens * width + begin) * EACH
    for piece in tl.static_range(PIECES):
        value = held[piece]
        if COMPUTE:
            words = _codes(value, factor, finite, SOURCE, PACKED)
        else:
            codes = stored(value.to(tl.float32), scale, "over", tl.float8e4nv)
            words = byte_words(codes.to(tl.uint8, bitcast=True), VECTORS)[:, None]
        inside = begin + piece * VECTORS + tl.arange(0, VECTORS) < end
        _write_codes(slot, sums, words, first_word + piece * VECTORS * EACH, inside, copy, CHECK)
    number = head * super_pages + super_page
    _write_scale(slot, sums, section, scales, number, HEADS * super_pages, scale, CHECK, copy)
