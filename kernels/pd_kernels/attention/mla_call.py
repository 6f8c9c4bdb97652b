# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call of `mla_decode`, with their checks and the launch options of the
kernel."""

import functools
import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton

from pd_kernels.attention.decode_call import MAX_HEIGHT, DecodeCall, KernelConfig, on_hopper
from pd_kernels.attention.paged_call import FP8
from pd_kernels.attention.work_partition import TileCosts
from pd_kernels.tuning import tuning

logger = logging.getLogger(__name__)

LATENT = 512
"""Elements of a token's latent."""

ROPE = 64
"""Elements of the part of a token that has RoPE."""

GROUPS = 4
"""Groups of 128 elements of a latent in FP8; each has a scale."""

CODED_BYTES = LATENT + 4 * GROUPS + 2 * ROPE
"""Bytes of a token in FlashMLA's FP8 layout: codes, float32 scales, bfloat16 part with RoPE."""

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of a cache without codes. float32 is for the reference alone."""

MAX_QUERIES = 8

GLUON_TILE = 64
"""Tokens of a tile of the Gluon kernel."""

GLUON_LINES = MAX_HEIGHT // 2
"""With more lines than this, the Gluon kernel is chosen. The Triton kernel then multiplies all
scores in both warpgroups, and the memory waits for it."""

COSTS = TileCosts(row=48, partial=1)
"""Beginning a row costs as much as three tiles, because its result alone is as large as several
tiles. ThunderMLA's cost model has 7.5 us per row, and 1.5 us per 32 tokens. A partial costs little,
because many programs share the merge. Not yet measured on a GPU."""


def config_of(lines: int, codes: bool, words: bool = False) -> KernelConfig:
    """Launch options for `lines` lines per sequence. They were checked by compiling ahead of time,
    and are not yet tuned on a GPU."""
    # A long row of 16 lines is split among all workers: 16 parts would leave most of them idle.
    columns = max(128, LATENT * lines // MAX_HEIGHT) if tuning().column_merge else LATENT
    columns = min(LATENT, triton.next_power_of_2(columns))
    if words:
        if lines <= 16:
            # Each warp reads the queries and its part of a tile from shared memory in each turn:
            # with eight warps in a program that takes longer than memory does.
            return KernelConfig(64, 4, 5, 2, 32, 1, columns)
        return KernelConfig(32, 8, 7, 1, 32, 1, columns)
    if codes or lines > MAX_HEIGHT:  # products or decoding limit it more than memory does
        return KernelConfig(32, 8, 8 if codes else 6, 1, 32, 1, columns)
    if lines > MAX_HEIGHT // 2:
        return KernelConfig(32, 8, 5, 1, 32, 1, columns)
    return KernelConfig(64, 8, 5, 1, 32, 1, columns)


@functools.cache
def gluon_found() -> bool:
    """Whether the Gluon kernel can be imported. Triton calls Gluon experimental, so that a version
    can change its names; the Triton kernel then takes all calls."""
    try:
        importlib.import_module("pd_kernels.attention.mla_gluon_kernel")
    except (ImportError, AttributeError) as error:
        logger.warning(
            "mla_decode takes its Triton kernel, which is slower above %d lines: its Gluon kernel "
            "does not know this version of Triton (%s)",
            GLUON_LINES,
            error,
        )
        return False
    return True


@dataclass(frozen=True, eq=False)
class MlaCall(DecodeCall):
    """The arguments of one call; see `mla_decode`.

    Attributes:
        query: `[batch, queries, heads, 576]`.
        cache: `[page, token, 576]`, or uint8 `[page, token, 656]`.
        kv_scale: the factor of an FP8 cache `[page, token, 576]`.
        tree: int32 `[batch, queries]`, which of the sequence's queries each query sees, a bit each; None: those before it,
            if the call is causal.
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
    kv_scale: float = 1.0
    tree: torch.Tensor | None = None

    @functools.cached_property
    def own_key(self) -> tuple[Any, ...]:
        tree = self.tree
        form = None if tree is None else (tree.shape, tree.stride(), tree.dtype, tree.device)
        return (*super().own_key, form)

    @property
    def drafts(self) -> int:
        """The number of queries that are drafts of a tree; 0 if they are none."""
        return 0 if self.tree is None else self.queries

    def constants(self, with_lse: bool) -> dict[str, Any]:
        made = super().constants(with_lse)
        return made if self.tree is None else {**made, "CAUSAL": False}

    @property
    def coded(self) -> bool:
        """Whether the cache is in FlashMLA's FP8 layout."""
        return bool(self.cache.dtype == torch.uint8)

    @property
    def codes(self) -> bool:
        """Whether the cache is FP8: in FlashMLA's layout, or with one scale."""
        return self.coded or bool(self.cache.dtype == FP8)

    @property
    def words(self) -> bool:
        """Whether the kernel reads FP8 codes as words of two, see `mla_codes`."""
        return self.codes and self.lines <= MAX_HEIGHT // 2

    @property
    def gluon(self) -> bool:
        """Whether the Gluon kernel takes the call. It does above GLUON_LINES if the GPU is a Hopper,
        Triton has Gluon, and the TMA can read the cache in tiles of 64 tokens."""
        preferred = tuning().gluon and self.lines > GLUON_LINES and self.pitch > 0
        return preferred and on_hopper(self.query.device) and gluon_found()

    @property
    def pitch(self) -> int:
        """Tokens from the start of a page to the start of the next page. 0 if the tokens of the
        cache do not lie on one grid, if a tile can leave its page, or for an FP8 cache."""
        page, token = self.cache.stride()[:2]
        whole = not self.codes and self.cache.shape[1] % GLUON_TILE == 0 and page % token == 0
        aligned = self.cache.data_ptr() % 16 == 0 and token % 8 == 0
        return page // token if whole and aligned else 0

    @property
    def height(self) -> int:
        """Lines of a row, padded. 64 for the Gluon kernel, which uses wgmma, and for an FP8 cache
        that is decoded to bfloat16. With fewer lines the compiler would not load FP8 codes
        asynchronously."""
        wide = self.gluon or (self.codes and not self.words)
        return MAX_HEIGHT if wide else super().height

    @property
    def config(self) -> KernelConfig:
        config = config_of(self.lines, self.codes, self.words)
        return config._replace(tile=GLUON_TILE) if self.gluon else config

    def check(self) -> None:
        dim = self.query.shape[3]
        if dim != LATENT + ROPE:
            raise ValueError(f"q of dim {dim}: must be {LATENT} of the latent and {ROPE} of RoPE")
        width = CODED_BYTES if self.coded else dim
        if self.cache.dim() != 3 or self.cache.shape[2] != width:
            raise ValueError(f"cache {list(self.cache.shape)}: must be [pages, page, {width}]")
        if not self.codes and self.cache.dtype not in PLAIN:
            raise ValueError(
                f"cache of {self.cache.dtype}: must be {self.query.dtype} as q, {FP8}, or torch.uint8 "
                f"in FlashMLA's FP8 layout, [pages, page, {CODED_BYTES}]"
            )
        if self.cache.dtype == FP8:
            expected: tuple[torch.dtype, ...] = PLAIN
        else:
            expected = (torch.bfloat16 if self.coded else self.cache.dtype,)
        if self.query.dtype not in expected:
            required = " or ".join(map(str, expected))
            raise ValueError(f"q of {self.query.dtype}: must be {required}, for this cache")
        self._check_tree()
        super().check()

    def _check_tree(self) -> None:
        if (tree := self.tree) is None:
            return
        required = self.query.shape[:2]
        form = tree.shape, tree.dtype, tree.device, tree.is_contiguous()
        if form != (required, torch.int32, self.query.device, True):
            raise ValueError(
                f"tree of {tree.dtype} {list(tree.shape)} on {tree.device}: must be dense int32 {list(required)} on "
                f"{self.query.device}, a word of each query"
            )
        if not self.causal:
            raise ValueError(
                "tree with causal=False: must be causal, because a tree says what the queries see of each other"
            )

    def check_kernel(self) -> None:
        super().check_kernel()
        strides = self.cache.stride()[:2]
        if self.codes and (any(each % 16 for each in strides) or self.cache.data_ptr() % 16):
            raise ValueError(
                f"cache: pages and tokens {strides} bytes apart, must be aligned to 16 bytes"
            )
