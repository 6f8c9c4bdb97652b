# SPDX-License-Identifier: Apache-2.0
"""The work around the kernels that `paged_decode` and `mla_decode` share: outputs, plans,
registration with torch."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.decode_plan import LEAST_HEIGHT, DecodePlan
from pd_kernels.attention.direct import DirectLaunch
from pd_kernels.attention.work_partition import NO_MOD, RowShape

B = TypeVar("B", bound=DecodeCall)
Launch = Callable[[B, torch.Tensor, torch.Tensor | None, list[torch.Tensor]], DirectLaunch | None]
"""Launches a kernel for a call: `out`, `lse`, the plan's tensors."""


def with_queries(q: torch.Tensor) -> torch.Tensor:
    """`q` as `[batch, queries, heads, dim]`, if it is `[batch, heads, dim]`."""
    return q.unsqueeze(1) if q.dim() == 3 else q


class Queries(NamedTuple):
    """The queries of a batch in the form that operators take.

    Attributes:
        lines: `[batch, queries, heads, dim]`; in a jagged batch `[all queries, 1, heads, dim]`.
        starts: in a jagged batch, where each sequence's queries begin and where the last ones end,
            `[batch + 1]`.
        most: in a jagged batch, the largest number of queries of a sequence; 0 in other batches.
    """

    lines: torch.Tensor
    starts: torch.Tensor | None = None
    most: int = 0

    @classmethod
    def of(cls, q: torch.Tensor, plan: DecodePlan | None = None) -> "Queries":
        """Take a dense or a nested `q`. If a nested `q` does not know its longest sequence, the
        plan's number of queries is used. Without a plan, this asks the device, and waits."""
        if not q.is_nested:
            return cls(with_queries(q))
        if q.layout != torch.jagged or q.dim() != 4:
            raise ValueError(
                f"nested q of {q.layout} with {q.dim()} axes: must be torch.jagged, [batch, *, "
                "heads, dim]"
            )
        if q.lengths() is not None:
            raise ValueError("nested q with holes between its sequences: must be q.contiguous()")
        most = plan.rows.queries if plan else q._get_max_seqlen()
        return cls(q.values().unsqueeze(1), q.offsets(), int(most))


class DecodeOutputs(NamedTuple):
    """The tensors that a call writes, shaped like its q.

    Attributes:
        out: dense `[batch, (queries,) heads, dim]`.
        lse: float32 `[batch, (queries,) heads]`; `[0]` if the caller did not ask for it.
        starts: as in `Queries`. In a jagged batch, `out` and `lse` have one axis for all queries.
    """

    out: torch.Tensor
    lse: torch.Tensor
    starts: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        dim: int,
        out: torch.Tensor | None,
        return_lse: bool,
        return_partials: bool,
    ) -> "DecodeOutputs":
        """Allocate outputs of `dim` elements a line, or take `out`.

        Raises:
            ValueError: `out` has another shape, or is not dense.
        """
        starts = q.offsets() if q.is_nested else None
        lines = q.values() if q.is_nested else q
        if out is not None and out.is_nested:
            out = out.values()
        shape = (*lines.shape[:-1], dim)
        if out is None:
            dtype = torch.float32 if return_partials else q.dtype
            out = torch.empty(shape, dtype=dtype, device=q.device)
        elif out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out {list(out.shape)}: must be dense, {list(shape)}")
        sums = lines.shape[:-1] if return_lse or return_partials else (0,)
        return cls(out, torch.empty(sums, dtype=torch.float32, device=q.device), starts)

    @property
    def by_query(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `out` and `lse` that have an axis of queries, for the operator."""
        single = self.out.dim() == 3
        out = self.out.unsqueeze(1) if single else self.out
        return out, self.lse.unsqueeze(1) if single else self.lse

    @property
    def returned(self) -> Any:
        """The result of the public function: `out`, or `(out, lse)`; nested if q was nested."""
        if self.lse.dim() <= 1:
            return self._like_q(self.out)
        return self._like_q(self.out), self._like_q(self.lse)

    def _like_q(self, output: torch.Tensor) -> torch.Tensor:
        if self.starts is None:
            return output
        return torch.nested.nested_tensor_from_jagged(output, self.starts)


def planned(plan: DecodePlan | None) -> tuple[list[torch.Tensor], list[int]]:
    """A plan in the form that operators take: its tensors, and the shape of its rows. Two empty
    lists without a plan."""
    return (plan.tensors, list(plan.rows)) if plan else ([], [])


def attend(
    batch: B,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: list[torch.Tensor],
    rows: list[int],
    reference: Callable[[B, torch.Tensor, torch.Tensor | None], None],
    launch: Launch[B],
) -> DirectLaunch | None:
    """Check a call and run it: with the reference on a CPU, with the kernel on a GPU.

    Args:
        batch: the arguments of the call.
        out, lse: from `DecodeOutputs.by_query`; written.
        scratch, rows: from `planned`. If there is no plan, this makes one.
        reference, launch: run the call with the reference and with the kernel.

    Returns:
        A `DirectLaunch` for later calls with the same key; None if there cannot be one.

    Raises:
        ValueError: the arguments are not supported, or the plan was made for rows of another shape.
    """
    key = (type(batch), batch.key, *rows, *(each.shape for each in scratch[2:3]))
    if key not in _checked:
        check_call(batch, rows, scratch)
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked.add(key)
    wanted_lse = lse if lse.numel() else None
    if not batch.on_gpu:
        reference(batch, out, wanted_lse)
    elif batch.query.numel():
        with torch.cuda.device(batch.query.device):
            scratch = scratch or batch.plan().fill(batch.lengths).tensors
            return launch(batch, out, wanted_lse, scratch)
    return None


_MOST_CHECKED = 4_096
_checked: set[tuple[Any, ...]] = set()
"""Keys of calls that passed the checks."""


def check_call(batch: DecodeCall, rows: list[int], scratch: list[torch.Tensor]) -> None:
    """Raise ValueError if a call is not supported, or if its plan (`planned`) was made for rows of
    another shape."""
    batch.check()
    # A plan without a mask has all tiles.
    made = RowShape(*rows) if rows else batch.rows
    if made not in (batch.rows, batch.rows._replace(mask=NO_MOD)):
        raise ValueError(f"plan for {made}: must be for {batch.rows}")
    if scratch:  # kernels write partials without a check of how many lines and elements fit
        paired, _, _, *line = scratch[2].shape
        expected = batch.paired, max(LEAST_HEIGHT, batch.height), batch.width
        if (paired, *line) != expected:
            raise ValueError(
                f"plan for {paired} x {line[0]} lines of {line[1]} elements: must be for "
                f"{expected[0]} x {expected[1]} of {expected[2]}, as q and the cache"
            )
    if batch.on_gpu and batch.query.numel():
        batch.check_kernel()


def operator(name: str, run: Callable[..., Any]) -> Any:
    """Register `run`, which writes its `out`, `lse` and `scratch`, for `torch.compile`. Its return
    value is dropped."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)

    # torch reads the operator's schema from it.
    nothing.__signature__ = inspect.signature(run).replace(return_annotation=None)  # type: ignore[attr-defined]
    made = torch.library.custom_op(
        f"pd_kernels::{name}", nothing, mutates_args=("out", "lse", "scratch")
    )
    made.register_fake(lambda *_: None)
    return made
