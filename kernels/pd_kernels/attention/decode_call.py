# SPDX-License-Identifier: Apache-2.0
"""What a call of `paged_decode` and one of `mla_decode` have in common, and how a kernel is launched."""

from typing import Any, ClassVar, NamedTuple

import torch
import triton

from pd_kernels.attention.plan_kernel import DecodePlan, multiprocessors
from pd_kernels.attention.work_partition import RowShape, TileCosts

MAX_HEIGHT = 64
"""Lines of a row at most: more are given to several rows."""


class KernelConfig(NamedTuple):
    """How a kernel is launched.

    Attributes:
        tile: tokens.
        stages: of the loop over tiles. Page ids and tiles take two each but the last, so that 5 have
            one tile under way while another is worked on.
        programs: that fit on a multiprocessor.
        depth, part: pieces and lines that are merged at a time.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    depth: int
    part: int

    @property
    def registers(self) -> int:
        """That a thread may have, so that as many programs fit."""
        return min(255, 65_536 // (32 * self.warps * self.programs) // 8 * 8)


class DecodeCall:
    """One call; a kernel's own is a frozen dataclass with the rest of its arguments.

    Attributes:
        query: `[batch, queries, query heads, dim]`.
        table: int32 `[batch, pages of a sequence]`.
        lengths: `[batch]`, tokens of KV.
        scale: of scores.
        causal: queries see no later tokens.
    """

    query: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    causal: bool

    costs: ClassVar[TileCosts]
    max_queries: ClassVar[int]
    caches: ClassVar[tuple[str, ...]]
    """Names of the attributes that are caches, `[page, token, ...]`."""

    @property
    def kv_heads(self) -> int:
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Of a result: elements of a line."""
        raise NotImplementedError

    @property
    def config(self) -> KernelConfig:
        raise NotImplementedError

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return int(self.query.shape[2]) // self.kv_heads

    @property
    def lines(self) -> int:
        """Of a KV head."""
        return int(self.query.shape[1]) * self.group

    @property
    def height(self) -> int:
        """Of a row: lines, padded."""
        return int(min(MAX_HEIGHT, max(16, triton.next_power_of_2(self.lines))))

    @property
    def rows(self) -> RowShape:
        """What a plan for it must be made for."""
        heads = self.kv_heads * -(-self.lines // self.height)
        return RowShape(heads, self.config.tile, self.query.shape[1], 0)

    def plan(self, max_batch: int | None = None) -> DecodePlan:
        """Room for a plan, of this batch or of such ones of up to `max_batch` sequences; not filled."""
        workers = self.config.programs * multiprocessors(self.query.device)
        batch = len(self.query) if max_batch is None else max_batch
        return DecodePlan.of(
            *(self.rows, self.costs, batch, workers, self.height, self.width, self.query.device)
        )

    def constants(self, with_lse: bool) -> dict[str, Any]:
        """What both kernels are compiled for, by the names of their parameters."""
        config = self.config
        return {
            "HEADS": self.rows.heads,
            "LINES": self.lines,
            "HEIGHT": self.height,
            "GROUP": self.group,
            "TILE": config.tile,
            "CAUSAL": self.causal and self.query.shape[1] > 1,
            "QUERY": self.query.stride()[:3],
            "DEPTH": config.depth,
            "PART": config.part,
            "WITH_LSE": with_lse,
            "STAGES": config.stages,
            "num_warps": config.warps,
            "maxnreg": config.registers,
        }

    def check(self) -> None:
        """Raise ValueError where arguments cannot belong together, or are not supported."""
        batch, queries = self.query.shape[:2]
        if not 1 <= queries <= self.max_queries:
            raise ValueError(f"{queries} queries: must be 1 to {self.max_queries}")
        if self.table.dim() != 2 or len(self.table) != batch or self.lengths.shape != (batch,):
            raise ValueError(
                f"block_table {list(self.table.shape)}, lengths {list(self.lengths.shape)}: "
                f"must be [{batch}, pages] and [{batch}]"
            )

    def check_kernel(self) -> None:
        """Raise ValueError for what only the reference can do."""
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
