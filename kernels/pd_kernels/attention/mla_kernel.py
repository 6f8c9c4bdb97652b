# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `mla_decode`: like `paged_decode`'s, over one latent that is key and value of all
heads.

A row has up to 64 lines (query x head). That is what one product of the tensor cores takes, and as
many results as registers can hold: 64 x 512 in float32 are half of a multiprocessor's. Latents are
read as four slices of 128.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pd_kernels.attention.launch import ONE_LAUNCH, Phases, launch
from pd_kernels.attention.mla_call import CODED_BYTES, LATENT, ROPE, MlaCall
from pd_kernels.attention.online_softmax import LOG2E, softmax_step
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


@triton.jit(do_not_specialize=["workers", "table_stride", "scale", "max_polls"])
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
    max_polls,
    SHAPE: tl.constexpr,  # see `split_merge.py`, as PARTS
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY: tl.constexpr,  # strides of query, head
    CACHE: tl.constexpr,  # strides of page, token
    CODED: tl.constexpr,  # FlashMLA's FP8 layout
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
            column, rope = tl.arange(0, _SLICE)[None, :], tl.arange(0, _ROPE)[None, :]
            own = query + place
            result_0, result_1, result_2, result_3, top, total = _attend(
                tl.load(own + column, mask=exists, other=0.0),
                tl.load(own + _SLICE + column, mask=exists, other=0.0),
                tl.load(own + 2 * _SLICE + column, mask=exists, other=0.0),
                tl.load(own + 3 * _SLICE + column, mask=exists, other=0.0),
                tl.load(own + 4 * _SLICE + rope, mask=exists, other=0.0),
                cache=cache,
                pages=table + sequence.to(tl.int64) * table_stride,
                position=length - QUERIES + number // SHAPE[GROUP],
                length=length,
                begin=start,
                end=stop,
                scale=scale,
                PAGE=PAGE,
                TILE=TILE,
                CAUSAL=CAUSAL,
                CACHE=CACHE,
                CODED=CODED,
                STAGES=STAGES,
            )
            share = (1.0 / tl.where(total > 0, total, 1.0))[:, None]
            weight = top + tl.log2(total)
            # Read again instead of kept during the loop, whose products take nearly all registers.
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
def _attend(
    lines_0,
    lines_1,
    lines_2,
    lines_3,
    lines_rope,
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
    CACHE: tl.constexpr,
    CODED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend with the lines of a row to tiles `begin` to `end` of its sequence.

    Args:
        lines_0, ..., lines_3, lines_rope: slices of the queries, `[HEIGHT, 128]`; the last one
            `[HEIGHT, 64]`.
        pages: the sequence's row of the block table.
        position: place of each line's query in the sequence.
        length: tokens of the sequence.

    Returns:
        result_0, ..., result_3: slices of the weighted sum of latents, not normalised, float32
            `[HEIGHT, 128]`.
        top, total: the largest score (base 2) and the sum of weights of each line, float32
            `[HEIGHT]`.
    """
    HEIGHT: tl.constexpr = lines_0.shape[0]
    rope = tl.arange(0, _ROPE)[None, :]
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result_0 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    result_1 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    result_2 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    result_3 = tl.zeros((HEIGHT, _SLICE), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < length
        if PAGE % TILE == 0:
            page = tl.load(pages + tile // (PAGE // TILE)).to(tl.int64)
            base = cache + (page * CACHE[0] + tile % (PAGE // TILE) * (TILE * CACHE[1]))
            tokens = base + (tl.arange(0, TILE) * CACHE[1])[:, None]
        else:
            page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
            tokens = cache + (page * CACHE[0] + token % PAGE * CACHE[1])[:, None]
        mask = inside[:, None]
        latent_0 = _latents(tokens, mask, 0, CODED, lines_0.dtype)
        latent_1 = _latents(tokens, mask, 1, CODED, lines_0.dtype)
        latent_2 = _latents(tokens, mask, 2, CODED, lines_0.dtype)
        latent_3 = _latents(tokens, mask, 3, CODED, lines_0.dtype)
        if CODED:
            ropes = (tokens + _CODES).to(tl.pointer_type(tl.bfloat16)) + rope
        else:
            ropes = tokens + 4 * _SLICE + rope
        score = tl.dot(lines_rope, tl.trans(tl.load(ropes, mask=mask, other=0.0)))
        score = tl.dot(lines_0, tl.trans(latent_0), score)
        score = tl.dot(lines_1, tl.trans(latent_1), score)
        score = tl.dot(lines_2, tl.trans(latent_2), score)
        score = tl.dot(lines_3, tl.trans(latent_3), score) * scale
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        score = tl.where(seen, score, float("-inf"))
        share, before, top, total = softmax_step(score, top, total, 1)
        share = share.to(lines_0.dtype)
        result_0 = tl.dot(share, latent_0, result_0 * before[:, None])
        result_1 = tl.dot(share, latent_1, result_1 * before[:, None])
        result_2 = tl.dot(share, latent_2, result_2 * before[:, None])
        result_3 = tl.dot(share, latent_3, result_3 * before[:, None])
    return result_0, result_1, result_2, result_3, top, total


@triton.jit
def _latents(tokens, mask, number: tl.constexpr, CODED: tl.constexpr, DTYPE: tl.constexpr):
    """Load a slice of a tile's latents, `[TILE, 128]`. FP8 codes are multiplied by their scale."""
    column = tl.arange(0, _SLICE)[None, :]
    if not CODED:
        return tl.load(tokens + number * _SLICE + column, mask=mask, other=0.0)
    codes = (tokens + number * _SLICE).to(tl.pointer_type(tl.float8e4nv)) + column
    scales = (tokens + 4 * _SLICE).to(tl.pointer_type(tl.float32)) + number
    values = tl.load(codes, mask=mask, other=0.0).to(tl.float32)
    return (values * tl.load(scales, mask=mask, other=0.0)).to(DTYPE)


def own_arguments(batch: MlaCall) -> dict[str, Any]:
    """The arguments that only this kernel takes, by the names of its parameters."""
    return {
        "cache": batch.cache,
        "scale": batch.scale * LOG2E,
        "PAGE": batch.cache.shape[1],
        "CACHE": batch.cache.stride()[:2],
        "CODED": batch.coded,
    }


def launch_mla(
    batch: MlaCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases = ONE_LAUNCH,
) -> None:
    """Run `mla_decode` by this kernel, or by the Gluon kernel where that is chosen
    (`MlaCall.gluon`); the arguments are those of `launch`."""
    if batch.gluon:
        from pd_kernels.attention.mla_gluon import launch_mla_gluon

        launch_mla_gluon(batch, out, lse, scratch)
    else:
        launch(latent_attention, batch, out, lse, scratch, phases, **own_arguments(batch))
