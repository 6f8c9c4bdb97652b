# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `paged_decode`: a worker attends to its stretch of the rows, then helps to merge.

A row has the queries of one KV head: `lines` of query and head in the group, padded to what a matrix
product takes, so that K and V are read once for all of them.
"""

import torch
import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import LOG2E, weigh
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.plan_kernel import current_piece, first_tile, touched_rows
from pd_kernels.attention.split_merge import MAX_POLLS, finish_row, merge_split_rows, result_lines
from pd_kernels.attention.work_partition import FIELDS

_FIELDS = tl.constexpr(FIELDS)
_LOG2E = tl.constexpr(LOG2E)


@triton.jit(do_not_specialize=["table_stride", "scale", "value_scale", "max_polls"])
def paged_attention(
    query,
    keys,
    values,
    table,
    lengths,
    out,
    lse,
    records,
    counters,
    partials,
    weights,
    score_args,
    mask_args,
    table_stride,
    scale,  # of scores, K's included
    value_scale,
    max_polls,
    HEADS: tl.constexpr,  # rows of a sequence
    LINES: tl.constexpr,  # of a KV head
    HEIGHT: tl.constexpr,  # lines of a row, padded
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # DIM, padded
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY: tl.constexpr,  # strides: sequence, query, head
    KEY: tl.constexpr,  # strides: page, token, head
    VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    WITH_LSE: tl.constexpr,
    STAGES: tl.constexpr,
    WORK: tl.constexpr,
    MERGE: tl.constexpr,
):
    QUERIES: tl.constexpr = LINES // GROUP
    worker = tl.program_id(0)
    record = records + worker * _FIELDS
    if WORK:
        # Numbers that are the same for all rows or tiles are computed anew: kept, they cost the registers
        # with which one more program fits on a multiprocessor.
        for done in tl.range(0, touched_rows(record), disable_licm=True):
            line = tl.arange(0, HEIGHT)
            column = tl.arange(0, BLOCK)
            row, start, stop, length, _ = current_piece(
                record, done, lengths, HEADS, QUERIES, WINDOW, TILE
            )
            sequence, head, number = result_lines(row, line, HEADS, LINES, HEIGHT)
            unseen = first_tile(length, QUERIES, WINDOW, TILE)
            exists = number < LINES
            place = number // GROUP * QUERY[1] + (head * GROUP + number % GROUP) * QUERY[2]
            place += sequence.to(tl.int64) * QUERY[0]
            mask = exists[:, None] & (column < DIM)[None, :]
            lines = tl.load(query + place[:, None] + column[None, :], mask=mask, other=0.0)
            result, top, total = _attend(
                lines,
                keys + head.to(tl.int64) * KEY[2],
                values + head.to(tl.int64) * VALUE[2],
                table + sequence.to(tl.int64) * table_stride,
                *(score_args, mask_args, sequence),
                head * GROUP + number % GROUP,
                length - QUERIES + number // GROUP,
                *(length, unseen + start, unseen + stop, scale),
                *(DIM, BLOCK, PAGE, TILE, WINDOW, CAUSAL, KEY, VALUE),
                *(SCORE_MOD, MASK_MOD, STAGES),
            )
            result = result * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
            weight = top + tl.log2(total)
            row, start, stop, length, tiles = current_piece(
                record, done, lengths, HEADS, QUERIES, WINDOW, TILE
            )
            finish_row(
                *(partials, weights, counters, out, lse, record, worker, row),
                *(start, (start == 0) & (stop == tiles)),
                (result,),
                *(weight, HEADS, LINES, HEIGHT, GROUP, DIM, WITH_LSE),
            )
    if MERGE:
        merge_split_rows(
            *(partials, weights, counters, out, lse, record, worker, max_polls),
            *(HEADS, LINES, HEIGHT, GROUP, DIM, BLOCK, DEPTH, PART, WITH_LSE),
        )


@triton.jit
def _attend(
    lines,
    keys,
    values,
    pages,
    score_args,
    mask_args,
    sequence,
    head,
    position,
    length,
    begin,
    end,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles `begin` to `end` of a row: sums of values, float32 `[HEIGHT, BLOCK]`, the largest score
    (base 2) and the sum of weights, `[HEIGHT]`."""
    HEIGHT: tl.constexpr = lines.shape[0]
    column = tl.arange(0, BLOCK)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result = tl.zeros((HEIGHT, BLOCK), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < length
        if PAGE % TILE == 0:
            page = tl.load(pages + tile // (PAGE // TILE)).to(tl.int64)
            within = tile % (PAGE // TILE) * TILE + tl.arange(0, TILE)
        else:
            page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
            within = token % PAGE
        mask = inside[:, None]
        if DIM < BLOCK:
            mask = mask & (column < DIM)[None, :]
        there = (page * KEY[0] + within * KEY[1])[:, None] + column[None, :]
        key = tl.load(keys + there, mask=mask, other=0.0)
        there = (page * VALUE[0] + within * VALUE[1])[:, None] + column[None, :]
        # Memory behind the last token may hold anything, and 0 * NaN is NaN.
        value = tl.load(values + there, mask=mask, other=0.0)
        score = tl.dot(lines, tl.trans(key.to(lines.dtype))) * scale
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        if SCORE_MOD is not None or MASK_MOD is not None:
            real = tl.minimum(token, length - 1)[None, :]
            asked = tl.maximum(position, 0)[:, None]
            if SCORE_MOD is not None:
                score = SCORE_MOD(score, sequence, head[:, None], asked, real, score_args)
                score = score * _LOG2E
            if MASK_MOD is not None:
                seen = seen & MASK_MOD(sequence, head[:, None], asked, real, mask_args)
        score = tl.where(seen, score, float("-inf"))
        share, before, top, total = weigh(score, top, total, 1)
        result = result * before[:, None]
        result = tl.dot(share.to(lines.dtype), value.to(lines.dtype), result)
    return result, top, total


def launch_paged(
    batch: PagedCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: tuple[tuple[bool, bool], ...] = ((True, True),),
) -> None:
    """`paged_decode` by the kernel, with the tensors of a plan.

    Args:
        phases: of each launch, whether it attends and whether it merges. One launch does both.
    """
    records, counters, partials, weights = scratch
    score, mask = batch.score_mod, batch.mask_mod
    scale = batch.scale * batch.key_scale * (1.0 if score else LOG2E)
    for work, merge in phases:
        paged_attention[(records.shape[0],)](
            *(batch.query, batch.keys, batch.values, batch.table, batch.lengths),
            *(out, out if lse is None else lse, records, counters, partials, weights),
            *(score.args if score else (), mask.args if mask else ()),
            *(batch.table.stride(0), scale, batch.value_scale, MAX_POLLS),
            **batch.constants(lse is not None),
            DIM=batch.width,
            BLOCK=triton.next_power_of_2(batch.width),
            PAGE=batch.keys.shape[1],
            WINDOW=batch.window,
            KEY=batch.keys.stride()[:3],
            VALUE=batch.values.stride()[:3],
            SCORE_MOD=score.kernel if score else None,
            MASK_MOD=mask.kernel if mask else None,
            WORK=work,
            MERGE=merge,
        )
