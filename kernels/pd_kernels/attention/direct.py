# SPDX-License-Identifier: Apache-2.0
"""Launches of a decode kernel, or of a planning kernel, that repeat an earlier launch, without Triton's search for
the kernel.

The host work of a call of `paged_decode` or `mla_decode` depends on shapes, strides, dtypes and
alignments alone. These are the same for every layer and nearly every step. The first call takes the
usual way, and leaves a `DirectLaunch` with its plan. The next call compares its key (`direct_key`)
and puts its own tensors in their places.

These calls always take the usual way: calls without a
plan, nested batches, calls with a list of tiles, and calls of the Gluon kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from triton import knobs
from triton.runtime import driver

from pd_kernels.tuning import tuning

Key = tuple[Any, ...]

_MOST_KNOWN = 4_096
"""The most launches that a plan keeps."""


@dataclass(frozen=True, eq=False, slots=True)
class DirectLaunch:
    """A launch whose host work is done.

    Attributes:
        run: launches the compiled kernel on the current stream, given all of its arguments, and tells profilers.
        launcher: Triton's launcher of the kernel, which `run` calls.
        grid: the programs launched, on three axes.
        loaded: what the launcher takes behind the stream: the kernel as it was loaded, and nothing for profilers.
        arguments: the kernel's arguments in its order; None for arguments that differ from call to
            call.
        places: the places of a call's own arguments.
        device: number of the GPU on which the kernel was loaded.
    """

    run: Callable[..., None]
    launcher: Callable[..., None]
    grid: tuple[int, int, int]
    loaded: tuple[Any, ...]
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
        """Make a `DirectLaunch` of a launch that has just been done; None if kernels are
        interpreted.

        Args:
            kernel: a function of Triton's.
            compiled: the result of its compilation.
            programs: the number of programs launched.
            given: all arguments, by name.
            own: names of the arguments that differ from call to call, in the order in which a call
                gives them.
            device: number of the GPU.
        """
        if compiled is None:
            return None
        names = list(kernel.arg_names)
        arguments = [None if name in own else given[name] for name in names]
        places = tuple(names.index(name) for name in own)
        grid = programs, 1, 1
        run = compiled[grid]  # loads the kernel
        loaded = compiled.function, compiled.packed_metadata, None, None, None
        return cls(run, compiled.run, grid, loaded, arguments, places, device)

    def __call__(self, *own: Any) -> None:
        """Launch the kernel with a call's own arguments."""
        arguments = self.arguments.copy()
        for place, value in zip(self.places, own, strict=True):
            arguments[place] = value
        active = driver.active
        if active.get_current_device() == self.device:
            self._launch(active, arguments)
        else:
            with torch.cuda.device(self.device):
                self._launch(active, arguments)

    def _launch(self, active: Any, arguments: list[Any]) -> None:
        begin, end = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # Triton's own way makes a dict for each launch and calls these chains, empty or not.
        if getattr(begin, "calls", begin) or getattr(end, "calls", end):
            self.run(*arguments)
        else:
            stream = active.get_current_stream(self.device)
            self.launcher(*self.grid, stream, *self.loaded, *arguments)


class Planned(Protocol):
    """A plan (`DecodePlan`), as far as launches need it."""

    @property
    def launches(self) -> dict[Key, DirectLaunch]: ...

    @property
    def mask(self) -> object: ...

    @property
    def latest(self) -> list[Any]: ...


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor on which the choice of a kernel depends."""
    where = tensor.get_device(), tensor.data_ptr() & 15
    return (tensor.shape, tensor.stride(), tensor.dtype, *where)


def direct_key(
    plan: Planned | None,
    tensors: Sequence[torch.Tensor],
    lengths: torch.Tensor,
    out: torch.Tensor | None,
    *others: bool | int,
) -> Key | None:
    """Everything on which checks, compile-time arguments and Triton's choice of a kernel depend,
    for one plan; None if the call must take the usual way.

    Args:
        plan: the call's plan.
        tensors: the call's tensors; the first is `q`.
        lengths: the call's lengths. Mostly they are those that the plan was filled with, which all layers of a step share.
        out: the tensor for the results; None if it is allocated, which is always aligned.
        others: the call's other arguments. Values of floats are left out, because no kernel is
            compiled for them.
    """
    switches = tuning()
    if plan is None or not switches.direct_launch or plan.mask is not None:
        return None
    if type(tensors[0]) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    filled, filled_facts = plan.latest
    key = [switches.code, filled_facts if filled is lengths else facts(lengths), *others]
    for tensor in tensors if out is None else (*tensors, out):
        key += (  # `facts`, without the time of a call
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.get_device(),
            tensor.data_ptr() & 15,
        )
    return tuple(key)


def known_launch(plan: Planned | None, key: Key | None) -> DirectLaunch | None:
    """The launch that an earlier call with this plan and key left."""
    return None if plan is None or key is None else plan.launches.get(key)


def keep(plan: Planned | None, key: Key | None, made: DirectLaunch | None) -> None:
    """Keep a call's launch for later calls with the same plan and key."""
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
    """`out` and `lse` as `DecodeOutputs.of` makes them; `lse` is None if the call did not ask for
    it."""
    shape, device = q.shape[:-1], q.device
    if out is None:
        dtype = torch.float32 if return_partials else q.dtype
        out = torch.empty((*shape, dim), dtype=dtype, device=device)
    if return_lse or return_partials:
        return out, torch.empty(shape, dtype=torch.float32, device=device)
    return out, None
