# SPDX-License-Identifier: Apache-2.0
"""SGLang's own pools, as the door describes them: every token comes where it belongs."""

import random
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Shard, pages_for
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes
from pd_connector.sglang.cache import describe_cache, own_shard

LAYERS, HEADS, DIM, VALUE_DIM = 3, 4, 8, 8
NAMED = {number: {HEADS} for number in range(8)}
SLOTS = 128
TOKENS = 45


def full_attention(page_size: int, heads: int = HEADS, **options: Any) -> MHATokenToKVPool:
    """A pool full of noise."""
    settings = {"dtype": torch.bfloat16, "start_layer": 0} | options
    pool = MHATokenToKVPool(
        size=SLOTS,
        page_size=page_size,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=VALUE_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        **settings,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape).to(pool.dtype).view(buffer.dtype))
    return pool


def latents(page_size: int) -> MLATokenToKVPool:
    pool = MLATokenToKVPool(
        size=SLOTS,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
    )
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


SLIDING_WINDOW = 20
WINDOWED, FULL = [0, 2], [1]


def with_windows(page_size: int, *, shift: int = 16, heads: int = HEADS) -> SWAKVPool:
    """A pool in which layers 0 and 2 have a sliding window, full of noise. Their slot is that of the
    other layers, plus `shift`."""
    pool = SWAKVPool(
        size=SLOTS,
        size_swa=2 * SLOTS,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=VALUE_DIM,
        swa_attention_layer_ids=WINDOWED,
        full_attention_layer_ids=FULL,
        device="cpu",
    )
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
    pool.register_mapping(torch.arange(SLOTS + page_size) + shift)
    return pool


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    """Slots of a prompt's tokens, as SGLang numbers them."""
    return torch.tensor([page * page_size + n for page in pages for n in range(page_size)])[:TOKENS]


