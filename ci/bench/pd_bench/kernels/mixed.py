# SPDX-License-Identifier: Apache-2.0
"""Speed of prefill chunks and decodes in one launch beside two launches in turn."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pd_bench.kernels import decode_cases
from pd_bench.kernels.decode_cases import Heads, paged_set
from pd_bench.kernels.report import Comparison, Param, duration
from pd_kernels.attention import MixedPlan
from pd_kernels.attention.mixed_kernel import launch_mixed
from pd_kernels.attention.paged_kernel import launch_paged

Calls = list[Callable[[], Any]]
PAGE = 16


class Step(NamedTuple):
    """Lengths of the decodes, length of the prefill, and tokens of its chunk."""

    decodes: list[int]
    length: int
    chunk: int


STEPS: dict[str, Step] = {
    "64 x 4k, chunk of 1k at 8k": Step([4_096] * 64, 8_192, 1_024),
    "32 x 8k, chunk of 512 at 4k": Step([8_192] * 32, 4_096, 512),
    "128 x 2k, chunk of 2k at 16k": Step([2_048] * 128, 16_384, 2_048),
}


def mixed_calls(heads: Heads, step: Step) -> tuple[Calls, Calls, Calls]:
    """Three calls: one launch; one launch whose programs take turns by their numbers, not by
    multiprocessor; and two launches in turn, each with all programs that fit."""
    lengths = [*step.decodes, step.length]
    given = paged_set(lengths, heads, PAGE, torch.bfloat16)
    count = len(step.decodes)
    query = torch.randn(
        count + step.chunk, heads.query, heads.dim, dtype=torch.bfloat16, device=decode_cases.DEVICE
    )
    starts = [*range(count + 1), count + step.chunk]
    plan = MixedPlan.of(query, given.keys, given.table, given.lengths, starts, count)
    prefill, decode = plan.calls(
        query=query.unsqueeze(1),
        keys=given.keys,
        values=given.values,
        scale=heads.dim**-0.5,
    )
    out = torch.empty_like(query)
    alone = [(call, call.plan().fill(call.lengths).tensors) for call in (prefill, decode)]

    def together(sm_aware: bool) -> Callable[[], Any]:
        return lambda: launch_mixed(
            prefill, decode, plan.plans, plan.tickets, out, None, sm_aware=sm_aware
        )

    def in_turn() -> None:
        for call, scratch in alone:
            launch_paged(call, out, None, scratch)

    aware = decode_cases.DEVICE != "cpu"  # the interpreter has no multiprocessors
    return [together(aware)], [together(False)], [in_turn]


def measure_mixed(
    heads: Heads,
    params: dict[str, Param],
    step: Step,
    seconds: Callable[[Calls, int], float],
    replays: int,
) -> Iterator[Comparison]:
    """Yield the rows of a step."""
    one_s, unaware_s, two_s = (seconds(calls, replays) for calls in mixed_calls(heads, step))
    yield duration("mixed_attention / two launches", params, one_s, two_s, 1.0)
    yield duration("mixed_attention: SM-aware / by number", params, one_s, unaware_s, None)
