# SPDX-License-Identifier: Apache-2.0
"""Where elements come from and go to, in every layout, told element by element; and what is
refused."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_caches import sloppy

from pd_bench.kernels.caches import ORDERS, POOLS, CacheViews, Model, make_cache
from pd_kernels.transfer import (
    Planes,
    Stored,
    finish,
    gather,
    gather_pages,
    new_sums,
    scatter,
    scatter_pages,
)
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather
from pd_kernels.transfer.scatter import launch_scatter

MODEL = Model("small", layers=2, heads=3, key_dim=32, value_dim=16)
LATENT = Model("latent", layers=2, heads=1, key_dim=48, value_dim=0)
BF16 = Stored(torch.bfloat16)
PAGES, FIRST, TOKENS = [5, 0, 3], 7, 39


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def elements(
    model: Model, cache: CacheViews, order: str, page_size: int
) -> Iterator[tuple[tuple[int, int, int, bool], torch.Tensor]]:
    """Every token of every head: layer, head, token of the prompt, whether V; and its elements,
    found by the order's own arithmetic."""
    width = model.key_dim + model.value_dim
    extents = {"L": model.layers, "B": 6, "H": model.heads, "N": page_size, "C": width}
    parts = (False, True) if model.value_dim else (False,)
    every = itertools.product(range(model.layers), range(model.heads), range(TOKENS), parts)
    for layer, head, token, v in every:
        page, within = PAGES[(FIRST + token) // page_size], (FIRST + token) % page_size
        dims = model.value_dim if v else model.key_dim
        if order == POOLS:
            storage = cache.storages[layer + v * model.layers].flatten()
            start = ((page * page_size + within) * model.heads + head) * dims
        else:
            storage, start = cache.storages[0].flatten(), 0
            index = {"L": layer, "B": page, "H": head, "N": within, "C": v * model.key_dim}
            for axis in order:
                start = start * extents[axis] + index[axis]
        yield (layer, head, token, v), storage[start : start + dims]


def chunk(
    cache: CacheViews, slot: torch.Tensor, pages: list[int], heads: range | None = None
) -> ChunkLaunch:
    planes = Planes.of(cache.keys, cache.values, 16, "raw", BF16, BF16, heads)
    return ChunkLaunch(planes, torch.tensor(pages, dtype=torch.int32), slot, FIRST, TOKENS, None)


def slot_of(model: Model, heads: int) -> torch.Tensor:
    return sloppy(2, model.bytes_of(TOKENS, 2) // model.heads * heads)


@pytest.mark.parametrize("order", [*ORDERS, POOLS])
@pytest.mark.parametrize("model", [MODEL, LATENT], ids=lambda model: model.name)
def test_every_layout_gives_the_wire_order_and_takes_it(model: Model, order: str) -> None:
    torch.manual_seed(1)
    ours = make_cache(model, 6, 16, order, torch.bfloat16, "cpu")
    slot = slot_of(model, model.heads)
    launch_gather(chunk(ours, slot, PAGES))
    dims = model.key_dim + model.value_dim
    layer_size = model.heads * TOKENS * dims
    payload = slot.view(torch.bfloat16)
    known = {}
    for (layer, head, token, v), stored in elements(model, ours, order, 16):
        width = model.value_dim if v else model.key_dim
        start = layer * layer_size + v * model.heads * TOKENS * model.key_dim
        start += (head * TOKENS + token) * width
        assert torch.equal(bits(payload[start : start + width]), bits(stored))
        known[layer, head, token, v] = stored

    theirs = make_cache(model, 6, 16, order, torch.bfloat16, "cpu")
    before = theirs.clone()
    launch_scatter(chunk(theirs, slot, PAGES))
    for key, stored in elements(model, theirs, order, 16):
        assert torch.equal(bits(stored), bits(known[key]))
        stored.copy_(torch.zeros_like(stored))
    for _, stored in elements(model, before, order, 16):
        stored.copy_(torch.zeros_like(stored))
    for mine, other in zip(theirs.storages, before.storages, strict=True):
        assert torch.equal(bits(mine), bits(other)), "nothing but the chunk's tokens is written"


def test_some_heads_are_those_of_the_views() -> None:
    cache = make_cache(MODEL, 6, 16, "LBNHC", torch.bfloat16, "cpu")
    some, every = slot_of(MODEL, 2), slot_of(MODEL, 3)
    launch_gather(chunk(cache, some, PAGES, range(1, 3)))
    launch_gather(chunk(cache, every, PAGES))
    run = TOKENS * MODEL.key_dim * 2
    assert torch.equal(some[: 2 * run], every[run : 3 * run])


def wrong_pages(cache: CacheViews, slot: torch.Tensor) -> ChunkLaunch:
    return chunk(cache, slot, [PAGES[0], PAGES[2], PAGES[1]])


def wrong_heads(cache: CacheViews, slot: torch.Tensor) -> ChunkLaunch:
    flipped = CacheViews([x.flip(1) for x in cache.keys], [x.flip(1) for x in cache.values], [])
    return chunk(flipped, slot, PAGES)


def wrong_first_token(cache: CacheViews, slot: torch.Tensor) -> ChunkLaunch:
    right = chunk(cache, slot, PAGES)
    return ChunkLaunch(right.planes, right.pages, slot, FIRST + 1, TOKENS, None)


@pytest.mark.parametrize("wrong", [wrong_pages, wrong_heads, wrong_first_token])
def test_a_gather_that_goes_wrong_is_seen_by_comparing_payloads(
    wrong: Callable[[CacheViews, torch.Tensor], ChunkLaunch],
) -> None:
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    right, other = slot_of(MODEL, 3), slot_of(MODEL, 3)
    launch_gather(chunk(cache, right, PAGES))
    launch_gather(wrong(cache, other))
    assert not torch.equal(right, other)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8"])
def test_a_damaged_scale_changes_what_is_decoded_and_the_sums(codec: str) -> None:
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    planes = Planes.of(cache.keys, cache.values, 16, codec, BF16, BF16)
    nbytes, pages = planes.nbytes(TOKENS), torch.tensor(PAGES, dtype=torch.int32)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    launch_gather(ChunkLaunch(planes, pages, slot, FIRST, TOKENS, None))
    outcomes = []
    for damage in (0, 1):
        slot[3] ^= damage
        sums = new_sums(nbytes, slot.device)
        copy = cache.clone()
        into = Planes.of(copy.keys, copy.values, 16, codec, BF16, BF16)
        launch_scatter(ChunkLaunch(into, pages, slot, FIRST, TOKENS, sums))
        outcomes.append((copy.storages[0], finish(sums, nbytes)))
    (pages_of_right, digest), (pages_of_wrong, other) = outcomes
    assert digest != other
    assert not torch.equal(bits(pages_of_right), bits(pages_of_wrong))


@pytest.mark.parametrize("spread", [1.0, 2.0**-20, 2.0**10])
def test_what_was_fp8_before_passes_unchanged_through_powers_of_two(spread: float) -> None:
    """Between float caches that hold what an FP8 cache held."""
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    whole = cache.storages[0]
    whole.copy_((whole.float() * 16).to(torch.float8_e4m3fn).float() * spread)
    before = cache.clone()
    planes = Planes.of(cache.keys, cache.values, 16, "fp8_e4m3", BF16, BF16)
    slot = torch.zeros(planes.nbytes(TOKENS), dtype=torch.uint8)
    there = ChunkLaunch(planes, torch.tensor(PAGES, dtype=torch.int32), slot, FIRST, TOKENS, None)
    launch_gather(there)
    for _, stored in elements(MODEL, cache, "LBHNC", 16):
        stored.zero_()
    launch_scatter(there)
    assert torch.equal(bits(whole), bits(before.storages[0]))


def test_cpu_tensors_take_the_reference_and_operators_pass_torchs_own_checks() -> None:
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    planes = Planes.of(cache.keys, cache.values, 16, "int8", BF16, BF16)
    nbytes, pages = planes.nbytes(TOKENS), torch.tensor(PAGES, dtype=torch.int32)
    slot, by_kernel = (sloppy(seed, nbytes) for seed in (1, 2))
    gather_pages(planes, pages, slot, FIRST, TOKENS)
    launch_gather(ChunkLaunch(planes, pages, by_kernel, FIRST, TOKENS, None))
    assert torch.equal(slot, by_kernel)
    scatter_pages(planes, pages, slot, FIRST, TOKENS)
    args = (
        *(list(planes.views), planes.factors, pages, slot, None, planes.parts),
        *(planes.page_size, FIRST, TOKENS, planes.codec, planes.source, planes.destination),
        planes.step,
    )
    for operator in (gather._gather, scatter._scatter):
        torch.library.opcheck(
            operator.registered, args, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("dim", "codec", "theirs", "whole"),
    [
        (8, "raw", torch.bfloat16, True),
        (4, "raw", torch.bfloat16, False),
        (8, "raw", torch.float16, False),
        (24, "int8", torch.bfloat16, False),
        (80, "int8", torch.bfloat16, True),
        (24, "fp8_e4m3", torch.float8_e4m3fn, False),
    ],
)
def test_rows_of_whole_sections_only_are_for_kernels(
    dim: int, codec: str, theirs: torch.dtype, whole: bool
) -> None:
    cache = make_cache(Model("one", 1, 1, dim, dim), 2, 16, "LBHNC", torch.bfloat16, "cpu")
    planes = Planes.of(cache.keys, cache.values, 16, codec, BF16, Stored(theirs))
    pages, slot = torch.zeros(1, dtype=torch.int32), torch.empty(0)
    assert ChunkLaunch(planes, pages, slot, 0, 1, None).whole_sections is whole


def test_what_cannot_be_is_refused_before_anything_is_written() -> None:
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    planes = Planes.of(cache.keys, cache.values, 16, "raw", BF16, BF16)
    nbytes, pages = planes.nbytes(TOKENS), torch.tensor(PAGES, dtype=torch.int32)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    calls: list[tuple[str, tuple[object, ...]]] = [
        (f"slot of {nbytes - 1} bytes: the chunk has {nbytes}", (pages, slot[1:], FIRST, TOKENS)),
        ("tokens 10-49.*3 pages of 16", (pages, slot, 10, TOKENS)),
        ("tokens -1-", (pages, slot, -1, TOKENS)),
        ("pages of torch.int64", (pages.long(), slot, FIRST, TOKENS)),
        ("slot of torch.int8", (pages, slot.view(torch.int8), FIRST, TOKENS)),
        ("sums: too few", (pages, slot, FIRST, TOKENS, torch.zeros(9, dtype=torch.int64))),
    ]
    for told, args in calls:
        for call in (gather_pages, scatter_pages):
            with pytest.raises(ValueError, match=told):
                call(planes, *args)  # type: ignore[arg-type]
    assert not slot.any()


def test_planes_that_do_not_belong_together_are_refused() -> None:
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    fp8 = Stored(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"zstd.*raw, fp8_e4m3, int8"):
        Planes.of(cache.keys, cache.values, 16, "zstd", BF16, BF16)
    with pytest.raises(ValueError, match="use raw"):
        Planes.of(cache.keys, cache.values, 16, "int8", fp8, BF16)
    with pytest.raises(ValueError, match="K of 2 layers and V of 1"):
        Planes.of(cache.keys, cache.values[:1], 16, "raw", BF16, BF16)
    narrow = [cache.keys[0], cache.keys[1][..., :16]]
    with pytest.raises(ValueError, match="dim 32"):
        Planes.of(narrow, cache.values, 16, "raw", BF16, BF16)
    Planes.of(cache.keys, [each[..., :8] for each in cache.values], 16, "raw", BF16, BF16)
    with pytest.raises(ValueError, match="divide the page size 24"):
        Planes.of(cache.keys, cache.values, 24, "raw", BF16, BF16)
    with pytest.raises(ValueError, match="one side's cache"):
        Planes.of(cache.keys, cache.values, 16, "raw", fp8, fp8)
    with pytest.raises(ValueError, match="3 scales of the destination: wanted 4"):
        Planes.of(cache.keys, cache.values, 16, "raw", BF16, Stored(fp8.dtype, (1.0,) * 3))
