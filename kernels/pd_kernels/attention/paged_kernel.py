# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `paged_decode`: each worker attends to its work range, then helps to merge split
rows.

A row has all lines (query x query head) of one KV head, so K and V are read once for all of them.
The row is padded to the height of a matrix product. `work_partition.py` defines the words.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pd_kernels.attention.direct import DirectLaunch
from pd_kernels.attention.launch import ONE_LAUNCH, Phases, head_scales_of, launch
from pd_kernels.attention.mods import Mod
from pd_kernels.attention.online_softmax import LOG2E
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_codes import attend_codes
from pd_kernels.attention.paged_plain import attend_tiles
from pd_kernels.attention.paged_swapped import attend_swapped
from pd_kernels.attention.plan_kernel import current_piece, first_tile, rows_of
from pd_kernels.attention.split_merge import (
    DIM,
    GROUP,
    HEADS,
    HEIGHT,
    JAGGED,
    LINES,
    PADDED_DIM,
    PAIRED,
    SCALED,
    finish_row,
    line_queries,
    merge_split_rows,
    own_place,
    result_lines,
)


@triton.jit(
    do_not_specialize=[
        *("workers", "table_stride", "list_stride", "scale", "value_scale", "max_polls")
    ]
)
def paged_attention(
    query,
    keys,
    values,
    table,
    lengths,
    target,
    ranges,
    scratch,
    listed,
    score_args,
    mask_args,
    workers,
    query_stride,  # of a sequence; of a query in a jagged batch
    table_stride,
    list_stride,
    scale,  # of scores, with K's scale
    value_scale,
    head_scales,  # of K and V of each KV head, with SHAPE[SCALED]
    max_polls,
    SHAPE: tl.constexpr,  # see `split_merge.py`, as PARTS
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a query and a key, padded
    KEY_DIM: tl.constexpr,  # not padded; those of a value are SHAPE[DIM]
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY: tl.constexpr,  # strides of query, head
    KEY: tl.constexpr,  # strides of page, token, head
    VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    LISTED: tl.constexpr,  # tiles are those of a list
    ATTEND: tl.constexpr,  # the loop over tiles, see `loop_of`
    STAGES: tl.constexpr,
    WORK: tl.constexpr,  # attend
    MERGE: tl.constexpr,  # merge split rows
):
    worker, block, work_range, scratch = own_place(
        scratch, ranges, workers, tl.program_id(0), SHAPE
    )
    if WORK:
        attend_range(
            query, keys, values, table, lengths, target, scratch, listed, score_args, mask_args,
            work_range, worker, block, query_stride, table_stride, list_stride, scale, value_scale,
            head_scales, None, SHAPE, BLOCK, KEY_DIM, PAGE, TILE, WINDOW, CAUSAL, QUERY, KEY, VALUE, SCORE_MOD, MASK_MOD,
            LISTED, ATTEND, STAGES,
        )  # fmt: skip
    if MERGE:
        merge_split_rows(scratch, target, work_range, worker, block, max_polls, SHAPE, PARTS)


