# SPDX-License-Identifier: Apache-2.0
"""A rank's cache as planes of the kernels, and what pd_connector makes of the same chunk on CPU."""

import random

import torch
from support.caches import Rank

from pd_connector.kv.geometry import Group
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_kernels.transfer import Planes, Stored
from pd_kernels.transfer.chunk_launch import ChunkLaunch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def stored(group: Group, layers: tuple[int, ...]) -> Stored:
    """How a group's layers are stored, K and V in turn."""
    parts = 2 if group.value_dim else 1
    scales = tuple(scale for layer in layers for scale in group.scale(layer)[:parts])
    dtype = DTYPES[group.dtype]
    return Stored(dtype, scales if dtype == torch.float8_e4m3fn else ())


def side(rank: Rank, route: Route, planned: Chunk, gather: bool) -> tuple[Planes, list[int]]:
    """The planes of a chunk in one rank's cache, and the engine's pages that hold it."""
    group = route.source if gather else route.destination
    first = route.source_head if gather else route.destination_head
    heads = range(first, first + len(route.heads))
    layers = planned.layers(route)
    views = [rank.views[layer] for layer in layers]
    pages = rank.pages(group, planned.pages(group.page_size))
    if planned.verbatim:
        planes = [plane for view in views for plane in view.planes]
        whole = planes[0].shape[1] == 1
        rows = planes if whole else [plane[:, heads.start : heads.stop] for plane in planes]
        return Planes.of_rows(rows, group.page_size // views[0].key.shape[2]), pages
    planes = Planes.of(
        [view.key for view in views],
        [view.value for view in views] if group.value_dim else [],
        group.page_size,
        route.codec,
        stored(route.source, layers),
        stored(route.destination, layers),
        heads,
    )
    return planes, pages


def chunk_of(
    planes: Planes,
    pages: list[int],
    route: Route,
    planned: Chunk,
    slot: torch.Tensor,
    gather: bool,
    sums: torch.Tensor | None = None,
) -> ChunkLaunch:
    """The arguments with which kernels are called for a planned chunk."""
    group = route.source if gather else route.destination
    table = torch.tensor(pages, dtype=torch.int32)
    if planned.verbatim:
        return ChunkLaunch(planes, table, slot, 0, len(pages) * planes.page_size, sums)
    return ChunkLaunch(
        planes, table, slot, planned.first_token % group.page_size, planned.tokens, sums
    )


def sloppy(seed: int, count: int) -> torch.Tensor:
    """A slot that is full of something else."""
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)), dtype=torch.uint8)
