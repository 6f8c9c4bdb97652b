# SPDX-License-Identifier: Apache-2.0
"""The kernels on a GPU against their references in torch, on random shapes."""

import random
from collections.abc import Callable

import torch

from pd_bench.kernels.caches import (
    ORDERS,
    PAGED,
    POOLS,
    RESHARD,
    CacheViews,
    Model,
    make_cache,
)
from pd_bench.kernels.random_cases import Problems, problems
from pd_kernels.transfer import (
    PayloadShape,
    Planes,
    Resharding,
    Stored,
    finish,
    new_sums,
)
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather, reference_gather
from pd_kernels.transfer.reshard import launch_reshard, reference_reshard
from pd_kernels.transfer.scatter import launch_scatter, reference_scatter

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = "cuda"
TOKENS = (1, 17, 128, 511, 1_000, 9_000)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def check_transfer(cases: int, seed: int) -> Problems:
    """Check the transfer kernels on random chunks, and return a line for each failed case, by what
    is measured."""
    checks = ((PAGED, cases, _paged), (PAGED, 4, _verbatim), (RESHARD, 12, _resharded))
    return problems(checks, seed)


def _verbatim(chance: random.Random) -> str:
    """Gather some heads of whole pages, and scatter them back."""
    rows = [
        torch.randint(0, 256, (40, 8, 1024 * chance.choice([1, 9])), dtype=torch.uint8).to(DEVICE)
    ] * 2
    pages = torch.tensor(chance.sample(range(20), 7), dtype=torch.int32, device=DEVICE)
    planes = Planes.of_rows([row[:, 2:5] for row in rows], 2)
    nbytes = planes.nbytes(14)
    slots = [torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    sums = [new_sums(nbytes, slots[0].device) for _ in range(3)]
    reference_gather(ChunkLaunch(planes, pages, slots[0], 0, 14, sums[0]))
    launch_gather(ChunkLaunch(planes, pages, slots[1], 0, 14, sums[1]))
    actual = torch.zeros_like(rows[0])
    into = Planes.of_rows([actual[:, 2:5]], 2)
    half = slots[0][: into.nbytes(14)]
    launch_scatter(ChunkLaunch(into, pages, half, 0, 14, None))
    places = [int(page) * 2 + part for page in pages for part in range(2)]
    expected = torch.zeros_like(actual)
    expected[places, 2:5] = rows[0][places, 2:5]
    same = torch.equal(*slots) and torch.equal(actual, expected)
    return "" if same and torch.equal(sums[0].sum(), sums[1].sum()) else "whole pages differ"


def _paged(chance: random.Random) -> str:
    """Gather a chunk, and scatter its payload into a cache of another layout."""
    latent = chance.random() < 0.2
    dims = (576, 0) if latent else chance.choice([(128, 128), (64, 64), (80, 80), (192, 128)])
    heads = 1 if latent else chance.choice([1, 2, 3, 8])
    model = Model("random", chance.choice([1, 2, 5]), heads, *dims)
    source, destination = (chance.choice([*FLOATS[:2], *FLOATS, FP8]) for _ in range(2))
    codec = "raw" if source == FP8 else chance.choice(["raw", "fp8_e4m3", "int8"])
    tokens, first = chance.choice(TOKENS), chance.choice([0, 0, 5])
    planes = len(dims) * model.layers if dims[1] else model.layers
    ours_stored, their_stored = (
        Stored(dtype, tuple(chance.choice([1.0, 0.25, 0.3]) for _ in range(planes)))
        if dtype == FP8
        else Stored(dtype)
        for dtype in (source, destination)
    )
    shown = f"{model} {codec} {source} to {destination}, tokens {first}+{tokens}"
    ours, pages = _side(chance, model, source, first + tokens)
    theirs, their_pages = _side(chance, model, destination, first + tokens)
    coded = Planes.of(ours.keys, ours.values, pages[1], codec, ours_stored, their_stored)
    nbytes = coded.nbytes(tokens)

    def gathered(launch: Callable[[ChunkLaunch], None]) -> tuple[torch.Tensor, bytes]:
        slot = torch.full((nbytes + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
        sums = new_sums(nbytes, slot.device)
        launch(ChunkLaunch(coded, pages[0], slot, first, tokens, sums))
        return slot, finish(sums, nbytes)

    expected, digest = gathered(reference_gather)
    slot, actual = gathered(launch_gather)
    if not torch.equal(slot, expected):
        return f"{shown}: {int((slot != expected).sum())} bytes of the payload differ"
    if actual != digest:
        return f"{shown}: sums of the gather differ"

    def scattered(launch: Callable[[ChunkLaunch], None]) -> tuple[CacheViews, bytes]:
        cache = theirs.clone()
        into = Planes.of(cache.keys, cache.values, their_pages[1], codec, ours_stored, their_stored)
        sums = new_sums(nbytes, expected.device)
        launch(ChunkLaunch(into, their_pages[0], expected, first, tokens, sums))
        return cache, finish(sums, nbytes)

    by_torch, digest_of_torch = scattered(reference_scatter)
    by_kernel, digest_of_kernel = scattered(launch_scatter)
    for x, y in zip(by_torch.storages, by_kernel.storages, strict=True):
        if not torch.equal(x.view(BITS[x.element_size()]), y.view(BITS[y.element_size()])):
            return f"{shown}: pages differ"
    if not digest == digest_of_torch == digest_of_kernel:
        return f"{shown}: sums of the scatter differ"
    return ""


def _side(
    chance: random.Random, model: Model, dtype: torch.dtype, tokens: int
) -> tuple[CacheViews, tuple[torch.Tensor, int]]:
    """A cache, and the pages of one prompt with their size."""
    page_size = chance.choice([16, 32, 64, 128])
    pages = -(-tokens // page_size)
    cache = make_cache(model, pages + 3, page_size, chance.choice([*ORDERS, POOLS]), dtype, DEVICE)
    table = chance.sample(range(pages + 3), pages)
    return cache, (torch.tensor(table, dtype=torch.int32, device=DEVICE), page_size)


def _resharded(chance: random.Random) -> str:
    payload = PayloadShape(
        chance.choice(["raw", "fp8_e4m3", "int8"]),
        chance.choice([4, 8]),
        chance.choice([1, 3]),
        chance.choice(TOKENS),
        *chance.choice([(128, 128), (80, 80), (576, 0)]),
        2,
    )
    counts = chance.choice([1, 2, 4, 8]), chance.choice([1, 2, 4, 8])
    sources = [
        torch.randint(0, 256, (payload.nbytes(counts[0]),), dtype=torch.uint8, device=DEVICE)
        for _ in range(counts[0])
    ]
    problems = []
    for launch in (reference_reshard, launch_reshard):
        room = payload.nbytes(counts[1]) + 64
        slabs = [
            torch.full((room,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(counts[1])
        ]
        launch(Resharding.of(sources, slabs, payload))
        problems.append(torch.stack(slabs))
    return "" if torch.equal(*problems) else f"{payload} {counts[0]} to {counts[1]} ranks"