@triton.jit
def attend_range(
    query,
    keys,
    values,
    table,
    lengths,
    target,
    scratch,
    listed,
    score_args,
    mask_args,
    work_range,
    worker,
    block,
    query_stride,
    table_stride,
    list_stride,
    scale,
    value_scale,
    head_scales,
    owners,
    SHAPE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    LISTED: tl.constexpr,
    ATTEND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to all tiles of a worker, and write results and partials.

    Args:
        target: see `store_lines`.
        scratch, work_range, worker, block: from `own_place`.
        listed: with LISTED, `TileMask.tokens` and `TileMask.tiles`.
        owners: the number that mods are given for each sequence, int64; None: its own.
    The other arguments are as in the kernel.
    """
    ROWS: tl.constexpr = SHAPE[HEADS] // SHAPE[PAIRED]
    QUERIES: tl.constexpr = SHAPE[LINES] // SHAPE[GROUP]
    VALUE_BLOCK: tl.constexpr = SHAPE[PADDED_DIM]
    # A list holds only the tiles of the window.
    UNSEEN: tl.constexpr = 0 if LISTED else WINDOW
    planned = listed[0] if LISTED else lengths
    # Without licm, each iteration computes again the values that no iteration changes. If registers
    # kept them, a multiprocessor would have room for one program less.
    for done in tl.range(0, rows_of(work_range), disable_licm=True):
        line = tl.arange(0, SHAPE[HEIGHT])
        column = tl.arange(0, BLOCK)
        row, start, stop, length, _ = current_piece(
            work_range, done, planned, ROWS, QUERIES, UNSEEN, TILE
        )
        sequence, head, number = result_lines(row * SHAPE[PAIRED] + block, line, SHAPE)
        unseen = first_tile(length, QUERIES, UNSEEN, TILE)
        if LISTED:
            length = tl.maximum(tl.load(lengths + sequence), 0).to(tl.int32)
            unseen = sequence * list_stride
        first, count, exists = line_queries(target[2], sequence, number, SHAPE)
        if SHAPE[JAGGED]:
            place = (first + number // SHAPE[GROUP]) * query_stride
        else:
            place = number // SHAPE[GROUP] * QUERY[0] + sequence.to(tl.int64) * query_stride
        place += (head * SHAPE[GROUP] + number % SHAPE[GROUP]) * QUERY[1]
        mask = exists[:, None] & (column < KEY_DIM)[None, :]
        lines = tl.load(query + place[:, None] + column[None, :], mask=mask, other=0.0)
        factor = scale * tl.load(head_scales[0] + head) if SHAPE[SCALED] else scale
        result, top, total = ATTEND(
            lines=lines,
            keys=keys + head.to(tl.int64) * KEY[2],
            values=values + head.to(tl.int64) * VALUE[2],
            pages=table + sequence.to(tl.int64) * table_stride,
            tiles=listed[1],
            score_args=score_args,
            mask_args=mask_args,
            sequence=sequence if owners is None else tl.load(owners + sequence).to(tl.int32),
            head=head * SHAPE[GROUP] + number % SHAPE[GROUP],
            position=length - count + number // SHAPE[GROUP],
            queries=count,
            length=length,
            begin=unseen + start,
            end=unseen + stop,
            scale=factor,
            DIM=KEY_DIM,
            BLOCK=BLOCK,
            VALUE_DIM=SHAPE[DIM],
            VALUE_BLOCK=VALUE_BLOCK,
            PAGE=PAGE,
            TILE=TILE,
            WINDOW=WINDOW,
            CAUSAL=CAUSAL,
            KEY=KEY,
            VALUE=VALUE,
            SCORE_MOD=SCORE_MOD,
            MASK_MOD=MASK_MOD,
            LISTED=LISTED,
            STAGES=STAGES,
        )
        result = result * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
        weight = top + tl.log2(total)
        row, start, stop, length, count = current_piece(
            work_range, done, planned, ROWS, QUERIES, UNSEEN, TILE
        )
        whole = (start == 0) & (stop == count)
        row = row * SHAPE[PAIRED] + block
        if SHAPE[SCALED]:
            _, head, _ = result_lines(row, line, SHAPE)
            result = result * tl.load(head_scales[1] + head)
        finish_row(scratch, target, work_range, worker, row, start, whole, (result,), weight, SHAPE)


def loop_of(batch: PagedCall) -> Any:
    """The loop over tiles that a call takes."""
    if batch.swapped:
        return attend_swapped
    return attend_codes if batch.words else attend_tiles


FRESH = ("keys", "values", "listed", "scale", "value_scale", "head_scales")
"""Arguments of this kernel that differ from call to call; see `DirectLaunch`."""


def score_factor(scale: float, key_scale: float, score: Mod | None) -> float:
    """The factor by which the kernel multiplies scores, before a score mod."""
    return float(scale * key_scale * (1.0 if score else LOG2E))


def launch_paged(
    batch: PagedCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases = ONE_LAUNCH,
) -> DirectLaunch | None:
    """Run `paged_decode` with the kernel. Arguments and result are as for `launch`."""
    score, mask = batch.score_mod, batch.mask_mod
    tokens, tiles = scratch[4:] or (batch.lengths, batch.lengths)
    return launch(
        paged_attention,
        batch,
        out,
        lse,
        scratch,
        phases,
        FRESH,
        keys=batch.keys,
        values=batch.values,
        listed=(tokens, tiles),
        list_stride=tiles.stride(0),
        score_args=score.args if score else (),
        mask_args=mask.args if mask else (),
        scale=score_factor(batch.scale, batch.key_scale, score),
        value_scale=float(batch.value_scale),
        head_scales=head_scales_of(batch),
        BLOCK=triton.next_power_of_2(batch.key_width),
        KEY_DIM=batch.key_width,
        PAGE=batch.keys.shape[1],
        WINDOW=batch.window,
        KEY=batch.keys.stride()[:3],
        VALUE=batch.values.stride()[:3],
        SCORE_MOD=score.kernel if score else None,
        MASK_MOD=mask.kernel if mask else None,
        LISTED=len(scratch) > 4,
        ATTEND=loop_of(batch),
    )
