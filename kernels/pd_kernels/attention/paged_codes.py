# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The loop of `paged_decode` over FP8 caches, for rows of up to 32 lines.

Two things make FP8 slow in the plain loop. Codes become bfloat16 by three conversions a pair.
Matrix fragments of 8-bit elements are read from shared memory byte by byte. Here codes become
float16 by one conversion a pair, exactly. Shared memory holds them as words of two codes, which
`ldmatrix` reads like any 16-bit matrix. The two codes of a word belong to an even and an odd
element. So two products of half the depth (or width) replace one product.
"""

import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import softmax_step
from pd_kernels.attention.paged_tile import (
    reached_tokens,
    token_offsets,
    token_places,
    visible_scores,
)


@triton.jit
def half_lines(lines):
    """Queries in float16, scaled so that any bfloat16 fits.

    Each line is multiplied by a power of two that brings its largest magnitude to between 256 and
    512. Values 2^32 times smaller than the largest lose precision.

    Returns:
        lines: float16, of the same shape.
        unit: the factor for the scores, float32 `[lines]`.
    """
    if lines.dtype == tl.float16:
        return lines, tl.full((lines.shape[0],), 1.0, tl.float32)
    wide = lines.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(largest, 27 << 23), 227 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    unit = (power - (8 << 23)).to(tl.float32, bitcast=True)
    return (wide * (inverse * 256.0)[:, None]).to(tl.float16), unit


@triton.jit
def attend_codes(
    lines,
    keys,
    values,
    pages,
    tiles,
    score_args,
    mask_args,
    sequence,
    head,
    position,
    queries,
    length,
    begin,
    end,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    LISTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend with the lines of a row to tiles `begin` to `end` of its sequence. Arguments and
    results are those of `paged_plain.attend_tiles`; keys and values are FP8 with even strides."""
    HEIGHT: tl.constexpr = lines.shape[0]
    WORDS: tl.constexpr = BLOCK // 2
    VALUE_WORDS: tl.constexpr = VALUE_BLOCK // 2
    lines, unit = half_lines(lines)
    even, odd = tl.split(tl.reshape(lines, (HEIGHT, WORDS, 2)))
    unit = unit * scale
    key_words = keys.to(tl.pointer_type(tl.int16))
    value_words = values.to(tl.pointer_type(tl.int16))
    column = tl.arange(0, WORDS)
    value_column = tl.arange(0, VALUE_WORDS)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result_even = tl.zeros((HEIGHT, VALUE_WORDS), tl.float32)
    result_odd = tl.zeros((HEIGHT, VALUE_WORDS), tl.float32)
    for place in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        tile = tl.load(tiles + place) if LISTED else place
        token = tile * TILE + tl.arange(0, TILE)
        inside = reached_tokens(tile, length, queries, WINDOW, TILE)
        page, within = token_places(pages, tile, token, inside, PAGE, TILE)
        mask = inside[:, None]
        if DIM < BLOCK:
            mask = mask & (column < DIM // 2)[None, :]
        there = token_offsets(page, within, KEY, PAGE, 2)[:, None] + column[None, :]
        key = tl.load(key_words + there, mask=mask, other=0, eviction_policy="evict_first")
        mask = inside[:, None]
        if VALUE_DIM < VALUE_BLOCK:
            mask = mask & (value_column < VALUE_DIM // 2)[None, :]
        there = token_offsets(page, within, VALUE, PAGE, 2)[:, None] + value_column[None, :]
        # Masked, because memory behind the last token or before the window may hold NaN, and 0 *
        # NaN is NaN.
        value = tl.load(value_words + there, mask=mask, other=0, eviction_policy="evict_first")
        key_even, key_odd = two_halves(key)
        score = tl.dot(even, tl.trans(key_even))
        score = tl.dot(odd, tl.trans(key_odd), score) * unit[:, None]
        score = visible_scores(
            score, token, inside, position, length, sequence, head, score_args, mask_args,
            CAUSAL, WINDOW, SCORE_MOD, MASK_MOD,
        )  # fmt: skip
        share, before, top, total = softmax_step(score, top, total, 1)
        share = share.to(tl.float16)
        value_even, value_odd = two_halves(value)
        result_even = tl.dot(share, value_even, result_even * before[:, None])
        result_odd = tl.dot(share, value_odd, result_odd * before[:, None])
    return tl.interleave(result_even, result_odd), top, total


@triton.jit
def two_halves(words):
    """The codes in the low bytes (even elements) and in the high bytes (odd elements) of words,
    both as float16. For every two words, one instruction sorts the bytes. Another converts two
    codes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
