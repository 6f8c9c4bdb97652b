# SPDX-License-Identifier: Apache-2.0
"""Launches of the two attention kernels, with the arguments that both take."""

from collections.abc import Sequence
from typing import Any

import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.direct import DirectLaunch
from pd_kernels.attention.split_merge import MAX_POLLS
from pd_kernels.tuning import tuning

Phases = tuple[tuple[bool, bool], ...]
"""One pair per launch: whether the launch attends, and whether it merges."""

ONE_LAUNCH: Phases = ((True, True),)
MERGE_ONLY: Phases = ((False, True),)

_FRESH = ("query", "table", "lengths", "target")
"""Arguments of both kernels that differ from call to call."""

_MOST_KNOWN = 4_096
known_constants: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Compile-time arguments of calls that were launched, by `DecodeCall.key`."""


def sinks_of(batch: DecodeCall) -> torch.Tensor:
    """The sinks of a call; any tensor if there are none, which the kernel does not read."""
    return batch.lengths if batch.sinks is None else batch.sinks


def head_scales_of(batch: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of a call's KV heads; any tensors if there are none, which the kernel does not read."""
    return batch.head_scales or (batch.lengths, batch.lengths)


def launch(
    kernel: Any,
    batch: DecodeCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases,
    fresh: Sequence[str],
    **own: Any,
) -> DirectLaunch | None:
    """Launch an attention kernel for a call, once for each phase.

    Args:
        kernel: `paged_attention` or `latent_attention`.
        batch: the arguments of the call.
        out: `[batch, queries, query heads, batch.width]`, dense; written.
        lse: float32 `[batch, queries, query heads]`, written; or None.
        scratch: `DecodePlan.tensors` of a filled plan.
        phases: one launch does both; tests take two.
        fresh: names in `own` whose values differ between calls with the same `direct_key`.
        own: the arguments that only this kernel takes, by the names of its parameters.

    Returns:
        A `DirectLaunch` for later calls with the same key. It takes `query`, `table`, `lengths`,
        `target` and the arguments named in `fresh`. None if there were several launches, or if the
        kernel was interpreted.
    """
    ranges, counters, partials, weights = scratch[:4]
    starts = batch.lengths if batch.starts is None else batch.starts
    key = (type(batch), batch.key, lse is not None)
    constants = known_constants.get(key)
    if constants is None:
        if len(known_constants) >= _MOST_KNOWN:
            known_constants.clear()
        constants = known_constants[key] = batch.constants(with_lse=lse is not None)
    programs = len(ranges) * constants["SHAPE"][1]
    given = {
        "query": batch.query,
        "table": batch.table,
        "lengths": batch.lengths,
        "target": (out, out if lse is None else lse, starts, sinks_of(batch)),
        "ranges": ranges,
        "scratch": (counters, partials, weights),
        "workers": len(ranges),
        "query_stride": batch.query_strides[0],
        "table_stride": batch.table.stride(0),
        "max_polls": MAX_POLLS,
        **own,
        **constants,
    }
    for work, merge in phases:
        given |= {"WORK": work, "MERGE": merge}
        compiled = kernel[(programs,)](**given)
    if not tuning().direct_launch or phases != ONE_LAUNCH or batch.starts is not None:
        return None
    device = batch.query.get_device()
    return DirectLaunch.of(kernel, compiled, programs, given, (*_FRESH, *fresh), device)
