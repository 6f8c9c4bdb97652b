# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""One tile of a paged sequence: where its tokens lie, and which scores count. The loops over tiles
share these device functions.

The loops of `paged_decode` call the first ones in the same four lines. In a helper of their own,
those lines cost bfloat16 one instruction more a turn (`bench roof`).
"""

import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import LOG2E

_LOG2E = tl.constexpr(LOG2E)
_MOST_32_BITS = tl.constexpr((1 << 31) - 1)


@triton.jit
def reached_tokens(tile, length, queries, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Which tokens of a tile exist and lie in at least one query's window, `[TILE]`."""
    if WINDOW > 0:
        # One comparison instead of two: before the first token, the unsigned number is huge.
        first = tl.maximum(length - queries - WINDOW + 1, 0)
        place = tile * TILE - first + tl.arange(0, TILE)
        return place.to(tl.uint32, bitcast=True) < (length - first).to(tl.uint32, bitcast=True)
    return tile * TILE + tl.arange(0, TILE) < length


@triton.jit
def token_places(pages, tile, token, inside, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page (int64) and place within the page of each token of a tile.

    Args:
        pages: the sequence's row of the block table.
        token: the tile's tokens, `[TILE]`.
        inside: which of them exist; the pages of others are not read.
    """
    if PAGE % TILE == 0:
        page = tl.load(pages + tile // (PAGE // TILE)).to(tl.int64)
        within = tile % (PAGE // TILE) * TILE + tl.arange(0, TILE)
    else:
        page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
        within = token % PAGE
    return page, within


@triton.jit
def token_offsets(page, within, STRIDES: tl.constexpr, PAGE: tl.constexpr, WORD: tl.constexpr):
    """Offsets of tokens within a KV head, int64, in words.

    Args:
        page, within: from `token_places`.
        STRIDES: elements from page to page, and from token to token.
    """
    if (PAGE - 1) * STRIDES[1] > _MOST_32_BITS:
        within = within.to(tl.int64)
    return page * (STRIDES[0] // WORD) + within * (STRIDES[1] // WORD)


@triton.jit
def tile_tokens(
    cache, pages, tile, length, PAGE: tl.constexpr, TILE: tl.constexpr, CACHE: tl.constexpr
):
    """Where the latents of a tile's tokens begin in a cache, and which of them are to be loaded,
    `[TILE, 1]`. Also the tokens' numbers, and which of them lie in the sequence, `[TILE]`. CACHE:
    strides of page and token.

    With pages of one token, -1 in place of a page marks a missing token; see `chosen_tokens`."""
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < length
    mask = inside
    if (PAGE - 1) * CACHE[1] > _MOST_32_BITS:
        page, within = token_places(pages, tile, token, inside, PAGE, TILE)
        tokens = cache + token_offsets(page, within, CACHE, PAGE, 1)[:, None]
    elif PAGE % TILE == 0:
        page = tl.load(pages + tile // (PAGE // TILE)).to(tl.int64)
        base = cache + (page * CACHE[0] + tile % (PAGE // TILE) * (TILE * CACHE[1]))
        tokens = base + (tl.arange(0, TILE) * CACHE[1])[:, None]
    else:
        page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
        tokens = cache + (page * CACHE[0] + token % PAGE * CACHE[1])[:, None]
        if PAGE == 1:
            mask = inside & (page >= 0)
    return tokens, mask[:, None], token, inside


@triton.jit
def chosen_tokens(pages, token, inside, PAGE: tl.constexpr):
    """Which tokens of a tile scores may count, `[TILE]`. The table is read a second time, because registers have no room
    for the masks of tiles that are being loaded."""
    if PAGE == 1:
        return tl.load(pages + token, mask=inside, other=-1) >= 0
    return inside


@triton.jit
def tree_tokens(words, token, length, TREE: tl.constexpr):
    """Which tokens of a tile each line sees, `[HEIGHT, TILE]`, if the last TREE tokens are drafts of a tree. Earlier tokens are
    seen by all lines.

    Args:
        words: of each line's query, `[HEIGHT]`: bit i says whether it sees draft i.
        token: the tile's tokens, `[TILE]`.
        length: tokens of the sequence, the drafts included.
    """
    draft = token - (length - TREE)
    # A shift by more than a word's bits would be undefined, also where nobody reads it.
    bit = (words[:, None] >> tl.minimum(tl.maximum(draft, 0), 31)[None, :]) & 1
    return (draft < 0)[None, :] | (bit != 0)


@triton.jit
def visible_scores(
    score,
    token,
    inside,
    position,
    length,
    sequence,
    head,
    score_args,
    mask_args,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
):
    """Scores in powers of 2, float32 `[HEIGHT, TILE]`, with -inf for tokens that a line does not
    see.

    Args:
        score: natural scores if there is a SCORE_MOD, otherwise scores in powers of 2.
        token, inside: the tile's tokens, and which of them exist, `[TILE]`.
        position: place of each line's query in the sequence, `[HEIGHT]`.
        length: tokens of the sequence.
        sequence, head: arguments for mods: the sequence, and the query head of each line.
        score_args, mask_args: the mods' own arguments.
    """
    seen = inside[None, :]
    if CAUSAL:
        seen = seen & (token[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (token[None, :] > position[:, None] - WINDOW)
    if SCORE_MOD is not None or MASK_MOD is not None:
        real = tl.minimum(token, length - 1)[None, :]
        # The query of a padding line lies behind the last token.
        clamped = tl.maximum(tl.minimum(position, length - 1), 0)[:, None]
        if SCORE_MOD is not None:
            score = SCORE_MOD(score, sequence, head[:, None], clamped, real, score_args)
            score = score * _LOG2E
        if MASK_MOD is not None:
            seen = seen & MASK_MOD(sequence, head[:, None], clamped, real, mask_args)
    return tl.where(seen, score, float("-inf"))
