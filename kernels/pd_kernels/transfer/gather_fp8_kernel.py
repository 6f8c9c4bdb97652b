# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that gathers as `fp8_e4m3`: with the destination's scale, or with one scale per head.

A vector is 8 elements, which are one 8-byte word of the payload. With PACKED it is 16 elements and
two words, so a thread reads 32 bytes with one address and writes 16. The scale of a head depends on
the largest magnitude of all its tokens. Several programs share these tokens. Each program publishes
the largest magnitude of its own tile, keeps its elements in registers, and polls until all programs
of the head have published. So the cache is read once.

A GPU starts programs in order, and may not have room for all programs of a head at once. In that
case the same number of extra programs, which only publish, are launched before them. So a waiting
program soon finds everything published. Other work may occupy the GPU. So a program that has polled
`max_polls` times computes the missing magnitudes itself, tile by tile. No program depends on
another program that may not be running.
"""

import functools

import torch
import triton
import triton.language as tl

from pd_kernels.transfer.numerics import (
    byte_words,
    finite_or_nan,
    magnitude_bits,
    power_of_two,
    power_scale,
    stored,
)
from pd_kernels.transfer.packed_numerics import finite_words, fp8_words
from pd_kernels.transfer.prologue import (
    UNSPECIALISED,
    cache_block,
    payload_block,
    row_vectors,
    token_offsets,
)
from pd_kernels.transfer.sums import add_pieces, add_words

VECTORS = 1024
WARPS = 8
REGISTERS = 64
"""Registers of a thread. The number is small enough for PROGRAMS programs on a multiprocessor,
whose loads overlap."""

PROGRAMS = 4
"""Programs that fit on a multiprocessor with that number of registers."""

MAX_POLLS = 64
"""Polls, about a microsecond each, before a program computes the missing magnitudes itself."""

_POLLED = tl.constexpr(256)  # published words that one load polls
_PIECES = tl.constexpr(4)  # pieces of a missing tile: the own tile fills the registers
_INFINITE = tl.constexpr(0x7F800000)


def vectors(element: int, packed: bool) -> int:
    """Vectors of a program, limited by registers. The number is halved if an element has 4 bytes,
    or if a vector is twice as long."""
    return VECTORS if element <= 2 and not packed else VECTORS // 2


@functools.cache
def resident(device: torch.device) -> int:
    """The number of programs that a GPU runs at once. For a CPU, the number for an H200."""
    if device.type != "cuda":
        return PROGRAMS * 132
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _read_vectors(
    cached, pages, tile, first, limit, width, page_stride, token_stride, dim_stride,
    VIEW: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """Load the elements of a tile, `[VECTORS, 8]`; with PACKED, words of two elements,
    `[VECTORS, 4, 2]`, with a vector's second half behind the first. Elements behind the last token
    are zero."""
    vector = tile * VECTORS + tl.arange(0, VECTORS)
    inside = vector < limit
    place = first + vector // width
    there = token_offsets(pages, place, inside, page_stride, token_stride, VIEW, PAGES)
    if PACKED:
        place = cached + (there + (vector % width) * 8)[:, None] + tl.arange(0, 4)[None, :]
        found = tl.load(place, mask=inside[:, None], other=0)
        found = tl.join(found, tl.load(place + 4, mask=inside[:, None], other=0))
    else:
        index = (vector % width)[:, None] * 8 + tl.arange(0, 8)[None, :]
        if not WIDE:
            index = index * dim_stride
        found = tl.load(cached + (there[:, None] + index), mask=inside[:, None], other=0.0)
    return found


@triton.jit
def _write_codes(
    slot, sums, words, section, scales, first_vector, tile, limit, copy,
    CHECK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Store the codes of a tile, int64 `[VECTORS, words of a vector]`, and add them to the sums."""
    EACH: tl.constexpr = words.shape[1]
    vector = tl.arange(0, VECTORS)
    inside = (tile * VECTORS + vector < limit)[:, None]
    begin = (section + scales) * 2 + (first_vector + tile * VECTORS) * EACH
    place = vector[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tl.store((slot + begin * 8).to(tl.pointer_type(tl.int64)) + place, words, mask=inside)
    if CHECK:
        words = tl.where(inside, words, 0)
        add_words(sums, begin, tl.reshape(words, (VECTORS * EACH // 256, 256)), 256, copy)


@triton.jit
def _write_scale(slot, sums, section, head, scale, HEADS: tl.constexpr, CHECK: tl.constexpr, copy):
    """Store a head's scale, and add it to the sums. The last head also stores the zeros behind the
    scales."""
    at = section * 16 + head * 4
    tl.store((slot + at).to(tl.pointer_type(tl.float32)), scale)
    if CHECK:
        bits = scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        one = tl.arange(0, 1)
        add_pieces(sums, at + one, bits + one, 4, copy)
    PADDING: tl.constexpr = -HEADS % 4
    if PADDING > 0:  # noqa: SIM102 - known at compile time, unlike the next
        if head == HEADS - 1:
            behind = tl.arange(0, 4)
            padding = (slot + at + 4).to(tl.pointer_type(tl.float32)) + behind
            tl.store(padding, tl.zeros((4,), tl.float32), mask=behind < PADDING)


@triton.jit
def _finite(value, SOURCE: tl.constexpr, PACKED: tl.constexpr):
    """Bits of the largest finite magnitude, int32; and `value` with NaN for infinities."""
    if PACKED:
        largest, value = finite_words(value, SOURCE)
    else:
        bits = magnitude_bits(value.to(tl.float32))
        # The maximum is of integers, because a maximum of floats is undefined for signalling NaN.
        largest = tl.max(bits)
        if largest >= _INFINITE:
            largest = tl.max(tl.where(bits < _INFINITE, bits, 0))
            value = finite_or_nan(value.to(tl.float32)).to(value.dtype)
    return largest, value


@triton.jit
def _poll(published, tiles, start):
    """Read the words that the programs of a head have published.

    Returns:
        missing: the number of tiles that have not published.
        largest: the largest published word.
        distance: tiles from `start` to the next unpublished tile, wrapping around.
    """
    missing, largest, distance = 0, 0, tiles
    for first in range(0, tiles, _POLLED):
        place = first + tl.arange(0, _POLLED)
        # Volatile, to bypass the L1 cache, which is not coherent. Each word is complete by itself,
        # so the order in which words become visible does not matter.
        found = tl.load(published + place, mask=place < tiles, other=1, volatile=True)
        missing += tl.sum((found == 0).to(tl.int32))
        largest = tl.maximum(largest, tl.max(found))
        away = tl.where(place < start, place + tiles, place) - start
        distance = tl.minimum(distance, tl.min(tl.where(found > 0, tiles, away)))
    return missing, largest, distance


@triton.jit
def _largest_published(
    published, cached, pages, tile, tiles, first, limit, width, page_stride, token_stride,
    dim_stride, max_polls,
    VIEW: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr, SOURCE: tl.constexpr,
    PACKED: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Poll until all tiles of a head have published, and return the largest word. After `max_polls`
    polls, compute the missing words, and publish them for other programs."""
    missing, largest, polls = tiles, 0, 0
    while missing > 0:
        # Each program and each poll begins at another tile. So programs that stop waiting seldom
        # read the same tile.
        start = ((tile * 40_503 + polls * 30_103) & 0x7FFFFFFF) % tiles
        missing, largest, distance = _poll(published, tiles, start)
        polls += 1
        if (missing > 0) & (polls > max_polls):
            other = (start + distance) % tiles
            theirs = 0
            for piece in range(other * _PIECES, (other + 1) * _PIECES):
                unread = _read_vectors(
                    cached, pages, piece, first, limit, width, page_stride, token_stride,
                    dim_stride, VIEW, PAGES, WIDE, PACKED, VECTORS // _PIECES,
                )  # fmt: skip
                found, _ = _finite(unread, SOURCE, PACKED)
                theirs = tl.maximum(theirs, found)
            tl.atomic_xchg(published + other, theirs + 1, sem="relaxed")
    return largest


@triton.jit(do_not_specialize=UNSPECIALISED)
def gather_fp8(
    table,
    factors,
    pages,
    slot,
    sums,
    state,  # int32 `[layer, column, tile]`: 0, then the bits of the tile's largest magnitude + 1
    first,  # token, counted from the start of the first page
    tokens,
    layer_sections,  # 16 bytes each, in one layer of the payload
    key_sections,  # of K, scales included
    key_scales,  # sections of K's scales
    value_scales,
    tiles,  # tiles of the longer of K and V
    ahead,  # programs of a head, before the others, that only publish: `tiles` or 0
    max_polls,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    VIEW: tl.constexpr,
    PAGES: tl.constexpr,
    KEY_VECTORS: tl.constexpr,  # in one token of one head
    VALUE_VECTORS: tl.constexpr,
    SOURCE: tl.constexpr,
    WIDE: tl.constexpr,
    COMPUTE: tl.constexpr,  # compute a scale per head; if not, it is in `factors`
    CHECK: tl.constexpr,
    PACKED: tl.constexpr,  # elements of 16 bits are handled two at a time; only where WIDE
    VECTORS: tl.constexpr,
):
    READ: tl.constexpr = tl.int32 if PACKED else SOURCE
    if COMPUTE:  # the first extent counts the tiles, so that the programs of a head start together
        place, column = tl.program_id(0), tl.program_id(1)
        tile = tl.where(place < ahead, place, place - ahead)
    else:
        column, tile = tl.program_id(0), tl.program_id(1)
    layer = tl.program_id(2)
    part, head, section, scales = payload_block(
        column, layer, layer_sections, key_sections, key_scales, value_scales, PARTS
    )
    block = layer * PARTS + part
    width = row_vectors(part, KEY_VECTORS, VALUE_VECTORS)
    limit = tokens * width
    first_vector = head * limit
    cached, page_stride, head_stride, token_stride, dim_stride = cache_block(
        table, block, READ, WIDE
    )
    cached += head * head_stride
    value = _read_vectors(
        cached, pages, tile, first, limit, width, page_stride, token_stride, dim_stride,
        VIEW, PAGES, WIDE, PACKED, VECTORS,
    )  # fmt: skip
    copy = tile + column
    if not COMPUTE:
        scale = tl.load(factors + block)
        codes = stored(value.to(tl.float32), scale, "over", tl.float8e4nv)
        words = byte_words(codes.to(tl.uint8, bitcast=True), VECTORS)[:, None]
        _write_codes(
            slot, sums, words, section, scales, first_vector, tile, limit, copy, CHECK, VECTORS
        )
        if tile == 0:
            _write_scale(slot, sums, section, head, scale, HEADS, CHECK, copy)
    else:
        published = state + (layer * tl.num_programs(1) + column) * tiles
        own, value = _finite(value, SOURCE, PACKED)
        tl.atomic_xchg(published + tile, own + 1, sem="relaxed")
        if place < ahead:
            return
        largest = _largest_published(
            published, cached, pages, tile, tiles, first, limit, width, page_stride, token_stride,
            dim_stride, max_polls, VIEW, PAGES, WIDE, SOURCE, PACKED, VECTORS,
        )  # fmt: skip
        power = power_scale(largest - 1)
        if PACKED:
            words = fp8_words(value, power_of_two(-power), SOURCE)
        else:
            codes = (value.to(tl.float32) * power_of_two(-power)).to(tl.float8e4nv)
            words = byte_words(codes.to(tl.uint8, bitcast=True), VECTORS)[:, None]
        _write_codes(
            slot, sums, words, section, scales, first_vector, tile, limit, copy, CHECK, VECTORS
        )
        if tile == 0:
            _write_scale(slot, sums, section, head, power_of_two(power), HEADS, CHECK, copy)
