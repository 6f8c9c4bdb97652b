# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels with CPU tensors that have the right shapes and no contents: to compile
what a GPU would run."""

from typing import Any, NamedTuple

import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.attention.mla import launch_mla
from pd_kernels.attention.mla_call import CODED_BYTES, MlaCall
from pd_kernels.attention.mla_gluon import launch_mla_gluon
from pd_kernels.attention.paged_call import FP8, PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.transfer import Planes, Stored, new_sums
from pd_kernels.transfer.chunk_launch import ChunkLaunch

BF16 = torch.bfloat16
DEVICE = torch.device("cpu")


def cache(heads: int, dims: tuple[int, ...], dtype: torch.dtype, odd: bool) -> list[torch.Tensor]:
    """One layer's K and V (or latent), side by side in pages of 16 tokens, head by head.

    `odd` makes rows that are not aligned."""
    width = sum(dims) + odd
    whole = torch.zeros(8 * heads * 16 * width).to(dtype).view(8, heads, 16, width)
    return list(whole[..., : sum(dims)].split(dims, dim=3))


def chunk(
    codec: str,
    source: torch.dtype,
    destination: torch.dtype,
    gather: bool,
    check: bool = False,
    heads: int = 8,
    dims: tuple[int, ...] = (128, 128),
    odd: bool = False,
) -> ChunkLaunch:
    """A chunk of 100 tokens of one layer. `check` asks for its sums."""
    key, *value = cache(heads, dims, source if gather else destination, odd)
    stored, needed = (
        Stored(dtype, (0.3,) * len(dims) if dtype == FP8 else ()) for dtype in (source, destination)
    )
    planes = Planes.of([key], value, 16, codec, stored, needed)
    nbytes = planes.nbytes(100)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    sums = new_sums(nbytes, slot.device) if check else None
    return ChunkLaunch(planes, torch.arange(8, dtype=torch.int32), slot, 5, 100, sums)


class Launched(NamedTuple):
    """What a launch was made for: bytes of one tile, and programs on a multiprocessor."""

    tile: int
    programs: int


def plan_of(batch: DecodeCall, workers: int) -> DecodePlan:
    """A plan for two sequences."""
    return DecodePlan.of(
        *(batch.rows, batch.costs, 2, workers, batch.height, batch.width, DEVICE), batch.paired
    )


class _Swapped(PagedCall):
    """A call that takes the loop with swapped operands, which a CPU tensor does not."""

    swapped = True


def paged_call(
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    page: int = 16,
    queries: int = 1,
    dtype: torch.dtype = BF16,
    window: int = 0,
    listed: bool = False,
    jagged: bool = False,
    swapped: bool = False,
    value_dim: int = 0,
    sinks: bool = False,
    by_head: bool = False,
    **mods: Any,
) -> Launched:
    """Launch `paged_decode`. `listed` takes tiles from a mask's list, `jagged` a nested batch,
    `swapped` multiplies as on Hopper; values have `value_dim` elements, by default `dim`; `by_head`: each KV head has
    scales."""
    value_dim = value_dim or dim
    kv = torch.zeros(4, page, kv_heads, dim + value_dim).to(dtype)
    query = torch.zeros(2, queries, heads, dim, dtype=BF16)
    if jagged:
        query = query.flatten(0, 1).unsqueeze(1)
    table = torch.zeros(2, 64, dtype=torch.int32)
    lengths = torch.ones(2, dtype=torch.int32)
    batch = (_Swapped if swapped else PagedCall)(
        *(query, kv[..., :dim], kv[..., dim:], table, lengths, 0.1, 1.0, 1.0, True, window),
        *(mods.get("score"), mods.get("mask")),
        starts=torch.zeros(3, dtype=torch.int64) if jagged else None,
        most_queries=queries if jagged else 0,
        sinks=torch.zeros(heads, dtype=BF16) if sinks else None,
        head_scales=(torch.zeros(kv_heads), torch.zeros(kv_heads)) if by_head else None,
    )
    plan = batch.plan() if listed else plan_of(batch, 264)
    lse = torch.zeros(query.shape[:3])
    launch_paged(batch, query.new_zeros(*query.shape[:3], value_dim), lse, plan.tensors)
    tile = batch.config.tile * (dim + value_dim) * dtype.itemsize
    return Launched(tile, batch.config.programs)


class _OnHopper(MlaCall):
    """A call that takes the Gluon kernel, which a CPU tensor does not."""

    gluon = True


def mla_call(
    heads: int,
    queries: int = 1,
    page: int = 64,
    coded: bool = False,
    gluon: bool = False,
    dtype: torch.dtype = BF16,
    tree: bool = False,
) -> Launched:
    """Launch `mla_decode` with latents of `dtype`; `coded` in FlashMLA's FP8 layout, `gluon` with the Gluon kernel; `tree`: queries
    are drafts of a tree."""
    latents = torch.zeros(4, page, 576).to(dtype)
    if coded:
        latents = torch.zeros(4, page, CODED_BYTES, dtype=torch.uint8)
    query = torch.zeros(2, queries, heads, 576, dtype=BF16)
    table = torch.zeros(2, 64, dtype=torch.int32)
    arguments = (query, latents, table, torch.ones(2, dtype=torch.int32), 0.1, True)
    words = torch.ones(2, queries, dtype=torch.int32) if tree else None
    batch = (_OnHopper if gluon else MlaCall)(*arguments, tree=words)
    plan = plan_of(batch, 132)
    out, lse = torch.zeros(2, queries, heads, 512, dtype=BF16), torch.zeros(2, queries, heads)
    (launch_mla_gluon if gluon else launch_mla)(batch, out, lse, plan.tensors)
    # Scales are not read 16 bytes at a time.
    width = 640 if coded else 576 * dtype.itemsize
    return Launched(batch.config.tile * width, batch.config.programs)
