# SPDX-License-Identifier: Apache-2.0
"""One call of `paged_decode`: its arguments, whether they fit, and how the kernel is launched for them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from pd_kernels.decode.mods import Mod
from pd_kernels.decode.schedule import Costs, Rows

FP8 = torch.float8_e4m3fn
DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_QUERIES = 8
MAX_HEIGHT = 64
"""Lines of a row at most: more are given to several rows."""

COSTS = Costs(row=16, partial=1)
"""Not yet fitted on a GPU."""


class Config(NamedTuple):
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


def config_of(dim: int, element_bytes: int, height: int) -> Config:
    """For rows of so many lines. Checked ahead of time, not yet tuned on a GPU."""
    block = triton.next_power_of_2(dim)
    tile, part = max(32, min(128, 8_192 // block)), max(1, 512 // block)
    if height > 32:  # large enough for asynchronous products, which want a buffer more
        return Config(tile, 4, 4, 2, 16, part)
    programs = 3 if block <= 128 and height == 16 else 2
    return Config(tile, 4, 5 if element_bytes > 1 else 7, programs, 16, part)


@dataclass(frozen=True, eq=False)
class Batch:
    """One call, checked.

    Attributes:
        query: `[batch, queries, query heads, dim]`.
        keys, values: `[page, token, head, dim]`.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    key_scale: float
    value_scale: float
    causal: bool
    window: int
    score_mod: Mod | None
    mask_mod: Mod | None

    @property
    def group(self) -> int:
        return int(self.query.shape[2] // self.keys.shape[2])

    @property
    def lines(self) -> int:
        """Of a KV head."""
        return int(self.query.shape[1]) * self.group

    @property
    def height(self) -> int:
        """Of a row: lines, padded."""
        return int(min(MAX_HEIGHT, max(16, triton.next_power_of_2(self.lines))))

    @property
    def config(self) -> Config:
        return config_of(self.query.shape[3], self.keys.element_size(), self.height)

    @property
    def rows(self) -> Rows:
        """What a plan for it must be made for."""
        heads = self.keys.shape[2] * -(-self.lines // self.height)
        return Rows(heads, self.config.tile, self.query.shape[1], self.window)

    def check(self) -> None:
        """Raise ValueError where arguments cannot belong together, or are not supported."""
        batch, queries, heads, dim = self.query.shape
        if self.keys.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise ValueError(
                f"k_cache {list(self.keys.shape)}, v_cache {list(self.values.shape)}: "
                "both must be [pages, page, heads, dim]"
            )
        if not self.keys.shape[3] == self.values.shape[3] == dim:
            raise ValueError(
                f"k_cache and v_cache of dim {self.keys.shape[3]} and {self.values.shape[3]}: "
                f"must both be {dim} as q"
            )
        if heads % self.keys.shape[2]:
            raise ValueError(f"{heads} query heads: must be a multiple of {self.keys.shape[2]}")
        if not 1 <= queries <= MAX_QUERIES:
            raise ValueError(f"{queries} queries: must be 1 to {MAX_QUERIES}")
        if self.keys.dtype != self.values.dtype or self.keys.dtype not in (self.query.dtype, FP8):
            raise ValueError(
                f"caches of {self.keys.dtype} and {self.values.dtype}: both must be "
                f"{self.query.dtype} as q, or {FP8}"
            )
        if self.table.dim() != 2 or len(self.table) != batch or self.lengths.shape != (batch,):
            raise ValueError(
                f"block_table {list(self.table.shape)}, lengths {list(self.lengths.shape)}: "
                f"must be [{batch}, pages] and [{batch}]"
            )
        if self.window < 0:
            raise ValueError(f"window {self.window}: must be tokens, or 0 for all")

    def check_kernel(self) -> None:
        """Raise ValueError for what only the reference can do."""
        dim = self.query.shape[3]
        if dim not in DIMS or self.query.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"q of dim {dim} and {self.query.dtype}: must be of dim {DIMS}, bfloat16 or float16"
            )
        for name in ("query", "keys", "values"):
            stride = getattr(self, name).stride(3)
            if stride != 1:
                raise ValueError(f"{name}: elements {stride} apart, must be consecutive")
        if self.table.dtype != torch.int32 or self.table.stride(1) != 1:
            raise ValueError(f"block_table of {self.table.dtype}: must be int32, rows consecutive")
