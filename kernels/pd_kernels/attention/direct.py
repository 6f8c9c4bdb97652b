# SPDX-License-Identifier: Apache-2.0
"""Launches of a decode kernel like one before, without Triton's search for it.

What a call of `paged_decode` or `mla_decode` checks and computes on the host depends on shapes,
strides, dtypes and alignments alone, which are the same for every layer and nearly every step. The
first call with such arguments takes the usual way, and leaves a `DirectLaunch` with its plan. The
next one compares what it was made for (`direct_key`) and puts its own tensors in their places.

Off unless `Tuning.direct_launch` is set. Calls without a plan, of nested batches, with tiles of a
list or by the Gluon kernel always take the usual way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import driver

from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.tuning import tuning

Key = tuple[Any, ...]

_MOST_KNOWN = 4_096
"""Launches of a plan, at most."""


@dataclass(frozen=True, eq=False, slots=True)
class DirectLaunch:
    """A launch that was worked out.

    Attributes:
        run: launches the compiled kernel on the current stream, given all of its arguments.
        arguments: these, in the kernel's order; None where each call has its own.
        places: where a call's own arguments belong.
        device: number of the GPU that the kernel was loaded on.
    """

    run: Callable[..., None]
    arguments: list[Any]
    places: tuple[int, ...]
    device: int

    @classmethod
    def of(
        cls,
        kernel: Any,
        compiled: Any,
        programs: int,
        given: Mapping[str, Any],
        own: Sequence[str],
        device: int,
    ) -> "DirectLaunch | None":
        """Keep a launch that has just been made; None where kernels are interpreted.

        Args:
            kernel: a function of Triton's.
            compiled: what it was compiled to.
            programs: how many were launched.
            given: all arguments, by name.
            own: names of those that each call has its own of, in the order in which it gives them.
            device: number of the GPU.
        """
        if compiled is None:
            return None
        names = list(kernel.arg_names)
        arguments = [None if name in own else given[name] for name in names]
        places = tuple(names.index(name) for name in own)
        return cls(compiled[(programs, 1, 1)], arguments, places, device)

    def __call__(self, *own: Any) -> None:
        """Launch the kernel with a call's own arguments."""
        arguments = self.arguments.copy()
        for place, value in zip(self.places, own, strict=True):
            arguments[place] = value
        if driver.active.get_current_device() == self.device:
            self.run(*arguments)
        else:
            with torch.cuda.device(self.device):
                self.run(*arguments)


def direct_key(
    plan: DecodePlan | None,
    tensors: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    *others: bool | int,
) -> Key | None:
    """All that checks, compile-time arguments and Triton's choice of a kernel depend on, for one
    plan; None if the call must take the usual way.

    Args:
        plan: the call's.
        tensors: the call's; the first one is its `q`.
        out: where results go; None if they are allocated, which is always aligned.
        others: the call's other arguments; of floats only the value differs, which no kernel is
            compiled for.
    """
    if plan is None or not tuning().direct_launch or plan.mask is not None:
        return None
    if type(tensors[0]) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    told = [tuning().code, *others]
    for tensor in tensors if out is None else (*tensors, out):
        told += (
            *(tensor.shape, tensor.stride(), tensor.dtype),
            *(tensor.get_device(), tensor.data_ptr() & 15),
        )
    return tuple(told)


def known_launch(plan: DecodePlan | None, key: Key | None) -> DirectLaunch | None:
    """What an earlier call with this plan and key has left."""
    return None if plan is None or key is None else plan.launches.get(key)


def keep(plan: DecodePlan | None, key: Key | None, made: DirectLaunch | None) -> None:
    """Leave a call's launch for others with the same plan and key."""
    if plan is None or key is None or made is None:
        return
    if len(plan.launches) >= _MOST_KNOWN:
        plan.launches.clear()
    plan.launches[key] = made


def allocated(
    q: torch.Tensor,
    dim: int,
    out: torch.Tensor | None,
    return_lse: bool,
    return_partials: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out` and `lse` as `DecodeOutputs.of` has them; `lse` is None if nobody asked for it."""
    shape, device = q.shape[:-1], q.device
    if out is None:
        dtype = torch.float32 if return_partials else q.dtype
        out = torch.empty((*shape, dim), dtype=dtype, device=device)
    if return_lse or return_partials:
        return out, torch.empty(shape, dtype=torch.float32, device=device)
    return out, None
