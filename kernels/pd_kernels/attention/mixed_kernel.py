# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `mixed_attention`: prefill chunks and decodes in one launch, after POD-Attention
(Kamath et al. 2024).

Prefills are bound by the tensor cores, decodes by memory. Both are busy if each multiprocessor runs
a program of each kind. No launch order guarantees that. So a program asks which multiprocessor it
runs on, and takes the kind whose turn it is there. If no work of that kind is left, it takes the
other kind.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import smid

from pd_kernels.attention.decode_plan import DecodePlan, multiprocessors
from pd_kernels.attention.launch import head_scales_of, sinks_of
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_kernel import attend_range, loop_of, score_factor
from pd_kernels.attention.split_merge import MAX_POLLS, merge_split_rows, own_place

PROGRAMS = 2
"""Programs on a multiprocessor: one of each kind. Heads of 512 elements have room for one at a time."""


@triton.jit
def claim(tickets, prefill_programs, decode_programs, processors, SM_AWARE: tl.constexpr):
    """Choose what this program does.

    Args:
        tickets: zeros, int32 `[processors + 3]`: programs begun on each multiprocessor, prefill
            programs begun, decode programs begun, programs done.
        prefill_programs, decode_programs: the number of programs of each kind; their sum is the
            launch.
        processors: multiprocessors.

    Returns:
        decodes: 1 for a decode program, 0 for a prefill program.
        number: the program's number within its kind.
    """
    place = smid() if SM_AWARE else tl.program_id(0)
    turn = tl.atomic_add(tickets + place % processors, 1, sem="relaxed", scope="gpu")
    decodes = turn % 2
    number = tl.atomic_add(tickets + processors + decodes, 1, sem="relaxed", scope="gpu")
    if number >= tl.where(decodes > 0, decode_programs, prefill_programs):
        decodes = 1 - decodes
        number = tl.atomic_add(tickets + processors + decodes, 1, sem="relaxed", scope="gpu")
    return decodes, number


@triton.jit
def leave(tickets, programs, processors):
    """Count this program as done. The last one sets all tickets to zero for the next launch."""
    done = tl.atomic_add(tickets + processors + 2, 1, sem="acq_rel", scope="gpu")
    if done == programs - 1:
        for place in range(processors + 3):
            tl.store(tickets + place, 0)


