# SPDX-License-Identifier: Apache-2.0
"""The part that calls of `paged_decode` and `mla_decode` share: checks, the shape of rows, launch
options."""

import functools
from typing import Any, ClassVar, NamedTuple

import torch
import triton

from pd_kernels.attention.decode_plan import DecodePlan, multiprocessors
from pd_kernels.attention.work_partition import RowShape, TileCosts
from pd_kernels.tuning import tuning

MAX_HEIGHT = 64
"""The most lines of a row. If a KV head has more, they become several rows."""


LARGE_MEMORY = (9, 10)
"""Major compute capabilities of the GPUs whose multiprocessors have the shared memory that MLA and heads of 512
elements need."""

LEAST_FP8 = (8, 9)
"""The least compute capability that converts FP8."""


class KernelConfig(NamedTuple):
    """How an attention kernel is launched.

    Attributes:
        tile: tokens of a tile.
        warps: warps of a program.
        stages: pipeline stages of the loop over tiles. Page ids and tiles are loaded in separate
            stages: with 5 stages, one tile is loaded while another is computed.
        programs: programs that fit on a multiprocessor.
        depth: pieces of a split row that are merged at a time.
        part: lines of a merge part.
        columns: elements of each of these lines, a power of two.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    depth: int
    part: int
    columns: int

    @property
    def registers(self) -> int:
        """The most registers per thread with which `programs` programs fit on a multiprocessor."""
        return min(255, 65_536 // (32 * self.warps * self.programs) // 8 * 8)


@functools.cache
def on_hopper(device: torch.device) -> bool:
    """Whether a device has the instructions of compute capability 9.0. Later GPUs lack them."""
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9)


class DecodeCall:
    """The arguments of one call. Each kernel has a subclass, a frozen dataclass with its other
    arguments.

    Attributes:
        query: `[batch, queries, query heads, dim]`.
        table: int32 `[batch, pages of a sequence]`.
        lengths: tokens of KV of each sequence, `[batch]`.
        scale: factor of the scores.
        causal: whether queries see no later tokens.
    """

    query: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    causal: bool

    starts: torch.Tensor | None = None
    """Where each sequence's queries begin, if sequences have different numbers of queries; see
    `PagedCall`."""

    sinks: torch.Tensor | None = None
    """A score of each query head that has no value, `[query heads]`; see `paged_decode`."""

    head_scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """Scales of K and of V for each KV head; see `paged_decode`."""

    costs: ClassVar[TileCosts]
    max_queries: ClassVar[int]
    caches: ClassVar[tuple[str, ...]]
    """Names of the attributes that are caches."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything on which checks and launch options depend. Calls with the same key are checked
        once, because an eager step of a model makes dozens of them."""
        return (tuning(), *self.own_key)

    @functools.cached_property
    def own_key(self) -> tuple[Any, ...]:
        """The part of `key` that depends on the call alone."""
        caches = [getattr(self, name) for name in self.caches]
        return (
            self.query.device,
            self.causal,
            *((each.shape, each.stride(), each.dtype) for each in (self.query, *caches)),
            *((each.shape, each.stride(), each.dtype) for each in (self.table, self.lengths)),
            *(each.data_ptr() % 16 for each in caches),
        )

    @property
    def on_gpu(self) -> bool:
        """Whether the kernel takes the call; otherwise the reference does."""
        return bool(self.query.is_cuda)

    @property
    def kv_heads(self) -> int:
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Elements of a line of the result."""
        raise NotImplementedError

    @property
    def config(self) -> KernelConfig:
        raise NotImplementedError

    @property
    def queries(self) -> int:
        """Queries of a sequence; the largest number if sequences differ."""
        return int(self.query.shape[1])

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.query.shape[2]) // self.kv_heads

    @property
    def lines(self) -> int:
        """Lines (query x query head) of a sequence and KV head."""
        return self.queries * self.group

    @property
    def least_height(self) -> int:
        """The fewest lines of a row: as many as a product takes."""
        return 16

    @property
    def height(self) -> int:
        """Lines of a row, padded to the height of a matrix product."""
        return int(min(MAX_HEIGHT, max(self.least_height, triton.next_power_of_2(self.lines))))

    @property
    def blocks(self) -> int:
        """Blocks of `height` lines that the lines of a KV head need."""
        return -(-self.lines // self.height)

    @property
    def query_strides(self) -> tuple[int, int, int]:
        """Strides of sequence, query and head. Torch may give an axis of length 1 any stride. These
        do not depend on that, so a batch of one sequence is not compiled again."""
        sequence, query, head = self.query.stride()[:3]
        single = [size == 1 for size in self.query.shape[:3]]
        each = int(self.query.shape[1:].numel())
        return each if single[0] else sequence, 0 if single[1] else query, 0 if single[2] else head

    @property
    def paired(self) -> int:
        """Programs of a worker: one for each block of lines. They run side by side and read the
        same tiles, so that memory is read once."""
        return self.blocks

    @property
    def rows(self) -> RowShape:
        """The shape of the rows, for which the plan must be made."""
        return RowShape(self.kv_heads, self.config.tile, queries=self.queries, window=0)

    def plan(self, max_batch: int | None = None) -> DecodePlan:
        """Allocate an empty plan for calls of this shape with up to `max_batch` sequences (by
        default, this call's number)."""
        batch = len(self.lengths) if max_batch is None else max_batch
        return self.plan_for(batch, self.config.programs)

    def plan_for(self, batch: int, programs: int) -> DecodePlan:
        """Allocate an empty plan for up to `batch` sequences, with `programs` programs on each multiprocessor."""
        programs *= multiprocessors(self.query.device)
        return DecodePlan.of(
            rows=self.rows,
            costs=self.costs,
            batch=batch,
            workers=max(1, programs // self.paired),
            paired=self.paired,
            height=self.height,
            dim=self.width,
            device=self.query.device,
        )

    def shape(self, with_lse: bool) -> tuple[int, ...]:
        """SHAPE of `split_merge.py`."""
        heads, jagged = self.kv_heads * self.blocks, self.starts is not None
        sinks, scaled = self.sinks is not None, self.head_scales is not None
        lines = (self.lines, self.height, self.group, self.width)
        padded = triton.next_power_of_2(self.width)
        return (heads, self.paired, *lines, with_lse, jagged, sinks, padded, scaled)

    def constants(self, with_lse: bool) -> dict[str, Any]:
        """Compile-time arguments and launch options of both kernels, by the names of their
        parameters."""
        config = self.config
        return {
            "SHAPE": self.shape(with_lse),
            "PARTS": (config.depth, config.part, config.columns),
            "TILE": config.tile,
            "CAUSAL": self.causal and self.queries > 1,
            "QUERY": self.query_strides[1:],
            "STAGES": config.stages,
            "num_warps": config.warps,
            "maxnreg": config.registers,
        }

    def check(self) -> None:
        """Raise ValueError if the arguments contradict each other, or are not supported."""
        batch = len(self.query) if self.starts is None else len(self.starts) - 1
        if not 1 <= self.queries <= self.max_queries:
            raise ValueError(f"{self.queries} queries: must be 1 to {self.max_queries}")
        if self.table.dim() != 2 or len(self.table) != batch or self.lengths.shape != (batch,):
            raise ValueError(
                f"block_table {list(self.table.shape)}, lengths {list(self.lengths.shape)}: "
                f"must be [{batch}, pages] and [{batch}]"
            )

    def check_kernel(self) -> None:
        """Raise ValueError if only the reference, and not the kernel, supports the arguments."""
        if self.query.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"q of {self.query.dtype}: must be bfloat16 or float16")
        for name in ("query", *self.caches):
            stride = getattr(self, name).stride(-1)
            if stride != 1:
                raise ValueError(f"{name}: elements {stride} apart, must be consecutive")
        if self.table.dtype != torch.int32 or self.table.stride(1) != 1:
            raise ValueError(f"block_table of {self.table.dtype}: must be int32, rows consecutive")
        if not self.lengths.is_contiguous():
            raise ValueError(
                f"lengths: {self.lengths.stride(0)} elements apart, must be consecutive: "
                "pass lengths.contiguous()"
            )
