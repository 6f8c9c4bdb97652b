# SPDX-License-Identifier: Apache-2.0
"""A batch's work partition on the device, with the scratch memory of the kernels that follow it.

One small kernel computes the partition once a step. It reads the lengths on the device, so nothing
waits for a copy to the host. A CUDA graph that contains the kernel makes a new partition at each
replay.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from pd_kernels.attention.direct import DirectLaunch, facts, keep, known_launch
from pd_kernels.attention.plan_kernel import COUNTERS, partition_rows
from pd_kernels.attention.tile_mask import TileMask
from pd_kernels.attention.work_partition import FIELDS, RowShape, TileCosts, partition
from pd_kernels.tuning import tuning

LEAST_HEIGHT = 16
LEAST_BATCH = 256
"""The least number of sequences for which the planning kernel is compiled. It is compiled for the
room of a plan, not for one batch, so no batch of a running engine waits for a compiler."""


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """The work of each worker in a batch. A plan is made once, filled once a step, and used by
    every layer.

    Kernels that share a plan must run one after another, on one stream: they share its scratch
    memory.

    Attributes:
        rows: the shape of the rows that it is made for.
        costs: the costs by which work ranges are balanced.
        ranges: int32 `[workers, 8]`, a `WorkRange` per worker.
        boundaries: int64 `[batch + workers + 1]`, scratch of the planning kernel.
        counters: int32 `[paired, workers, 4]`. Per-program counters for the split row that starts
            there: pieces arrived, merge parts claimed, workers done, unused. All are zero whenever
            no kernel runs.
        partials: float32 `[paired, workers, 2, height, dim]`, split-KV partials. A worker has at
            most two split rows. Slot 0 is for the row that the worker continues, slot 1 for the row
            that the next worker continues.
        weights: float32 `[paired, workers, 2, height]`, the base-2 log-sum-exp of each line of the
            partials.
        mask: the tiles that a mask mod keeps; None if all are read.
        launches: `DirectLaunch`es of calls with this plan, by their keys.
        filled: `[sequences]` of the last fill; `[0]` before the first.
        latest: the lengths of the last fill, and their `facts`.
    """

    rows: RowShape
    costs: TileCosts
    ranges: torch.Tensor
    boundaries: torch.Tensor
    counters: torch.Tensor
    partials: torch.Tensor
    weights: torch.Tensor
    mask: TileMask | None = None
    launches: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    filled: list[int] = field(default_factory=lambda: [0], repr=False)
    latest: list[Any] = field(default_factory=lambda: [None, ()], repr=False)

    @classmethod
    def of(
        cls,
        rows: RowShape,
        costs: TileCosts,
        batch: int,
        workers: int,
        height: int,
        dim: int,
        device: torch.device,
        paired: int = 1,
    ) -> "DecodePlan":
        """Allocate an empty plan. Callers use `plan_paged_decode` or `plan_mla_decode`.

        Args:
            rows: the shape of the rows.
            costs: by which the work ranges are balanced.
            batch: the most sequences of any fill.
            workers: the number of workers that share the work.
            height: lines of a row, padded. There is room for at least 16, because a plan that has
                seen K alone cannot tell whether 8 are enough (`PagedCall.words`).
            dim: elements of a line of the result.
            device: the device of the caches.
            paired: programs per worker, one for each block of lines (`DecodeCall.paired`).
        """

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        height = max(LEAST_HEIGHT, height)
        return cls(
            rows=rows,
            costs=costs,
            ranges=zeros(workers, FIELDS, dtype=torch.int32),
            boundaries=zeros(batch + workers + 1, dtype=torch.int64),
            counters=zeros(paired, workers, COUNTERS, dtype=torch.int32),
            partials=floats(paired, workers, 2, height, dim),
            weights=floats(paired, workers, 2, height),
        )

    @property
    def workers(self) -> int:
        return int(self.ranges.shape[0])

    @property
    def room(self) -> int:
        """The most sequences of a batch."""
        return int(self.boundaries.numel()) - self.workers - 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that attention kernels read and write, in the order of their parameters."""
        mask = [self.mask.tokens, self.mask.tiles] if self.mask else []
        return [self.ranges, self.counters, self.partials, self.weights, *mask]

    def defined(self, lengths: torch.Tensor) -> torch.Tensor:
        """`ranges` for these lengths as `partition` defines them. The mask must be filled."""
        if self.mask is None:
            return partition(lengths, self.rows, self.workers, self.costs)
        rows = self.rows._replace(window=0)
        return partition(self.mask.tokens[: len(lengths)], rows, self.workers, self.costs)

    def fill(self, lengths: torch.Tensor) -> "DecodePlan":
        """Partition the work of a batch. Change the plan in place, and return it.

        On a GPU this queues one kernel (three with a mask mod) on the current stream and returns;
        on a CPU it runs plain torch. In a CUDA graph, call it before the first layer.

        Args:
            lengths: tokens of KV of each sequence, int32 or int64 `[batch]`.

        Raises:
            ValueError: the batch is empty, or larger than the plan was made for.

        Example:
            >>> import torch
            >>> from pd_kernels.attention import plan_paged_decode
            >>> q, k_cache = torch.zeros(2, 8, 64), torch.zeros(10, 16, 2, 64)
            >>> plan = plan_paged_decode(q, k_cache).fill(torch.tensor([40, 100]))
            >>> plan.ranges[-1, 2].item()  # the last worker ends behind row 3: 2 sequences of 2 KV heads
            4
        """
        if not 0 < lengths.numel() <= self.room:
            raise ValueError(f"{lengths.numel()} lengths: the plan has room for 1 to {self.room}")
        self.filled[0] = lengths.numel()
        if not torch.compiler.is_compiling():
            self.latest[:] = lengths, facts(lengths)
        if lengths.is_cuda:
            if self.mask:
                with torch.cuda.device(lengths.device):
                    lengths = self.mask.fill(lengths)
            launch_plan(self, lengths)
        else:
            if self.mask:
                self.mask.fill(lengths)
            self.ranges.copy_(self.defined(lengths))
        return self


