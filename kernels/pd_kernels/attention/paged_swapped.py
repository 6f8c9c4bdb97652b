# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The loop of `paged_decode` over FP8 caches with swapped operands, for rows of up to 32 lines.

In the other loops, queries are the lines of a product. A product has at least 16 of them, so a
group of 4 query heads wastes three quarters. All four warps read the same queries, and exchange
weights through shared memory. Here tokens are the lines of the scores, elements of a value are the
lines of the result, and queries are the columns of both, padded to 8. Each warp has 16 tokens and
16 words of its own. Codes go from shared memory through registers into products, so nothing that
`cp.async` has written is read by `wgmma` itself. TensorRT-LLM's XQA swaps them, too.

The sum of weights is a product with ones. That takes no exchange between threads, and it is the
sum of the weights as they are multiplied, rounded to float16.
"""

import triton
import triton.language as tl

from pd_kernels.attention.paged_codes import half_lines, two_halves
from pd_kernels.attention.paged_tile import (
    reached_tokens,
    token_offsets,
    token_places,
    visible_scores,
)

_ONES = tl.constexpr(64)
"""Lines of the product with ones: the fewest that `wgmma` takes."""

_RAISED = tl.constexpr(15)
_LOWERED = tl.constexpr(2.0**-15)
"""Weights are 2^15 times larger here, so that float16 keeps small ones: the largest is 2^15."""


@triton.jit
def attend_swapped(
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
    results are those of `paged_plain.attend_tiles`; keys and values are FP8 with even strides, and
    values have as many elements as keys."""
    HEIGHT: tl.constexpr = lines.shape[0]
    WORDS: tl.constexpr = BLOCK // 2
    lines, unit = half_lines(lines)
    even, odd = tl.split(tl.reshape(lines, (HEIGHT, WORDS, 2)))
    even, odd = tl.trans(even), tl.trans(odd)
    unit = unit * scale
    key_words = keys.to(tl.pointer_type(tl.int16))
    value_words = values.to(tl.pointer_type(tl.int16))
    column = tl.arange(0, WORDS)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    # Not `tl.full`: Triton 3.6 would write the constant into the product's register behind
    # `wgmma.fence`, and PTX wants it before.
    ones = tl.inline_asm_elementwise(
        "mov.b32 $0, 0x3C003C00;",
        "=r,r",
        [tl.zeros((_ONES, TILE), tl.int16)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
    totals = tl.zeros((_ONES, HEIGHT), tl.float32)
    result_even = tl.zeros((WORDS, HEIGHT), tl.float32)
    result_odd = tl.zeros((WORDS, HEIGHT), tl.float32)
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
        # Transposed by the load, `[WORDS, TILE]`: a transposed tensor would not be loaded
        # asynchronously. Masked, because memory behind the last token or before the window may hold
        # NaN, and 0 * NaN is NaN.
        mask = inside[None, :]
        if DIM < BLOCK:
            mask = mask & (column < DIM // 2)[:, None]
        there = token_offsets(page, within, VALUE, PAGE, 2)[None, :] + column[:, None]
        value = tl.load(value_words + there, mask=mask, other=0, eviction_policy="evict_first")
        key_even, key_odd = two_halves(key)
        score = tl.dot(key_even, even)
        score = tl.dot(key_odd, odd, score) * unit[None, :]
        score = visible_scores(
            tl.trans(score), token, inside, position, length, sequence, head, score_args, mask_args,
            CAUSAL, WINDOW, SCORE_MOD, MASK_MOD,
        )  # fmt: skip
        score = tl.trans(score)
        above = tl.maximum(top, tl.max(score, 0))
        safe = tl.where(above == float("-inf"), 0.0, above)
        before = tl.exp2(top - safe)[None, :]
        share = tl.exp2(score - (safe - _RAISED)[None, :]).to(tl.float16)
        top = above
        totals = tl.dot(ones, share, totals * before)
        value_even, value_odd = two_halves(value)
        result_even = tl.dot(value_even, share, result_even * before)
        result_odd = tl.dot(value_odd, share, result_odd * before)
    result = tl.interleave(tl.trans(result_even), tl.trans(result_odd)) * _LOWERED
    return result, top, tl.max(totals, 0) * _LOWERED
