# SPDX-License-Identifier: Apache-2.0
"""Batches for decode kernels: lengths that occur in serving, caches with shuffled pages."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from pd_kernels.attention.mla_call import CODED_BYTES, LATENT, ROPE

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn
RAGGED = [4641, 45118, 1730, 1696]
"""Lengths of one of ThunderMLA's batches."""


def _lognormal(chance: random.Random) -> list[int]:
    return [max(1, min(131_072, round(chance.lognormvariate(7.8, 1.0)))) for _ in range(64)]


def _zipf(chance: random.Random) -> list[int]:
    lengths = [max(16, 65_536 // rank) for rank in range(1, 65)]
    chance.shuffle(lengths)
    return lengths


LENGTHS: dict[str, Callable[[random.Random], list[int]]] = {
    "uniform 16 x 4k": lambda _: [4_096] * 16,
    "uniform 64 x 4k": lambda _: [4_096] * 64,
    "uniform 256 x 2k": lambda _: [2_048] * 256,
    "one 64k": lambda _: [65_536],
    "lognormal": _lognormal,
    "Zipf": _zipf,
    "ragged 4": lambda _: list(RAGGED),
    "128k + 63 x 1k": lambda _: [131_072] + [1_024] * 63,
    "64, to 512": lambda chance: [chance.randint(1, 512) for _ in range(64)],
}
MLA_CASES: dict[str, tuple[list[int], int, int]] = {
    "ragged 4, 4 queries": (RAGGED, 16, 4),
    "one 64k": ([65_536], 16, 1),
    "64 x 256-1024, 4 queries": ([256 + 12 * i for i in range(64)], 16, 4),
    "64 x 512, 2 queries": ([512] * 64, 16, 2),
    "132 x 4k, 4 queries": ([4_096] * 132, 16, 4),
    "128 x 4k, 128 heads": ([4_096] * 128, 128, 1),
    "128 x 8k, 128 heads, 2 queries": ([8_192] * 128, 128, 2),
}
"""Lengths, heads, queries. The first five come from ThunderMLA, the last two from FlashMLA."""


class Heads(NamedTuple):
    """Query heads and KV heads of a model, and their dim."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} x {self.dim}"


class PagedSet(NamedTuple):
    """Arguments of `paged_decode`, in its order."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


class LatentSet(NamedTuple):
    """Arguments of `mla_decode`, in its order."""

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def page_table(lengths: list[int], page: int) -> tuple[torch.Tensor, int]:
    """A block table of shuffled pages, int32 `[batch, pages]`, and the number of pages."""
    counts = [-(-length // page) for length in lengths]
    total = sum(counts)
    ids = torch.randperm(max(total, 1)).int()
    table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    done = 0
    for row, count in enumerate(counts):
        table[row, :count] = ids[done : done + count]
        done += count
    return table.to(DEVICE), max(total, 1)


def paged_set(
    lengths: list[int], heads: Heads, page: int, cache: torch.dtype, queries: int = 1
) -> PagedSet:
    """Make bfloat16 queries and a cache `[page, head, token, K and V]`."""
    table, pages = page_table(lengths, page)
    both = torch.randn(
        pages, heads.kv, page, 2 * heads.dim, dtype=torch.bfloat16, device=DEVICE
    ).to(cache)
    query = torch.randn(
        len(lengths), queries, heads.query, heads.dim, dtype=torch.bfloat16, device=DEVICE
    )
    keys, values = both.transpose(1, 2).split(heads.dim, dim=3)
    number = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return PagedSet(query, keys, values, table, number)


def latent_set(
    lengths: list[int], heads: int, queries: int, page: int = 64, coded: bool = False
) -> LatentSet:
    """Make bfloat16 queries and a cache of latents, in bfloat16 or in FlashMLA's FP8 layout
    (`coded`)."""
    table, pages = page_table(lengths, page)
    cache = torch.randn(pages, page, LATENT + ROPE, dtype=torch.bfloat16, device=DEVICE)
    if coded:
        cache = coded_latents(cache)
    query = torch.randn(
        len(lengths), queries, heads, LATENT + ROPE, dtype=torch.bfloat16, device=DEVICE
    )
    number = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return LatentSet(query, cache, table, number)


def coded_latents(latents: torch.Tensor) -> torch.Tensor:
    """Code bfloat16 `[..., 576]` in FlashMLA's FP8 layout, uint8 `[..., 656]`."""
    groups = latents[..., :LATENT].float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1).clamp_min(1e-12) / 448
    codes = (groups / scales[..., None]).to(FP8).flatten(-2)
    parts = (codes, scales, latents[..., LATENT:].contiguous())
    coded = torch.cat([part.view(torch.uint8) for part in parts], -1)
    assert coded.shape[-1] == CODED_BYTES
    return coded
