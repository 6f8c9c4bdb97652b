# SPDX-License-Identifier: Apache-2.0
"""Launches of the two attention kernels: the arguments that both take, said once."""

from collections.abc import Iterable
from typing import Any

import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.split_merge import MAX_POLLS
from pd_kernels.tuning import tuning

Phases = tuple[tuple[bool, bool], ...]
"""For each launch, whether it attends and whether it merges."""

ONE_LAUNCH: Phases = ((True, True),)
MERGE_ONLY: Phases = ((False, True),)

_MOST_KNOWN = 4_096
known_constants: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Compile-time arguments of calls that were launched, by `DecodeCall.key`."""


compiled_kernels: dict[tuple[Any, ...], Any] = {}
"""Kernels that were launched, by all that they are compiled for."""


def direct_launch(
    kernel: Any,
    key: tuple[Any, ...],
    programs: int,
    given: dict[str, Any],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel; one that was launched before, without Triton's search for it, which compares
    dozens of constants each time and takes longer than everything else on the host.

    Args:
        kernel: a function of Triton's.
        key: all that `constants` depend on.
        programs: how many.
        given: arguments, by name.
        constants: compile-time arguments and launch options, by name.
    """
    if not tuning().direct_launch:
        kernel[(programs,)](**given, **constants)
        return
    told = (id(kernel), *key, *_specialised(given.values()))
    compiled = compiled_kernels.get(told)
    if compiled is None:
        if len(compiled_kernels) >= _MOST_KNOWN:
            compiled_kernels.clear()
        compiled_kernels[told] = kernel[(programs,)](
            **given, **constants
        )  # None where it is interpreted
    else:
        given |= constants
        compiled[(programs, 1, 1)](*[given[name] for name in kernel.arg_names])


def _specialised(values: Iterable[Any]) -> list[Any]:
    """What Triton compiles arguments for: dtypes of tensors, and whether they are aligned to 16
    bytes; whole numbers, of which it looks at some; functions. Floats are never looked at."""
    told: list[Any] = []
    for value in values:
        for one in value if type(value) is tuple else (value,):
            kind = type(one)
            if kind is int or kind is bool or one is None:
                told.append(one)
            elif isinstance(one, torch.Tensor):
                told.append(one.dtype)
                told.append(one.data_ptr() & 15)
            elif kind is not float:
                told.append(id(one))
    return told


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
    programs = len(ranges) * constants["SHAPE"][1]
    for work, merge in phases:
        given = {
            "query": batch.query,
            "table": batch.table,
            "lengths": batch.lengths,
            "target": (out, out if lse is None else lse, starts),
            "ranges": ranges,
            "scratch": (counters, partials, weights),
            "workers": len(ranges),
            "query_stride": batch.query_strides[0],
            "table_stride": batch.table.stride(0),
            "max_polls": MAX_POLLS,
            "WORK": work,
            "MERGE": merge,
            **own,
        }
        direct_launch(kernel, key, programs, given, constants)