def check_filled(plan: DecodePlan | None, lengths: torch.Tensor) -> None:
    """Raise ValueError if a plan was not filled for this many sequences: the kernel would leave results
    unwritten, or write behind them."""
    if plan is None or torch.compiler.is_compiling() or plan.filled[0] == lengths.numel():
        return
    fact = f"was filled for {plan.filled[0]} sequences" if plan.filled[0] else "was never filled"
    raise ValueError(
        f"the plan {fact}, and the call has {lengths.numel()}: call plan.fill(lengths) once a step"
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has. 1 for a CPU, whose plans have one worker."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_plan(plan: DecodePlan, lengths: torch.Tensor) -> None:
    """Partition the work with the kernel. With a mask, `lengths` are the mask's `tokens`, which
    exclude all that a window hides."""
    device = lengths.get_device()
    key = (
        ("plan", lengths.dtype, lengths.data_ptr() & 15, device) if tuning().direct_launch else None
    )
    if launch := known_launch(plan, key):
        launch(lengths, lengths.numel(), lengths.stride(0))
        return
    given = {
        "lengths": lengths,
        "boundaries": plan.boundaries,
        "ranges": plan.ranges,
        "batch": lengths.numel(),
        "stride": lengths.stride(0),
        "workers": plan.workers,
        "heads": plan.rows.heads,
        "queries": plan.rows.queries,
        "window": 0 if plan.mask else plan.rows.window,
        "row_cost": plan.costs.row,
        "partial_cost": plan.costs.partial,
        "TILE": plan.rows.tile,
        "BATCH": triton.next_power_of_2(max(LEAST_BATCH, plan.room)),
        "WORKERS": triton.next_power_of_2(plan.workers + 1),
    }
    with torch.cuda.device(lengths.device) if lengths.is_cuda else contextlib.nullcontext():
        compiled = partition_rows[(1,)](**given, num_warps=8)
    own = ("lengths", "batch", "stride")
    keep(plan, key, DirectLaunch.of(partition_rows, compiled, 1, given, own, device))
