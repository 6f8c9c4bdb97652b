# SPDX-License-Identifier: Apache-2.0
"""Launches of the two attention kernels: the arguments that both take, said once."""

from typing import Any

import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.split_merge import MAX_POLLS

Phases = tuple[tuple[bool, bool], ...]
"""For each launch, whether it attends and whether it merges."""

ONE_LAUNCH: Phases = ((True, True),)
MERGE_ONLY: Phases = ((False, True),)

_MOST_KNOWN = 4_096
known_constants: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Compile-time arguments of calls that were launched, by `DecodeCall.key`."""


def launch(
    kernel: Any,
    batch: DecodeCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases,
    **own: Any,
) -> None:
    """Launch an attention kernel for a call, once for each phase.

    Args:
        kernel: `paged_attention` or `latent_attention`.
        batch: the arguments of the call.
        out: `[batch, queries, query heads, batch.width]`, dense; written.
        lse: float32 `[batch, queries, query heads]`, written; or None.
        scratch: `DecodePlan.tensors` of a filled plan.
        phases: one launch does both; tests take two.
        own: the arguments that only this kernel takes, by the names of its parameters.
    """
    ranges, counters, partials, weights = scratch[:4]
    starts = batch.lengths if batch.starts is None else batch.starts
    key = (type(batch), batch.key, lse is not None)
    constants = known_constants.get(key)
    if constants is None:
        if len(known_constants) >= _MOST_KNOWN:
            known_constants.clear()
        constants = known_constants[key] = batch.constants(with_lse=lse is not None)
    for work, merge in phases:
        kernel[(len(ranges) * constants["SHAPE"][1],)](
            query=batch.query,
            table=batch.table,
            lengths=batch.lengths,
            target=(out, out if lse is None else lse, starts),
            ranges=ranges,
            scratch=(counters, partials, weights),
            workers=len(ranges),
            query_stride=batch.query_strides[0],
            table_stride=batch.table.stride(0),
            max_polls=MAX_POLLS,
            **constants,
            **own,
            WORK=work,
            MERGE=merge,
        )
