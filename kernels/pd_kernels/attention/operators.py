# SPDX-License-Identifier: Apache-2.0
"""What `paged_decode` and `mla_decode` do alike around their kernels: outputs, plans, registration
with torch."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.attention.work_partition import RowShape

B = TypeVar("B", bound=DecodeCall)


def with_queries(q: torch.Tensor) -> torch.Tensor:
    """`q` as `[batch, queries, heads, dim]`, if it is `[batch, heads, dim]`."""
    return q.unsqueeze(1) if q.dim() == 3 else q


class DecodeOutputs(NamedTuple):
    """The tensors that a call writes, shaped like its q.

    Attributes:
        out: dense `[batch, (queries,) heads, dim]`.
        lse: float32 `[batch, (queries,) heads]`, or `[0]` if the caller did not ask for it.
    """

    out: torch.Tensor
    lse: torch.Tensor

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
        shape = (*q.shape[:-1], dim)
        if out is None:
            dtype = torch.float32 if return_partials else q.dtype
            out = torch.empty(shape, dtype=dtype, device=q.device)
        elif out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out {list(out.shape)}: must be dense, {list(shape)}")
        sums = q.shape[:-1] if return_lse or return_partials else (0,)
        return cls(out, torch.empty(sums, dtype=torch.float32, device=q.device))

    @property
    def by_query(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `out` and `lse` that have an axis of queries, for the operator."""
        single = self.out.dim() == 3
        out = self.out.unsqueeze(1) if single else self.out
        return out, self.lse.unsqueeze(1) if single else self.lse

    @property
    def returned(self) -> Any:
        """What the public function returns: `out`, or `(out, lse)`."""
        return (self.out, self.lse) if self.lse.dim() > 1 else self.out


def planned(plan: DecodePlan | None) -> tuple[list[torch.Tensor], list[int]]:
    """A plan as operators take it, its tensors and the shape of its rows; two empty lists without a
    plan."""
    return (plan.tensors, list(plan.rows)) if plan else ([], [])


def attend(
    batch: B,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: list[torch.Tensor],
    rows: list[int],
    reference: Callable[[B, torch.Tensor, torch.Tensor | None], None],
    launch: Callable[[B, torch.Tensor, torch.Tensor | None, list[torch.Tensor]], None],
) -> None:
    """Check a call and run it: by the reference on a CPU, by the kernel on a GPU.

    Args:
        batch: the arguments of the call.
        out, lse: from `DecodeOutputs.by_query`; written.
        scratch, rows: from `planned`. Without a plan, one is made.
        reference, launch: how the two run it.

    Raises:
        ValueError: the arguments are not supported, or the plan was made for other rows.
    """
    key = (type(batch), batch.key, *rows)
    if key not in _checked:
        _check(batch, rows)
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked.add(key)
    wanted = lse if lse.numel() else None
    if not batch.query.is_cuda:
        reference(batch, out, wanted)
    elif batch.query.numel():
        with torch.cuda.device(batch.query.device):
            launch(batch, out, wanted, scratch or batch.plan().fill(batch.lengths).tensors)


_MOST_CHECKED = 4_096
_checked: set[tuple[Any, ...]] = set()
"""Keys of calls that have passed."""


def _check(batch: DecodeCall, rows: list[int]) -> None:
    """Raise ValueError if a call is not supported, or its plan was made for other rows."""
    batch.check()
    if rows and RowShape(*rows) != batch.rows:
        raise ValueError(f"plan for {RowShape(*rows)}: must be for {batch.rows}")
    if batch.query.is_cuda and batch.query.numel():
        batch.check_kernel()


def operator(name: str, run: Callable[..., None]) -> Any:
    """Register `run`, which writes its `out`, `lse` and `scratch` and returns nothing, for
    `torch.compile`."""
    made = torch.library.custom_op(
        f"pd_kernels::{name}", run, mutates_args=("out", "lse", "scratch")
    )
    made.register_fake(lambda *_: None)
    return made
