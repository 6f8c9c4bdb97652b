# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `paged_decode`: each worker attends to its work range, then helps to merge split
rows.

A row has all lines (query x query head) of one KV head, padded to what a matrix product takes, so
that K and V are read once for all of them. `work_partition.py` defines the words.
"""

import torch
import triton
import triton.language as tl

from pd_kernels.attention.launch import ONE_LAUNCH, Phases, launch
from pd_kernels.attention.online_softmax import LOG2E, softmax_step
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_codes import attend_codes
from pd_kernels.attention.paged_tile import token_places, visible_scores
from pd_kernels.attention.plan_kernel import current_piece, first_tile, rows_of
from pd_kernels.attention.split_merge import (
    finish_row,
    merge_split_rows,
    own_scratch,
    result_lines,
)
from pd_kernels.attention.work_partition import FIELDS

_FIELDS = tl.constexpr(FIELDS)


@triton.jit(do_not_specialize=["workers", "table_stride", "scale", "value_scale", "max_polls"])
def paged_attention(
    query,
    keys,
    values,
    table,
    lengths,
    out,
    lse,
    ranges,
    counters,
    partials,
    weights,
    score_args,
    mask_args,
    workers,
    query_stride,  # of a sequence
    table_stride,
    scale,  # of scores, with K's scale
    value_scale,
    max_polls,
    HEADS: tl.constexpr,  # rows of a sequence
    PAIRED: tl.constexpr,  # blocks of lines that run side by side
    LINES: tl.constexpr,  # per KV head
    HEIGHT: tl.constexpr,  # lines of a row, padded
    GROUP: tl.constexpr,  # query heads per KV head
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # DIM, padded
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY: tl.constexpr,  # strides of query, head
    KEY: tl.constexpr,  # strides of page, token, head
    VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    ATTEND: tl.constexpr,  # the loop over tiles: `attend_tiles` or `attend_codes`
    DEPTH: tl.constexpr,  # pieces merged at a time
    PART: tl.constexpr,  # lines of a merge part
    COLUMNS: tl.constexpr,  # elements of each of them
    WITH_LSE: tl.constexpr,
    STAGES: tl.constexpr,
    WORK: tl.constexpr,  # attend
    MERGE: tl.constexpr,  # merge split rows
):
    QUERIES: tl.constexpr = LINES // GROUP
    worker, block = tl.program_id(0) // PAIRED, tl.program_id(0) % PAIRED
    counters, partials, weights = own_scratch(
        counters, partials, weights, block * workers, HEIGHT, DIM
    )
    work_range = ranges + worker * _FIELDS
    if WORK:
        # Without licm: values that no iteration changes are computed again in each. Kept in
        # registers, they would leave room for one program less on a multiprocessor.
        for done in tl.range(0, rows_of(work_range), disable_licm=True):
            line = tl.arange(0, HEIGHT)
            column = tl.arange(0, BLOCK)
            row, start, stop, length, _ = current_piece(
                work_range, done, lengths, HEADS // PAIRED, QUERIES, WINDOW, TILE
            )
            sequence, head, number = result_lines(row * PAIRED + block, line, HEADS, LINES, HEIGHT)
            unseen = first_tile(length, QUERIES, WINDOW, TILE)
            exists = number < LINES
            place = number // GROUP * QUERY[0] + (head * GROUP + number % GROUP) * QUERY[1]
            place += sequence.to(tl.int64) * query_stride
            mask = exists[:, None] & (column < DIM)[None, :]
            lines = tl.load(query + place[:, None] + column[None, :], mask=mask, other=0.0)
            result, top, total = ATTEND(
                lines=lines,
                keys=keys + head.to(tl.int64) * KEY[2],
                values=values + head.to(tl.int64) * VALUE[2],
                pages=table + sequence.to(tl.int64) * table_stride,
                score_args=score_args,
                mask_args=mask_args,
                sequence=sequence,
                head=head * GROUP + number % GROUP,
                position=length - QUERIES + number // GROUP,
                length=length,
                begin=unseen + start,
                end=unseen + stop,
                scale=scale,
                DIM=DIM,
                BLOCK=BLOCK,
                PAGE=PAGE,
                TILE=TILE,
                WINDOW=WINDOW,
                CAUSAL=CAUSAL,
                KEY=KEY,
                VALUE=VALUE,
                SCORE_MOD=SCORE_MOD,
                MASK_MOD=MASK_MOD,
                STAGES=STAGES,
            )
            result = result * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
            weight = top + tl.log2(total)
            row, start, stop, length, tiles = current_piece(
                work_range, done, lengths, HEADS // PAIRED, QUERIES, WINDOW, TILE
            )
            finish_row(
                partials=partials,
                weights=weights,
                counters=counters,
                out=out,
                lse=lse,
                work_range=work_range,
                worker=worker,
                row=row * PAIRED + block,
                start=start,
                whole=(start == 0) & (stop == tiles),
                results=(result,),
                weight=weight,
                HEADS=HEADS,
                LINES=LINES,
                HEIGHT=HEIGHT,
                GROUP=GROUP,
                DIM=DIM,
                WITH_LSE=WITH_LSE,
            )
    if MERGE:
        merge_split_rows(
            partials=partials,
            weights=weights,
            counters=counters,
            out=out,
            lse=lse,
            work_range=work_range,
            worker=worker,
            block=block,
            max_polls=max_polls,
            HEADS=HEADS,
            PAIRED=PAIRED,
            LINES=LINES,
            HEIGHT=HEIGHT,
            GROUP=GROUP,
            DIM=DIM,
            DEPTH=DEPTH,
            PART=PART,
            COLUMNS=COLUMNS,
            WITH_LSE=WITH_LSE,
        )


@triton.jit
def attend_tiles(
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
    """Attend with the lines of a row to tiles `begin` to `end` of its sequence.

    Args:
        lines: the queries, `[HEIGHT, BLOCK]`.
        keys, values: of the KV head.
        pages: the sequence's row of the block table.
        head: query head of each line.
        position: place of each line's query in the sequence.
        length: tokens of the sequence.

    Returns:
        result: weighted sum of values, not normalised, float32 `[HEIGHT, BLOCK]`.
        top, total: the largest score (base 2) and the sum of weights of each line, float32
            `[HEIGHT]`.
    """
    HEIGHT: tl.constexpr = lines.shape[0]
    column = tl.arange(0, BLOCK)
    top = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    result = tl.zeros((HEIGHT, BLOCK), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < length
        page, within = token_places(pages, tile, token, inside, PAGE, TILE)
        mask = inside[:, None]
        if DIM < BLOCK:
            mask = mask & (column < DIM)[None, :]
        there = (page * KEY[0] + within * KEY[1])[:, None] + column[None, :]
        key = tl.load(keys + there, mask=mask, other=0.0)
        there = (page * VALUE[0] + within * VALUE[1])[:, None] + column[None, :]
        # Masked, because memory behind the last token may hold anything, and 0 * NaN is NaN.
        value = tl.load(values + there, mask=mask, other=0.0)
        score = tl.dot(lines, tl.trans(key.to(lines.dtype))) * scale
        score = visible_scores(
            score, token, inside, position, length, sequence, head, score_args, mask_args,
            CAUSAL, WINDOW, SCORE_MOD, MASK_MOD,
        )  # fmt: skip
        share, before, top, total = softmax_step(score, top, total, 1)
        result = result * before[:, None]
        result = tl.dot(share.to(lines.dtype), value.to(lines.dtype), result)
    return result, top, total


def launch_paged(
    batch: PagedCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases = ONE_LAUNCH,
) -> None:
    """Run `paged_decode` by the kernel; the arguments are those of `launch`."""
    score, mask = batch.score_mod, batch.mask_mod
    launch(
        paged_attention,
        batch,
        out,
        lse,
        scratch,
        phases,
        keys=batch.keys,
        values=batch.values,
        score_args=score.args if score else (),
        mask_args=mask.args if mask else (),
        scale=batch.scale * batch.key_scale * (1.0 if score else LOG2E),
        value_scale=batch.value_scale,
        DIM=batch.width,
        BLOCK=triton.next_power_of_2(batch.width),
        PAGE=batch.keys.shape[1],
        WINDOW=batch.window,
        KEY=batch.keys.stride()[:3],
        VALUE=batch.values.stride()[:3],
        SCORE_MOD=score.kernel if score else None,
        MASK_MOD=mask.kernel if mask else None,
        ATTEND=attend_codes if batch.words else attend_tiles,
    )
