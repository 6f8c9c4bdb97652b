# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The loops of `mla_decode` over FP8 latents, for rows of up to 32 lines.

The plain loop decodes latents to bfloat16 before the products. Hopper's tensor cores take such a
matrix only from shared memory, and only in 64 lines. So 16 heads are padded to 64, each tile is
written again, and the loop waits for each product. Here codes stay codes: shared memory holds words
of two codes, as in `paged_codes.py`. On the way into a product, one conversion turns two codes into
float16, exactly.

A scale belongs to a token and a slice of 128 codes. The products leave it out. Instead, the slice's
scores are multiplied by the scale, and so are the weights of the slice's latents. These weights are
float16, which cannot hold 1e-6. So they are divided by a power of two, the largest scale so far. It
is kept like softmax's largest score.
"""

import triton
import triton.language as tl

from pd_kernels.attention.mla_call import CODED_BYTES, LATENT, ROPE
from pd_kernels.attention.online_softmax import softmax_step
from pd_kernels.attention.paged_codes import half_lines, two_halves
from pd_kernels.attention.paged_tile import chosen_tokens, tile_tokens, tree_tokens

_LATENT = tl.constexpr(LATENT)
_ROPE = tl.constexpr(ROPE)
_SLICE = tl.constexpr(LATENT // 4)
_WORDS = tl.constexpr(LATENT // 8)  # of a slice
_CODES = tl.constexpr(CODED_BYTES - 2 * ROPE)  # and their scales

_LEAST = tl.constexpr(27 << 23)
_MOST = tl.constexpr(227 << 23)
"""2^-100 and 2^100 as bits of a float32. They bound the power of two."""

_ONE = tl.constexpr(127 << 23)
_ROOM = tl.constexpr(16384.0)
"""Factor of the weights. They are at most 2 before, and the largest float16 is 65504."""


@triton.jit
def attend_latent_codes(
    own,
    exists,
    cache,
    pages,
    position,
    length,
    begin,
    end,
    scale,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    CACHE: tl.constexpr,
    CODED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend with the lines of a row to tiles `begin` to `end` of its sequence. Arguments and
    results are those of `mla_kernel.attend_latents`; the cache is in FlashMLA's FP8 layout."""
    HEIGHT: tl.constexpr = exists.shape[0]
    rope, word = tl.arange(0, _ROPE)[None, :], tl.arange(0, _WORDS)[None, :]
    lines_rope = tl.load(own + _LATENT + rope, mask=exists, other=0.0)
    even_0, odd_0, unit_0 = _lines(own, exists, 0)
    even_1, odd_1, unit_1 = _lines(own, exists, 1)
    even_2, odd_2, unit_2 = _lines(own, exists, 2)
    even_3, odd_3, unit_3 = _lines(own, exists, 3)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    power = tl.full((), _LEAST, tl.int32)
    result_0 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_1 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_2 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_3 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_4 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_5 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_6 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_7 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    # Unlike the other loops, this loop keeps values that no turn changes. Otherwise each turn would
    # write the queries to shared memory, because registers have no room for them.
    for tile in tl.range(begin, end, num_stages=STAGES):
        tokens, mask, token, inside = tile_tokens(cache, pages, tile, length, PAGE, TILE, CACHE)
        words = tokens.to(tl.pointer_type(tl.int16)) + word
        word_0 = tl.load(words, mask=mask, other=0, eviction_policy="evict_first")
        word_1 = tl.load(words + _WORDS, mask=mask, other=0, eviction_policy="evict_first")
        word_2 = tl.load(words + 2 * _WORDS, mask=mask, other=0, eviction_policy="evict_first")
        word_3 = tl.load(words + 3 * _WORDS, mask=mask, other=0, eviction_policy="evict_first")
        scales = tl.reshape(tokens + _LATENT, (TILE,)).to(tl.pointer_type(tl.float32))
        whole = tl.reshape(mask, (TILE,))
        scale_0 = tl.load(scales, mask=whole, other=0.0)
        scale_1 = tl.load(scales + 1, mask=whole, other=0.0)
        scale_2 = tl.load(scales + 2, mask=whole, other=0.0)
        scale_3 = tl.load(scales + 3, mask=whole, other=0.0)
        ropes = (tokens + _CODES).to(tl.pointer_type(tl.bfloat16)) + rope
        score = tl.dot(
            lines_rope,
            tl.trans(tl.load(ropes, mask=mask, other=0.0, eviction_policy="evict_first")),
        )
        score += _product(even_0, odd_0, word_0) * (unit_0[:, None] * scale_0[None, :])
        score += _product(even_1, odd_1, word_1) * (unit_1[:, None] * scale_1[None, :])
        score += _product(even_2, odd_2, word_2) * (unit_2[:, None] * scale_2[None, :])
        score += _product(even_3, odd_3, word_3) * (unit_3[:, None] * scale_3[None, :])
        seen = chosen_tokens(pages, token, inside, PAGE)[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        if TREE > 0:
            seen = seen & tree_tokens(position, token, length, TREE)
        score = tl.where(seen, score * scale, float("-inf"))
        share, before, top, total = softmax_step(score, top, total, 1)

        largest = tl.maximum(tl.abs(scale_0), tl.abs(scale_1))
        largest = tl.maximum(tl.maximum(tl.abs(scale_2), tl.abs(scale_3)), largest)
        largest = tl.max(largest, 0).to(tl.int32, bitcast=True) & 0x7F800000
        largest = tl.minimum(tl.maximum(largest, power), _MOST)
        before = before * tl.maximum(power - largest + _ONE, 0).to(tl.float32, bitcast=True)
        before = before[:, None]
        power = largest
        inverse = (-power + 2 * _ONE).to(tl.float32, bitcast=True) * _ROOM
        weight = (share * (scale_0 * inverse)[None, :]).to(tl.float16)
        even, odd = two_halves(word_0)
        result_0 = tl.dot(weight, even, result_0 * before)
        result_1 = tl.dot(weight, odd, result_1 * before)
        weight = (share * (scale_1 * inverse)[None, :]).to(tl.float16)
        even, odd = two_halves(word_1)
        result_2 = tl.dot(weight, even, result_2 * before)
        result_3 = tl.dot(weight, odd, result_3 * before)
        weight = (share * (scale_2 * inverse)[None, :]).to(tl.float16)
        even, odd = two_halves(word_2)
        result_4 = tl.dot(weight, even, result_4 * before)
        result_5 = tl.dot(weight, odd, result_5 * before)
        weight = (share * (scale_3 * inverse)[None, :]).to(tl.float16)
        even, odd = two_halves(word_3)
        result_6 = tl.dot(weight, even, result_6 * before)
        result_7 = tl.dot(weight, odd, result_7 * before)
    unit = power.to(tl.float32, bitcast=True) / _ROOM
    results = (
        tl.interleave(result_0, result_1) * unit,
        tl.interleave(result_2, result_3) * unit,
        tl.interleave(result_4, result_5) * unit,
        tl.interleave(result_6, result_7) * unit,
    )
    return results, top, total


@triton.jit
def attend_scaled_codes(
    own,
    exists,
    cache,
    pages,
    position,
    length,
    begin,
    end,
    scale,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    CACHE: tl.constexpr,
    CODED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `attend_latent_codes`, for a cache whose codes, those with RoPE included, have one scale. It is a part of
    `scale`, and of the factor of the results."""
    HEIGHT: tl.constexpr = exists.shape[0]
    word, word_rope = tl.arange(0, _WORDS)[None, :], tl.arange(0, _ROPE // 2)[None, :]
    even_0, odd_0, unit_0 = _lines(own, exists, 0)
    even_1, odd_1, unit_1 = _lines(own, exists, 1)
    even_2, odd_2, unit_2 = _lines(own, exists, 2)
    even_3, odd_3, unit_3 = _lines(own, exists, 3)
    even_rope, odd_rope, unit_rope = _lines(own, exists, 4, _ROPE)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result_0 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_1 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_2 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_3 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_4 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_5 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_6 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    result_7 = tl.zeros((HEIGHT, _WORDS), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        tokens, mask, token, inside = tile_tokens(cache, pages, tile, length, PAGE, TILE, CACHE)
        words = tokens.to(tl.pointer_type(tl.int16)) + word
        word_0 = tl.load(words, mask=mask, other=0, eviction_policy="evict_first")
        word_1 = tl.load(words + _WORDS, mask=mask, other=0, eviction_policy="evict_first")
        word_2 = tl.load(words + 2 * _WORDS, mask=mask, other=0, eviction_policy="evict_first")
        word_3 = tl.load(words + 3 * _WORDS, mask=mask, other=0, eviction_policy="evict_first")
        ropes = (tokens + _LATENT).to(tl.pointer_type(tl.int16)) + word_rope
        ropes = tl.load(ropes, mask=mask, other=0, eviction_policy="evict_first")
        score = _product(even_rope, odd_rope, ropes) * unit_rope[:, None]
        score += _product(even_0, odd_0, word_0) * unit_0[:, None]
        score += _product(even_1, odd_1, word_1) * unit_1[:, None]
        score += _product(even_2, odd_2, word_2) * unit_2[:, None]
        score += _product(even_3, odd_3, word_3) * unit_3[:, None]
        seen = chosen_tokens(pages, token, inside, PAGE)[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        if TREE > 0:
            seen = seen & tree_tokens(position, token, length, TREE)
        score = tl.where(seen, score * scale, float("-inf"))
        share, before, top, total = softmax_step(score, top, total, 1)
        before = before[:, None]
        weight = (share * _ROOM).to(tl.float16)
        even, odd = two_halves(word_0)
        result_0 = tl.dot(weight, even, result_0 * before)
        result_1 = tl.dot(weight, odd, result_1 * before)
        even, odd = two_halves(word_1)
        result_2 = tl.dot(weight, even, result_2 * before)
        result_3 = tl.dot(weight, odd, result_3 * before)
        even, odd = two_halves(word_2)
        result_4 = tl.dot(weight, even, result_4 * before)
        result_5 = tl.dot(weight, odd, result_5 * before)
        even, odd = two_halves(word_3)
        result_6 = tl.dot(weight, even, result_6 * before)
        result_7 = tl.dot(weight, odd, result_7 * before)
    results = (
        tl.interleave(result_0, result_1) / _ROOM,
        tl.interleave(result_2, result_3) / _ROOM,
        tl.interleave(result_4, result_5) / _ROOM,
        tl.interleave(result_6, result_7) / _ROOM,
    )
    return results, top, total


@triton.jit
def _lines(own, exists, number: tl.constexpr, WIDTH: tl.constexpr = _SLICE):
    """WIDTH elements of the queries from a slice's first on: the even and the odd ones, float16 `[HEIGHT, WIDTH / 2]`,
    and the factor for each line's scores, `[HEIGHT]`."""
    column = number * _SLICE + tl.arange(0, WIDTH)[None, :]
    lines, unit = half_lines(tl.load(own + column, mask=exists, other=0.0))
    even, odd = tl.split(tl.reshape(lines, (exists.shape[0], WIDTH // 2, 2)))
    return even, odd, unit


@triton.jit
def _product(even, odd, words):
    """Scores of a slice from its codes, without their scales, float32 `[HEIGHT, TILE]`."""
    even_codes, odd_codes = two_halves(words)
    score = tl.dot(even, tl.trans(even_codes))
    return tl.dot(odd, tl.trans(odd_codes), score)