@triton.jit
def _work(
    number, query, keys, values, batch, target, ranges, scratch, workers, query_stride,
    table_stride, scale, value_scale, head_scales, max_polls, mods, SHAPE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, KEY_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, ATTEND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do what a program of one kind does, as `paged_attention`."""
    table, lengths, owners = batch
    worker, block, work_range, own = own_place(scratch, ranges, workers, number, SHAPE)
    attend_range(
        query, keys, values, table, lengths, target, own, (lengths, lengths), mods[0], mods[1], work_range,
        worker, block, query_stride, table_stride, 0, scale, value_scale, head_scales, owners, SHAPE, BLOCK, KEY_DIM,
        PAGE, TILE, WINDOW, CAUSAL, QUERY, KEY, VALUE, SCORE_MOD, MASK_MOD, False, ATTEND, STAGES,
    )  # fmt: skip
    merge_split_rows(own, target, work_range, worker, block, max_polls, SHAPE, PARTS)


@triton.jit(
    do_not_specialize=[
        *("processors", "prefill_programs", "prefill_workers", "prefill_table_stride"),
        *("decode_programs", "decode_workers", "decode_table_stride"),
        *("scale", "value_scale", "max_polls"),
    ]
)
def mixed_programs(
    query, keys, values, tickets, processors, prefill, prefill_target, prefill_ranges,
    prefill_scratch, prefill_programs, prefill_workers, prefill_table_stride, decode,
    decode_target, decode_ranges, decode_scratch, decode_programs, decode_workers,
    decode_table_stride, query_stride, scale, value_scale, head_scales, max_polls, mods,
    PREFILL_SHAPE: tl.constexpr, PREFILL_PARTS: tl.constexpr, PREFILL_TILE: tl.constexpr,
    PREFILL_ATTEND: tl.constexpr, PREFILL_STAGES: tl.constexpr, DECODE_SHAPE: tl.constexpr,
    DECODE_PARTS: tl.constexpr, DECODE_TILE: tl.constexpr, DECODE_ATTEND: tl.constexpr,
    DECODE_STAGES: tl.constexpr, BLOCK: tl.constexpr, KEY_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, SM_AWARE: tl.constexpr,
):  # fmt: skip
    """Each program is a prefill or a decode program, see `claim`. `prefill` and `decode` are their
    block tables, lengths and `owners`; `mods` are the mods' own arguments. The other arguments are as in
    `paged_attention`."""
    decodes, number = claim(tickets, prefill_programs, decode_programs, processors, SM_AWARE)
    if decodes == 0:
        _work(
            number, query, keys, values, prefill, prefill_target, prefill_ranges, prefill_scratch,
            prefill_workers, query_stride, prefill_table_stride, scale, value_scale, head_scales, max_polls, mods,
            PREFILL_SHAPE, PREFILL_PARTS, BLOCK, KEY_DIM, PAGE, PREFILL_TILE, WINDOW, True, QUERY, KEY,
            VALUE, SCORE_MOD, MASK_MOD, PREFILL_ATTEND, PREFILL_STAGES,
        )  # fmt: skip
    else:
        _work(
            number, query, keys, values, decode, decode_target, decode_ranges, decode_scratch,
            decode_workers, query_stride, decode_table_stride, scale, value_scale, head_scales, max_polls, mods,
            DECODE_SHAPE, DECODE_PARTS, BLOCK, KEY_DIM, PAGE, DECODE_TILE, WINDOW, True, QUERY, KEY, VALUE,
            SCORE_MOD, MASK_MOD, DECODE_ATTEND, DECODE_STAGES,
        )  # fmt: skip
    leave(tickets, prefill_programs + decode_programs, processors)


def launch_mixed(
    prefill: PagedCall,
    decode: PagedCall,
    plans: tuple[DecodePlan, DecodePlan],
    tickets: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sm_aware: bool = True,
    owners: torch.Tensor | None = None,
) -> None:
    """Run both calls in one launch.

    Args:
        prefill, decode: jagged calls with the same queries and caches.
        plans: their filled plans.
        tickets: zeros, int32 `[multiprocessors + 3]`.
        out, lse: as `launch` takes them.
        owners: with mods, int64, the sequence to which each part of a prefill belongs.
        sm_aware: if False, programs take turns by their numbers, wherever they run.
    """
    own: dict[str, Any] = {}
    programs = 0
    score, mask = prefill.score_mod, prefill.mask_mod
    modded = score is not None or mask is not None
    assert owners is not None or not modded
    for name, call, plan in (("prefill", prefill, plans[0]), ("decode", decode, plans[1])):
        config = call.config
        count = plan.workers * call.paired
        programs += count
        own |= {
            name: (call.table, call.lengths, owners if name == "prefill" and modded else None),
            f"{name}_target": (out, out if lse is None else lse, call.starts, sinks_of(call)),
            f"{name}_ranges": plan.ranges,
            f"{name}_scratch": (plan.counters, plan.partials, plan.weights),
            f"{name}_programs": count,
            f"{name}_workers": plan.workers,
            f"{name}_table_stride": call.table.stride(0),
            f"{name.upper()}_SHAPE": call.shape(lse is not None),
            f"{name.upper()}_PARTS": (config.depth, config.part, config.columns),
            f"{name.upper()}_TILE": config.tile,
            f"{name.upper()}_ATTEND": loop_of(call),
            f"{name.upper()}_STAGES": config.stages,
        }
    resident = min(PROGRAMS, prefill.config.programs, decode.config.programs)
    config = prefill.config._replace(programs=resident)
    mixed_programs[(programs,)](
        query=prefill.query,
        keys=prefill.keys,
        values=prefill.values,
        tickets=tickets,
        processors=len(tickets) - 3,
        query_stride=prefill.query_strides[0],
        scale=score_factor(prefill.scale, prefill.key_scale, score),
        value_scale=prefill.value_scale,
        head_scales=head_scales_of(prefill),
        max_polls=MAX_POLLS,
        mods=(score.args if score else (), mask.args if mask else ()),
        SCORE_MOD=score.kernel if score else None,
        MASK_MOD=mask.kernel if mask else None,
        BLOCK=triton.next_power_of_2(prefill.key_width),
        KEY_DIM=prefill.key_width,
        PAGE=prefill.keys.shape[1],
        WINDOW=prefill.window,
        QUERY=prefill.query_strides[1:],
        KEY=prefill.keys.stride()[:3],
        VALUE=prefill.values.stride()[:3],
        SM_AWARE=sm_aware,
        num_warps=config.warps,
        maxnreg=config.registers,
        **own,
    )


def make_tickets(device: torch.device) -> torch.Tensor:
    """Tickets of `claim`, all zero."""
    return torch.zeros(multiprocessors(device) + 3, dtype=torch.int32, device=device)