def moved(source: Any, destination: Any, ranks: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Move a prompt between two pools; returns whether it passed as whole pages."""
    pools, caches, pages = (source, destination), [], []
    for pool, (rank, size) in zip(pools, ranks, strict=True):
        caches.append(describe_cache(pool, NAMED, own_shard(pool, rank, size)))
        known = range(1, SLOTS // pool.page_size + 1)  # page 0 is nobody's
        pages.append(random.Random(7).sample(known, pages_for(TOKENS, pool.page_size)))
    found = routes(caches[0].geometry, caches[1].geometry, ("raw",), ("raw",))
    for chunk in plan(found, 0, TOKENS, 1 << 20):
        route = found[chunk.route]
        spans = [chunk.pages(g.page_size) for g in (route.source, route.destination)]
        here, there = ([p[n] for n in s] for p, s in zip(pages, spans, strict=True))
        slot = memoryview(bytearray(chunk.nbytes(route)))
        payload = caches[0].gather(route, chunk, here, slot)
        caches[1].scatter(route, chunk, there, payload)
    sent, got = (slots_of(p, pool.page_size) for p, pool in zip(pages, pools, strict=True))
    for route in found:
        mine = slice(route.source_head, route.source_head + len(route.heads))
        theirs = slice(route.destination_head, route.destination_head + len(route.heads))
        for layer in range(LAYERS):
            for ours, other in zip(
                _buffers(source, layer), _buffers(destination, layer), strict=True
            ):
                assert torch.equal(ours[sent, mine], other[got, theirs])
    return any(route.verbatim for route in found)


def _buffers(pool: Any, layer: int) -> list[torch.Tensor]:
    if isinstance(pool, MLATokenToKVPool):
        return [pool.kv_buffer[layer]]
    return [pool.k_buffer[layer], pool.v_buffer[layer]]


@pytest.mark.parametrize("there", [1, 16, 64])
@pytest.mark.parametrize("here", [1, 16, 64])
def test_tokens_pass_between_pages_of_any_size(here: int, there: int) -> None:
    whole = (0, 1), (0, 1)
    assert moved(full_attention(here), full_attention(there), whole) == (here == there)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_rank_of_two_gets_its_heads_out_of_all(page_size: int, rank: int) -> None:
    """Heads of a page of one token lie apart: then whole pages pass even here."""
    verbatim = moved(
        full_attention(page_size), full_attention(page_size, HEADS // 2), ((0, 1), (rank, 2))
    )
    assert verbatim == (page_size == 1)


@pytest.mark.parametrize(("here", "there"), [(1, 64), (16, 16), (64, 1)])
def test_latents_pass_too(here: int, there: int) -> None:
    moved(latents(here), latents(there), ((0, 1), (0, 1)))


def test_a_stage_of_a_pipeline_is_counted_as_in_the_whole_model() -> None:
    """SGLang's `end_layer` may be inclusive or not."""
    pool = full_attention(16, start_layer=5)
    assert own_shard(pool, 1, 2) == Shard(5, 5 + LAYERS, 1, 2)
    (group,) = describe_cache(pool, NAMED, Shard(5, 5 + LAYERS, 0, 1)).geometry.groups
    assert group.layers == (5, 6, 7)


def test_layers_with_a_window_have_a_page_table_of_their_own() -> None:
    pool = with_windows(16)
    shard = own_shard(pool, 0, 1)
    assert shard == Shard(0, LAYERS, 0, 1)
    cache = describe_cache(pool, NAMED, shard, sliding_window=SLIDING_WINDOW)
    found = {g.layers: (g.table, g.window, g.heads) for g in cache.geometry.groups}
    assert found == {(1,): (0, 0, HEADS), (0, 2): (1, SLIDING_WINDOW + 1, HEADS)}
    with pytest.raises(UnsupportedGeometryError, match="without a sliding window"):
        describe_cache(pool, NAMED, shard)


def test_layers_with_a_window_have_heads_of_their_own() -> None:
    """MiMo-V2: at eight ranks each holds one head of a full layer, which has four, and one of a window's eight."""
    pool = with_windows(16, heads=1)
    named = {1: {4}, 0: {8}, 2: {8}}
    cache = describe_cache(pool, named, Shard(0, LAYERS, 5, 8), sliding_window=SLIDING_WINDOW)
    found = {g.layers: (g.heads, cache.geometry.heads(g)) for g in cache.geometry.groups}
    assert found == {(1,): (4, range(2, 3)), (0, 2): (8, range(5, 6))}


def test_heads_that_no_module_names_are_refused_where_ranks_may_share_them() -> None:
    pool = full_attention(16, heads=1)
    with pytest.raises(UnsupportedGeometryError, match="layer 0 keeps 1 KV heads on each of 4"):
        describe_cache(pool, {}, own_shard(pool, 0, 4))


@pytest.mark.parametrize(("here", "there"), [(1, 64), (16, 16), (64, 1)])
def test_fp8_pools_pass_between_pages_of_any_size(here: int, there: int) -> None:
    moved(
        full_attention(here, dtype=torch.float8_e4m3fn),
        full_attention(there, dtype=torch.float8_e4m3fn),
        ((0, 1), (0, 1)),
    )


def test_an_fp8_pool_tells_what_its_values_are_to_be_multiplied_with() -> None:
    pool = full_attention(16, dtype=torch.float8_e4m3fn)
    scales = {1: (0.5, 2.0)}
    cache = describe_cache(pool, NAMED, own_shard(pool, 0, 1), scales=scales)
    (group,) = cache.geometry.groups
    assert group.scales == ((1.0, 1.0), (0.5, 2.0), (1.0, 1.0))
    pool = full_attention(16)
    cache = describe_cache(pool, NAMED, own_shard(pool, 0, 1), scales=scales)
    assert cache.geometry.groups[0].scales == (), "scales are of FP8 alone"


def test_pools_that_cannot_be_moved_are_named() -> None:
    class Other(MHATokenToKVPool):
        pass

    pool = full_attention(16)
    pool.__class__ = Other
    with pytest.raises(UnsupportedGeometryError, match="KV pool of type Other"):
        describe_cache(pool, NAMED, own_shard(pool, 0, 1))
    pool = full_attention(16)
    pool.kv_cache_layout = "hnd"
    with pytest.raises(UnsupportedGeometryError, match="layout hnd"):
        describe_cache(pool, NAMED, own_shard(pool, 0, 1))
    pool = full_attention(16)
    pool.dtype = torch.float8_e5m2
    with pytest.raises(UnsupportedGeometryError, match=r"float8_e5m2.*--kv-cache-dtype auto"):
        describe_cache(pool, NAMED, own_shard(pool, 0, 1))
