# SPDX-License-Identifier: Apache-2.0
"""One call of `mla_decode`: its arguments, whether they fit, and how the kernel is launched for them."""

from dataclasses import dataclass

import torch

from pd_kernels.attention.decode_call import MAX_HEIGHT, DecodeCall, KernelConfig
from pd_kernels.attention.work_partition import TileCosts

LATENT = 512
ROPE = 64
GROUPS = 4
"""Of a token's latent in FP8: each of 128 has a scale."""

CODED_BYTES = LATENT + 4 * GROUPS + 2 * ROPE
"""Of a token in FlashMLA's FP8 layout: codes, float32 scales, bfloat16 RoPE part."""

MAX_QUERIES = 4
COSTS = TileCosts(row=48, partial=1)
"""A piece's result is as large as some tiles (ThunderMLA's cost model: 7.5 us beside 1.5 us for 32
tokens), but many programs share its merge. Not yet fitted on a GPU."""


def config_of(lines: int, coded: bool) -> KernelConfig:
    """For sequences of so many lines. Checked ahead of time, not yet tuned on a GPU."""
    if coded or lines > MAX_HEIGHT:  # products or decoding, not memory, take the time: large tiles
        return KernelConfig(64, 8, 3, 1, 32, 1)
    if lines > MAX_HEIGHT // 2:
        return KernelConfig(32, 8, 5, 1, 32, 1)
    return KernelConfig(64, 8, 5, 1, 32, 1)


@dataclass(frozen=True, eq=False)
class MlaCall(DecodeCall):
    """One call.

    Attributes:
        query: `[batch, queries, heads, 576]`.
        cache: `[page, token, 576]`, or uint8 `[page, token, 656]`.
    """

    costs = COSTS
    max_queries = MAX_QUERIES
    caches = ("cache",)
    kv_heads = 1
    width = LATENT

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    causal: bool

    @property
    def coded(self) -> bool:
        return bool(self.cache.dtype == torch.uint8)

    @property
    def height(self) -> int:
        """Of codes in full: only for asynchronous products does the compiler load them asynchronously,
        too."""
        return MAX_HEIGHT if self.coded else super().height

    @property
    def config(self) -> KernelConfig:
        return config_of(self.lines, self.coded)

    def check(self) -> None:
        dim = self.query.shape[3]
        if dim != LATENT + ROPE:
            raise ValueError(f"q of dim {dim}: must be {LATENT} of the latent and {ROPE} of RoPE")
        width = CODED_BYTES if self.coded else dim
        if self.cache.dim() != 3 or self.cache.shape[2] != width:
            raise ValueError(f"cache {list(self.cache.shape)}: must be [pages, page, {width}]")
        wanted = torch.bfloat16 if self.coded else self.cache.dtype
        if self.query.dtype != wanted:
            raise ValueError(f"q of {self.query.dtype}: must be {wanted}, for this cache")
        super().check()

    def check_kernel(self) -> None:
        super().check_kernel()
        if self.coded and (self.cache.stride(1) % 16 or self.cache.data_ptr() % 16):
            raise ValueError(
                f"cache: tokens {self.cache.stride(1)} bytes apart, must be aligned to 16 bytes"
            )
