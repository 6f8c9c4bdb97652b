# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The loop of `paged_decode` over caches of any dtype, for rows of any number of lines."""

import triton
import triton.language as tl

from pd_kernels.attention.load_fence import show_loads
from pd_kernels.attention.online_softmax import softmax_step
from pd_kernels.attention.paged_tile import (
    reached_tokens,
    token_offsets,
    token_places,
    visible_scores,
)


@triton.jit
def attend_tiles(
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
    """Attend with the lines of a row to tiles `begin` to `end` of its sequence.

    Args:
        lines: the queries, `[HEIGHT, BLOCK]`; `DIM` of these elements exist. A value has
            `VALUE_DIM` of `VALUE_BLOCK`.
        keys, values: of the KV head.
        pages: the sequence's row of the block table.
        tiles: with LISTED, the list of tiles; `begin` and `end` are places in it.
        head: query head of each line.
        position: place of each line's query in the sequence.
        queries, length: of the sequence; it ends with its queries' tokens.

    Returns:
        result: weighted sum of values, not normalised, float32 `[HEIGHT, VALUE_BLOCK]`.
        top, total: the largest score (base 2) and the sum of weights of each line, float32
            `[HEIGHT]`.
    """
    HEIGHT: tl.constexpr = lines.shape[0]
    column = tl.arange(0, BLOCK)
    value_column = tl.arange(0, VALUE_BLOCK)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result = tl.zeros((HEIGHT, VALUE_BLOCK), tl.float32)
    for place in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        tile = tl.load(tiles + place) if LISTED else place
        token = tile * TILE + tl.arange(0, TILE)
        inside = reached_tokens(tile, length, queries, WINDOW, TILE)
        page, within = token_places(pages, tile, token, inside, PAGE, TILE)
        mask = inside[:, None]
        if DIM < BLOCK:
            mask = mask & (column < DIM)[None, :]
        there = token_offsets(page, within, KEY, PAGE, 1)[:, None] + column[None, :]
        key = tl.load(keys + there, mask=mask, other=0.0, eviction_policy="evict_first")
        mask = inside[:, None]
        if VALUE_DIM < VALUE_BLOCK:
            mask = mask & (value_column < VALUE_DIM)[None, :]
        there = token_offsets(page, within, VALUE, PAGE, 1)[:, None] + value_column[None, :]
        # Masked, because memory behind the last token or before the window may hold NaN, and 0 *
        # NaN is NaN.
        value = tl.load(values + there, mask=mask, other=0.0, eviction_policy="evict_first")
        turned = tl.trans(key.to(lines.dtype))
        show_loads(HEIGHT)
        score = tl.dot(lines, turned) * scale
        score = visible_scores(
            score, token, inside, position, length, sequence, head, score_args, mask_args,
            CAUSAL, WINDOW, SCORE_MOD, MASK_MOD,
        )  # fmt: skip
        share, before, top, total = softmax_step(score, top, total, 1)
        result = result * before[:, None]
        result = tl.dot(share.to(lines.dtype), value.to(lines.dtype), result)
    return result, top, total
