# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that gathers as `fp8_e4m3`: by the destination's scale, or by one of each head.

A vector is 8 elements, which are one word of the payload. The scale of a head needs the largest
magnitude of all its tokens, which several programs have: each publishes its own and keeps its
elements in registers until all have, so that the cache is read once. Where these are more than can
run at the same time, as many programs go before them that only publish: those that wait then find
all of it soon. A program that has waited long all the same (others may have the device) reads what
is missing itself, tile by tile: none depends on another.
"""

import functools

import torch
import triton
import triton.language as tl

from pd_kernels.transfer.copy_kernel import UNSPECIALISED
from pd_kernels.transfer.numerics import (
    byte_words,
    finite_or_nan,
    magnitude_bits,
    power_of_two,
    power_scale,
    stored,
)
from pd_kernels.transfer.paging import block_row, token_offsets
from pd_kernels.transfer.sums import add_pieces, add_words

VECTORS = 1024
WARPS = 8
REGISTERS = 64  # of a thread: so many programs must fit on a multiprocessor that loads overlap
PROGRAMS = 4  # that fit on a multiprocessor, by their registers
MAX_POLLS = 64
"""Looks at what others have published, about a microsecond each."""

_LOOK = tl.constexpr(256)  # tiles looked at, at once
_PIECES = tl.constexpr(4)  # what is missing is read in parts: registers are taken
_INFINITE = tl.constexpr(0x7F800000)


def vectors(element: int) -> int:
    """Of a program: half as many where an element has 4 bytes, or registers would not hold them."""
    return VECTORS if element <= 2 else VECTORS // 2


@functools.cache
def resident(device: torch.device) -> int:
    """How many programs a device runs at once; an H200's number where it is no GPU."""
    if device.type != "cuda":
        return PROGRAMS * 132
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _read_vectors(
    cached, pages, tile, first, limit, width, page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """The elements of a tile, `[VECTORS, 8]`, zero behind the last token."""
    vector = tile * VECTORS + tl.arange(0, VECTORS)
    inside = vector < limit
    place = first + vector // width
    there = token_offsets(pages, place, inside, page_stride, token_stride, VIEW, PAGES)
    index = (vector % width)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if not WIDE:
        index = index * dim_stride
    return tl.load(cached + (there[:, None] + index), mask=inside[:, None], other=0.0)


@triton.jit
def _write_codes(
    slot, sums, codes, section, scales, first_vector, tile, limit, copy,
    CHECK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Store FP8 elements `[VECTORS, 8]` as codes of a tile."""
    vector = tile * VECTORS + tl.arange(0, VECTORS)
    inside = vector < limit
    words = byte_words(codes.to(tl.uint8, bitcast=True), VECTORS)
    begin = (section + scales) * 2 + first_vector + tile * VECTORS
    coded = (slot + begin * 8).to(tl.pointer_type(tl.int64)) + tl.arange(0, VECTORS)
    tl.store(coded, words, mask=inside)
    if CHECK:
        words = tl.where(inside, words, 0)
        add_words(sums, begin, tl.reshape(words, (VECTORS // 256, 256)), 256, copy)


@triton.jit
def _write_scale(slot, sums, section, head, scale, HEADS: tl.constexpr, CHECK: tl.constexpr, copy):
    """Store a head's scale; with the last one the zeros behind it, too."""
    at = section * 16 + head * 4
    tl.store((slot + at).to(tl.pointer_type(tl.float32)), scale)
    if CHECK:
        bits = scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        one = tl.arange(0, 1)
        add_pieces(sums, at + one, bits + one, 4, copy)
    PADDING: tl.constexpr = -HEADS % 4
    if PADDING > 0:  # noqa: SIM102 - known when compiled, unlike the next
        if head == HEADS - 1:
            behind = tl.arange(0, 4)
            padding = (slot + at + 4).to(tl.pointer_type(tl.float32)) + behind
            tl.store(padding, tl.zeros((4,), tl.float32), mask=behind < PADDING)


@triton.jit
def _finite(value):
    """The largest finite magnitude's bits, int32, and `value` with infinities as NaN."""
    bits = magnitude_bits(value.to(tl.float32))
    largest = tl.max(bits)  # of integers: what floats make of signalling NaN is not told
    if largest >= _INFINITE:
        largest = tl.max(tl.where(bits < _INFINITE, bits, 0))
        value = finite_or_nan(value.to(tl.float32)).to(value.dtype)
    return largest, value


@triton.jit
def _look(published, tiles, start):
    """How many tiles have not published, the largest of what the others have, and how far it is from
    `start` to the next one that has not."""
    missing, largest, distance = 0, 0, tiles
    for first in range(0, tiles, _LOOK):
        place = first + tl.arange(0, _LOOK)
        # Volatile: past the multiprocessor's own cache. A word says all, so that no order matters.
        found = tl.load(published + place, mask=place < tiles, other=1, volatile=True)
        missing += tl.sum((found == 0).to(tl.int32))
        largest = tl.maximum(largest, tl.max(found))
        away = tl.where(place < start, place + tiles, place) - start
        distance = tl.minimum(distance, tl.min(tl.where(found > 0, tiles, away)))
    return missing, largest, distance


@triton.jit(do_not_specialize=UNSPECIALISED)
def gather_fp8(
    table,
    factors,
    pages,
    slot,
    sums,
    state,  # int32 `[head, tile]`, zero: largest magnitude's bits + 1 of each tile
    first,  # token, counted from the start of the first page
    tokens,
    layer_sections,  # 16 bytes each, in one layer of the payload
    key_sections,  # of K, scales included
    key_scales,  # sections of K's scales
    value_scales,
    tiles,  # of the longer of K and V
    ahead,  # programs of a head that come before the others and only publish: `tiles` or 0
    max_polls,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_VECTORS: tl.constexpr,  # in a token of one head
    VALUE_VECTORS: tl.constexpr,
    SOURCE: tl.constexpr,
    WIDE: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHECK: tl.constexpr,
    VECTORS: tl.constexpr,
):
    if COMPUTE:  # the programs of a head are launched together
        place, column = tl.program_id(0), tl.program_id(1)
        tile = tl.where(place < ahead, place, place - ahead)
    else:
        column, tile = tl.program_id(0), tl.program_id(1)
    layer = tl.program_id(2)
    part, head = column % PARTS, column // PARTS
    block = layer * PARTS + part
    section = layer.to(tl.int64) * layer_sections + part * key_sections
    scales = tl.where(part == 0, key_scales, value_scales)
    if KEY_VECTORS == VALUE_VECTORS:
        width = KEY_VECTORS
    else:
        width = tl.where(part == 0, KEY_VECTORS, VALUE_VECTORS)
    limit = tokens * width
    first_vector = head * limit
    address, page_stride, head_stride, token_stride, dim_stride = block_row(
        table, block, WIDE, SOURCE.primitive_bitwidth // 8
    )
    cached = address.to(tl.pointer_type(SOURCE))
    if WIDE:
        cached = tl.multiple_of(cached, 16)
    cached += head * head_stride
    value = _read_vectors(
        cached, pages, tile, first, limit, width, page_stride, token_stride, dim_stride,
        VIEW, PAGES, WIDE, VECTORS,
    )  # fmt: skip
    copy = tile + column
    if not COMPUTE:
        scale = tl.load(factors + block)
        codes = stored(value.to(tl.float32), scale, "over", tl.float8e4nv)
        _write_codes(
            slot, sums, codes, section, scales, first_vector, tile, limit, copy, CHECK, VECTORS
        )
        if tile == 0:
            _write_scale(slot, sums, section, head, scale, HEADS, CHECK, copy)
    else:
        published = state + (layer * tl.num_programs(1) + column) * tiles
        own, value = _finite(value)
        tl.atomic_xchg(published + tile, own + 1, sem="relaxed")
        if place < ahead:
            return
        missing, largest, polls = tiles, 0, 0
        while missing > 0:
            # Somewhere else for each program and each look, so that they seldom read the same.
            start = ((tile * 40_503 + polls * 30_103) & 0x7FFFFFFF) % tiles
            missing, largest, distance = _look(published, tiles, start)
            polls += 1
            if (missing > 0) & (polls > max_polls):
                other = (start + distance) % tiles
                theirs = 0
                for piece in range(other * _PIECES, (other + 1) * _PIECES):
                    unread = _read_vectors(
                        cached, pages, piece, first, limit, width, page_stride, token_stride,
                        dim_stride, VIEW, PAGES, WIDE, VECTORS // _PIECES,
                    )  # fmt: skip
                    bits = magnitude_bits(unread.to(tl.float32))
                    theirs = tl.maximum(theirs, tl.max(tl.where(bits < _INFINITE, bits, 0)))
                tl.atomic_xchg(published + other, theirs + 1, sem="relaxed")
        power = power_scale(largest - 1)
        codes = (value.to(tl.float32) * power_of_two(-power)).to(tl.float8e4nv)
        _write_codes(
            slot, sums, codes, section, scales, first_vector, tile, limit, copy, CHECK, VECTORS
        )
        if tile == 0:
            _write_scale(slot, sums, section, head, power_of_two(power), HEADS, CHECK, copy)
