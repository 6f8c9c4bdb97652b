# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call of `paged_decode`, with their checks and the launch options of the
kernel."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import triton

from pd_kernels.attention.decode_call import DecodeCall, KernelConfig, on_hopper
from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.attention.mods import Mod
from pd_kernels.attention.tile_mask import TileMask
from pd_kernels.attention.work_partition import NO_MOD, RowShape, TileCosts
from pd_kernels.tuning import tuning

FP8 = torch.float8_e4m3fn
DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
SINKS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of sinks."""
MAX_QUERIES = 8
COSTS = TileCosts(row=16, partial=1)
"""Estimates, not yet measured on a GPU."""


def config_of(dim: int, element_bytes: int, height: int, value_dim: int = 0) -> KernelConfig:
    """Launch options for rows of `height` lines of `dim` elements, of which values have `value_dim`
    (by default, as many). Their registers and shared memory are checked by compiling ahead of time;
    they are not yet tuned on a GPU."""
    block, part_block = (triton.next_power_of_2(each) for each in (dim, value_dim or dim))
    widest = max(block, part_block)  # values may be wider than keys
    if widest > 256:
        # K and V of two tiles in flight, or four of FP8, take most of the shared memory.
        depth = 32 if tuning().column_merge else 16
        stages = 4 if height > 32 else 5 if element_bytes > 1 else 7
        return KernelConfig(32, 8, stages, 1, depth, 1, part_block)
    tile = max(32, min(128, 8_192 // widest))
    # With whole lines, a row of few lines would be one part, which a single program merges.
    depth, part = (32, 1) if tuning().column_merge else (16, max(1, 512 // part_block))
    if height > 32:  # asynchronous products (wgmma), which need one buffer more
        return KernelConfig(tile, 4, 4, 2, depth, part, part_block)
    programs = {8: 4, 16: 3}.get(height, 2) if block <= 128 else 2  # only `swapped` has 8
    return KernelConfig(tile, 4, 5 if element_bytes > 1 else 7, programs, depth, part, part_block)


@dataclass(frozen=True, eq=False)
class PagedCall(DecodeCall):
    """The arguments of one call; see `paged_decode`.

    Attributes:
        query: `[batch, queries, query heads, dim]`; `[all queries, 1, query heads, dim]` if
            sequences have different numbers of queries.
        keys, values: `[page, token, KV head, dim]`; values may have another dim.
    """

    costs = COSTS
    max_queries = MAX_QUERIES
    caches = ("keys", "values")

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
    starts: torch.Tensor | None = None
    """In a jagged batch, where each sequence's queries begin, and where the last ones end, int32 or
    int64 `[batch + 1]`."""

    most_queries: int = 0
    """The largest number of queries of a sequence in a jagged batch."""

    sinks: torch.Tensor | None = None
    """A score of each query head that has no value, `[query heads]`."""

    head_scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """Scales of K and of V for each KV head, float32 `[KV heads]` each, beside `key_scale` and
    `value_scale`."""

    @functools.cached_property
    def own_key(self) -> tuple[Any, ...]:
        starts = None if self.starts is None else (self.starts.shape, self.most_queries)
        masked = None if self.mask_mod is None else self.mask_mod.number
        own = (self.sinks, *(self.head_scales or (None, None)))
        forms = (each if each is None else (each.shape, each.stride(), each.dtype) for each in own)
        return (*super().own_key, self.window, starts, masked, *forms)

    @property
    def queries(self) -> int:
        return super().queries if self.starts is None else self.most_queries

    def own_queries(self, sequence: int) -> slice:
        """The place of a sequence's queries on the first axis of `query`. In a jagged batch this
        waits for the device."""
        if self.starts is None:
            return slice(sequence, sequence + 1)
        begin, end = self.starts[sequence : sequence + 2].tolist()
        return slice(begin, end)

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[2])

    @property
    def width(self) -> int:
        return int(self.values.shape[3])

    @property
    def key_width(self) -> int:
        """Elements of a query and of a key."""
        return int(self.query.shape[3])

    @property
    def words(self) -> bool:
        """Whether the kernel reads FP8 codes as words of two, see `paged_codes`. Rows of 64 lines
        use asynchronous products instead, whose operands lie in shared memory as bfloat16."""
        if self.keys.dtype != FP8 or self.lines > 32:
            return False
        return all(
            cache.data_ptr() % 2 == 0 and all(stride % 2 == 0 for stride in cache.stride()[:3])
            for cache in (self.keys, self.values)
        )

    @property
    def swapped(self) -> bool:
        """Whether tokens, and not queries, are the lines of products; see `attend_swapped`. A product
        of Hopper has 64 lines and 8 columns or more. FP8 rows of 80 to 128 elements fill them: 64
        tokens of a tile, and 64 words of a token."""
        blocks = {triton.next_power_of_2(each) for each in (self.key_width, self.width)}
        filled = blocks == {128} and self.key_width == self.width
        return tuning().swapped and self.words and filled and on_hopper(self.query.device)

    @property
    def least_height(self) -> int:
        return 8 if self.swapped else super().least_height

    @property
    def config(self) -> KernelConfig:
        return config_of(self.key_width, self.keys.element_size(), self.height, self.width)

    @property
    def rows(self) -> RowShape:
        mask = NO_MOD if self.mask_mod is None else self.mask_mod.number
        return super().rows._replace(window=self.window, mask=mask)

    def plan(self, max_batch: int | None = None, max_tokens: int | None = None) -> DecodePlan:
        """A plan, see `DecodeCall.plan`. With a mask mod, the plan has its `TileMask`, for
        sequences of up to `max_tokens` tokens (by default, the room of a row of the block
        table)."""
        plan = super().plan(max_batch)
        if self.mask_mod is None:
            return plan
        tokens = self.table.shape[1] * self.keys.shape[1] if max_tokens is None else max_tokens
        mask = TileMask.of(
            mod=self.mask_mod,
            rows=self.rows,
            heads=int(self.query.shape[2]),
            batch=plan.room,
            tokens=tokens,
            device=self.query.device,
        )
        return replace(plan, mask=mask)

    def check(self) -> None:
        heads, dim = self.query.shape[2:]
        if self.keys.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise ValueError(
                f"k_cache {list(self.keys.shape)}, v_cache {list(self.values.shape)}: "
                "both must be [pages, page, heads, dim]"
            )
        if self.keys.shape[3] != dim:
            raise ValueError(f"k_cache of dim {self.keys.shape[3]}: must be {dim} as q")
        if heads % self.kv_heads:
            raise ValueError(f"{heads} query heads: must be a multiple of {self.kv_heads}")
        if self.keys.dtype != self.values.dtype or self.keys.dtype not in (self.query.dtype, FP8):
            raise ValueError(
                f"caches of {self.keys.dtype} and {self.values.dtype}: both must be "
                f"{self.query.dtype} as q, or {FP8}"
            )
        if self.window < 0:
            raise ValueError(f"window {self.window}: must be tokens, or 0 for all")
        sinks = self.sinks
        if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
            raise ValueError(
                f"sinks {list(sinks.shape)}: must be dense, [{heads}], one of each query head"
            )
        if sinks is not None and (sinks.dtype not in SINKS or sinks.device != self.query.device):
            raise ValueError(
                f"sinks of {sinks.dtype} on {sinks.device}: must be one of {SINKS} on {self.query.device}"
            )
        self._check_head_scales()
        super().check()

    def _check_head_scales(self) -> None:
        required = (self.kv_heads,), torch.float32, self.query.device, True
        for name, given in zip(("k_scale", "v_scale"), self.head_scales or (), strict=False):
            if (given.shape, given.dtype, given.device, given.is_contiguous()) != required:
                raise ValueError(
                    f"{name} of {given.dtype} {list(given.shape)} on {given.device}: must be a number, or "
                    f"dense float32 [{self.kv_heads}] on {self.query.device}, one of each KV head. "
                    "Scales of sequences or tokens have no kernel"
                )

    def check_kernel(self) -> None:
        for name, width in (("q", self.key_width), ("v_cache", self.width)):
            if width not in DIMS:
                raise ValueError(f"{name} of dim {width}: must be one of {DIMS}")
        super().check_kernel()


Scale: TypeAlias = float | torch.Tensor
"""A scale of a cache: a number, or float32 `[KV heads]`."""


class CacheScales(NamedTuple):
    """The scales of an FP8 cache in the form that calls take: as numbers, and as tensors."""

    key: float
    value: float
    heads: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, k_scale: Scale, v_scale: Scale) -> "CacheScales":
        """Raise ValueError if only one of them is a tensor."""
        if type(k_scale) is float and type(v_scale) is float:
            return _UNSCALED if k_scale == v_scale == 1.0 else cls(k_scale, v_scale, None)
        if isinstance(k_scale, torch.Tensor) and isinstance(v_scale, torch.Tensor):
            return cls(1.0, 1.0, (k_scale, v_scale))
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if isinstance(scale, torch.Tensor):
                raise ValueError(
                    f"{name} is a tensor {list(scale.shape)}, and the other scale a number: both must be "
                    "numbers, or float32 [KV heads]"
                )
        return cls(float(k_scale), float(v_scale), None)


_UNSCALED = CacheScales(1.0, 1.0, None)
