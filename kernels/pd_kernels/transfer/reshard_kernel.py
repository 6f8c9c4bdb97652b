# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `reshard`: a program moves some codes and scales of one head of one destination."""

import triton
import triton.language as tl

from pd_kernels.transfer.prologue import UNSPECIALISED

VECTORS = 1024
"""Vectors of 16 bytes of a head's codes that a program moves."""
SCALES = 1024
"""Words of 2 bytes of a head's scales that a program moves."""
WARPS = 4


@triton.jit
def _begin(
    layer, part, heads, key_scales, key_codes, value_scales, value_codes, PARTS: tl.constexpr
):
    """Where a layer's plane begins in a payload of `heads` heads, and the bytes of its scales:
    int64."""
    key = (heads * key_scales + 15) // 16 * 16
    value = (heads * value_scales + 15) // 16 * 16
    layer_bytes = key + heads * key_codes
    if PARTS == 2:
        layer_bytes += value + heads * value_codes
    begin = layer * layer_bytes + tl.where(part == 0, 0, key + heads * key_codes)
    return begin, tl.where(part == 0, key, value)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "key_codes", "value_codes"])
def reshard_heads(
    table,
    key_scales,  # bytes of one head
    value_scales,
    key_codes,  # sections of 16 bytes of one head
    value_codes,
    PARTS: tl.constexpr,
    VECTORS: tl.constexpr,
    SCALES: tl.constexpr,
):
    column, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part = column % PARTS
    row = table + column // PARTS * 6
    source, source_heads, source_head = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    target, target_heads, target_head = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    scale_bytes = tl.where(part == 0, key_scales, value_scales)
    sections = tl.where(part == 0, key_codes, value_codes)
    key_bytes, value_bytes = key_codes.to(tl.int64) * 16, value_codes.to(tl.int64) * 16
    here, here_scales = _begin(
        layer, part, source_heads, key_scales, key_bytes, value_scales, value_bytes, PARTS
    )
    there, there_scales = _begin(
        layer, part, target_heads, key_scales, key_bytes, value_scales, value_bytes, PARTS
    )

    vector = tile * VECTORS + tl.arange(0, VECTORS)
    place = vector[:, None] * 2 + tl.arange(0, 2)[None, :]
    inside = (vector < sections)[:, None]
    read = source + here + here_scales + source_head * (sections.to(tl.int64) * 16)
    written = target + there + there_scales + target_head * (sections.to(tl.int64) * 16)
    codes = tl.multiple_of(read.to(tl.pointer_type(tl.int64)), 16)
    moved = tl.multiple_of(written.to(tl.pointer_type(tl.int64)), 16)
    tl.store(moved + place, tl.load(codes + place, mask=inside, other=0), mask=inside)

    count = scale_bytes // 2
    scale = tile * SCALES + tl.arange(0, SCALES)
    if tile * SCALES < count:
        theirs = (source + here + source_head * scale_bytes).to(tl.pointer_type(tl.int16))
        ours = (target + there + target_head * scale_bytes).to(tl.pointer_type(tl.int16))
        words = tl.load(theirs + scale, mask=scale < count, other=0)
        tl.store(ours + scale, words, mask=scale < count)
    if (tile == 0) & (target_head == target_heads - 1):
        end = target_heads * scale_bytes + tl.arange(0, 16)
        padding = (target + there).to(tl.pointer_type(tl.int8)) + end
        tl.store(padding, tl.zeros((16,), tl.int8), mask=end < there_scales)
