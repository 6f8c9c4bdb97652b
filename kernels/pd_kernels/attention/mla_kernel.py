# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `mla_decode`. It is like the kernel of `paged_decode`, over one latent that is key
and value of all heads.

A row has up to 64 lines (query x head). One product of the tensor cores takes 64 lines, and
registers can hold no more results: 64 x 512 in float32 take half of a multiprocessor's registers.
Latents are read as four slices of 128.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pd_kernels.attention.direct import DirectLaunch
from pd_kernels.attention.launch import ONE_LAUNCH, Phases, launch
from pd_kernels.attention.load_fence import show_loads
from pd_kernels.attention.mla_call import CODED_BYTES, LATENT, ROPE, MlaCall
from pd_kernels.attention.mla_codes import attend_latent_codes, attend_scaled_codes
from pd_kernels.attention.online_softmax import LOG2E, softmax_step
from pd_kernels.attention.paged_tile import chosen_tokens, tile_tokens, tree_tokens
from pd_kernels.attention.plan_kernel import current_piece, rows_of
from pd_kernels.attention.split_merge import (
    GROUP,
    HEADS,
    HEIGHT,
    LINES,
    PAIRED,
    finish_row,
    merge_split_rows,
    own_place,
    result_lines,
)

_LATENT = tl.constexpr(LATENT)
_ROPE = tl.constexpr(ROPE)
_SLICE = tl.constexpr(LATENT // 4)
_CODES = tl.constexpr(CODED_BYTES - 2 * ROPE)  # and their scales
_SHORT = tl.constexpr(16)  # lines of one matrix product


@triton.jit(do_not_specialize=["workers", "table_stride", "scale", "unit", "max_polls"])
def latent_attention(
    query,
    cache,
    table,
    lengths,
    target,
    ranges,
    scratch,
    workers,
    query_stride,  # of a sequence
    table_stride,
    scale,
    unit,  # factor of the results
    tree,  # with TREE, a word of each query; see `tree_tokens`
    max_polls,
    SHAPE: tl.constexpr,  # see `split_merge.py`, as PARTS
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,  # queries of a sequence that are drafts of a tree; 0: they are none
    QUERY: tl.constexpr,  # strides of query, head
    CACHE: tl.constexpr,  # strides of page, token
    CODED: tl.constexpr,  # FlashMLA's FP8 layout
    ATTEND: tl.constexpr,  # the loop over tiles (`_loop_of`)
    STAGES: tl.constexpr,
    WORK: tl.constexpr,  # attend
    MERGE: tl.constexpr,  # merge split rows
):
    ROWS: tl.constexpr = SHAPE[HEADS] // SHAPE[PAIRED]
    QUERIES: tl.constexpr = SHAPE[LINES] // SHAPE[GROUP]
    worker, block, work_range, scratch = own_place(
        scratch, ranges, workers, tl.program_id(0), SHAPE
    )
    if WORK:
        for done in tl.range(0, rows_of(work_range), disable_licm=True):
            line = tl.arange(0, SHAPE[HEIGHT])
            row, start, stop, length, _ = current_piece(
                work_range, done, lengths, ROWS, QUERIES, 0, TILE
            )
            sequence, _, number = result_lines(row * SHAPE[PAIRED] + block, line, SHAPE)
            place = number // SHAPE[GROUP] * QUERY[0] + number % SHAPE[GROUP] * QUERY[1]
            place = (place + sequence.to(tl.int64) * query_stride)[:, None]
            exists = (number < SHAPE[LINES])[:, None]
            if TREE > 0:
                own = tree + sequence * TREE + number // SHAPE[GROUP]
                position = tl.load(own, mask=number < SHAPE[LINES], other=0)
            else:
                position = length - QUERIES + number // SHAPE[GROUP]
            results, top, total = ATTEND(
                own=query + place,
                exists=exists,
                cache=cache,
                pages=table + sequence.to(tl.int64) * table_stride,
                position=position,
                length=length,
                begin=start,
                end=stop,
                scale=scale,
                PAGE=PAGE,
                TILE=TILE,
                CAUSAL=CAUSAL,
                TREE=TREE,
                CACHE=CACHE,
                CODED=CODED,
                STAGES=STAGES,
            )
            result_0, result_1, result_2, result_3 = results
            share = (unit / tl.where(total > 0, total, 1.0))[:, None]
            weight = top + tl.log2(total)
            # Read again, not kept during the loop, because its products take nearly all registers.
            row, start, stop, length, tiles = current_piece(
                work_range, done, lengths, ROWS, QUERIES, 0, TILE
            )
            results = (result_0 * share, result_1 * share, result_2 * share, result_3 * share)
            whole = (start == 0) & (stop == tiles)
            row = row * SHAPE[PAIRED] + block
            finish_row(
                scratch, target, work_range, worker, row, start, whole, results, weight, SHAPE
            )
    if MERGE:
        merge_split_rows(scratch, target, work_range, worker, block, max_polls, SHAPE, PARTS)


@triton.jit
def attend_latents(
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
    """Attend with the lines of a row to tiles `begin` to `end` of its sequence.

    Args:
        own: where each line's query begins, `[HEIGHT, 1]`.
        exists: which of the lines exist, `[HEIGHT, 1]`.
        pages: the sequence's row of the block table.
        position: place of each line's query in the sequence, `[HEIGHT]`; with TREE, the query's word.
        length: tokens of the sequence.

    Returns:
        results: four slices of the weighted sum of latents, not normalised, float32
            `[HEIGHT, 128]`.
        top, total: the largest score (base 2) and the sum of weights of each line, float32
            `[HEIGHT]`.
    """
    HEIGHT: tl.constexpr = exists.shape[0]
    column, rope = tl.arange(0, _SLICE)[None, :], tl.arange(0, _ROPE)[None, :]
    lines_0 = tl.load(own + column, mask=exists, other=0.0)
    lines_1 = tl.load(own + _SLICE + column, mask=exists, other=0.0)
    lines_2 = tl.load(own + 2 * _SLICE + column, mask=exists, other=0.0)
    lines_3 = tl.load(own + 3 * _SLICE + column, mask=exists, other=0.0)
    lines_rope = tl.load(own + 4 * _SLICE + rope, mask=exists, other=0.0)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result_0 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    result_1 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    result_2 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    result_3 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        tokens, mask, token, inside = tile_tokens(cache, pages, tile, length, PAGE, TILE, CACHE)
        latent_0 = _latents(tokens, mask, 0, CODED, lines_0.dtype)
        latent_1 = _latents(tokens, mask, 1, CODED, lines_0.dtype)
        latent_2 = _latents(tokens, mask, 2, CODED, lines_0.dtype)
        latent_3 = _latents(tokens, mask, 3, CODED, lines_0.dtype)
        if CODED:
            ropes = (tokens + _CODES).to(tl.pointer_type(tl.bfloat16)) + rope
        else:
            ropes = tokens + 4 * _SLICE + rope
        turned = tl.load(ropes, mask=mask, other=0.0, eviction_policy="evict_first")
        turned = tl.trans(turned.to(lines_0.dtype))
        show_loads(HEIGHT)
        score = tl.dot(lines_rope, turned)
        if HEIGHT == _SHORT:
            # The sum of each product waits for the one before. The slices do not wait for
            # each other; multiplied first, so that the compiler does not chain them again.
            score = score * scale + tl.dot(lines_0, tl.trans(latent_0)) * scale
            other = tl.dot(lines_1, tl.trans(latent_1)) * scale
            other += tl.dot(lines_2, tl.trans(latent_2)) * scale
            score += other + tl.dot(lines_3, tl.trans(latent_3)) * scale
        else:
            score = tl.dot(lines_0, tl.trans(latent_0), score)
            score = tl.dot(lines_1, tl.trans(latent_1), score)
            score = tl.dot(lines_2, tl.trans(latent_2), score)
            score = tl.dot(lines_3, tl.trans(latent_3), score) * scale
        seen = chosen_tokens(pages, token, inside, PAGE)[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        if TREE > 0:
            seen = seen & tree_tokens(position, token, length, TREE)
        score = tl.where(seen, score, float("-inf"))
        share, before, top, total = softmax_step(score, top, total, 1)
        share = share.to(lines_0.dtype)
        result_0 = tl.dot(share, latent_0, result_0 * before[:, None])
        result_1 = tl.dot(share, latent_1, result_1 * before[:, None])
        result_2 = tl.dot(share, latent_2, result_2 * before[:, None])
        result_3 = tl.dot(share, latent_3, result_3 * before[:, None])
    return (result_0, result_1, result_2, result_3), top, total


@triton.jit
def _latents(tokens, mask, number: tl.constexpr, CODED: tl.constexpr, DTYPE: tl.constexpr):
    """Load a slice of a tile's latents, `[TILE, 128]`. FP8 codes are multiplied by their scale, unless all have the same."""
    column = tl.arange(0, _SLICE)[None, :]
    if not CODED:
        return tl.load(
            tokens + number * _SLICE + column, mask=mask, other=0.0, eviction_policy="evict_first"
        ).to(DTYPE)
    codes = (tokens + number * _SLICE).to(tl.pointer_type(tl.float8e4nv)) + column
    scales = (tokens + 4 * _SLICE).to(tl.pointer_type(tl.float32)) + number
    values = tl.load(codes, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    return (values * tl.load(scales, mask=mask, other=0.0)).to(DTYPE)


FRESH = ("cache", "scale", "unit", "tree")
"""Arguments of this kernel that differ from call to call; see `DirectLaunch`."""


def score_factor(scale: float, kv_scale: float) -> float:
    """The factor by which the kernel multiplies scores."""
    return float(scale * kv_scale * LOG2E)


def _loop_of(batch: MlaCall) -> Any:
    if not batch.words:
        return attend_latents
    return attend_latent_codes if batch.coded else attend_scaled_codes


def own_arguments(batch: MlaCall) -> dict[str, Any]:
    """The arguments that only this kernel takes, by the names of its parameters."""
    return {
        "cache": batch.cache,
        "scale": score_factor(batch.scale, batch.kv_scale),
        "unit": float(batch.kv_scale),
        "tree": batch.lengths if batch.tree is None else batch.tree,
        "TREE": batch.drafts,
        "PAGE": batch.cache.shape[1],
        "CACHE": batch.cache.stride()[:2],
        "CODED": batch.coded,
        "ATTEND": _loop_of(batch),
    }


def launch_mla_triton(
    batch: MlaCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases = ONE_LAUNCH,
) -> DirectLaunch | None:
    """Run `mla_decode` with this kernel. Arguments and result are as for `launch`."""
    own = own_arguments(batch)
    return launch(latent_attention, batch, out, lse, scratch, phases, FRESH, **own)
