# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (DSA) and FP8 latents in SGLang's own pools: latents and index keys come where they belong."""

import random
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang_door.door import Pair, reach
from sglang_door.test_sglang_cache import LAYERS, NAMED, TOKENS, latents, slots_of
from support.agents import until

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.plan.chunks import plan
from pd_connector.plan.fit import unlike
from pd_connector.plan.route import routes
from pd_connector.sglang.cache import INDEX_LAYERS, describe_cache, own_shard

PAGE, PAGES = 64, 5
RANK, ROPE = 512, 64
PACKED = RANK + RANK // 128 * 4 + 2 * ROPE
"""Bytes of a latent in DSA's FP8 form: values, a scale for each 128 of them, and the rotated part in bfloat16."""
PROMPT = 150
SKIPS = [False, True, False]
"""The second layer uses the index keys of the first."""


def sparse(*, fp8: bool = False, start_layer: int = 0) -> DSATokenToKVPool:
    """A pool full of noise."""
    pool = DSATokenToKVPool(
        size=PAGE * PAGES,
        page_size=PAGE,
        kv_lora_rank=RANK,
        dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=PACKED if fp8 else RANK + ROPE,
        start_layer=start_layer,
        index_buf_size=PAGE * PAGES,
        skip_topk_layers=SKIPS,
    )
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        octets = buffer.view(torch.uint8)
        octets.copy_(torch.randint(0, 256, octets.shape).to(torch.uint8))
    return pool


def held(pool: Any, pages: list[int]) -> list[torch.Tensor]:
    """The bytes of a prompt's tokens in all latents, and of all pages of index keys."""
    slots = torch.tensor([page * PAGE + n for page in pages for n in range(PAGE)])[:PROMPT]
    kv = [buffer.view(torch.uint8)[slots] for buffer in pool.kv_buffer]
    return kv + [buffer[pages] for buffer in pool.index_k_with_scale_buffer if len(buffer)]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_latents_and_index_keys_of_a_prompt_pass(fp8: bool) -> None:
    pair = Pair((PAGE, PAGE), (sparse(fp8=fp8), sparse(fp8=fp8)))
    try:
        req = pair.request(range(PROMPT))
        sender, receiver = pair.sender(req), pair.receiver(req)
        here, there = np.array([1, 2, 3], np.int32), np.array([5, 3, 1], np.int32)
        sender.send(here[:2], None, num_kv_tokens=128)
        pair.p.rank.buffers.set_buf(req)
        sender.send(here[2:], [here], num_kv_tokens=PROMPT - 128)
        reach(receiver.poll, KVPoll.WaitingForInput)
        others = [2, 4]
        before = held(pair.d.pool, others)
        assert not all(
            map(torch.equal, held(pair.p.pool, here.tolist()), held(pair.d.pool, there.tolist()))
        )
        receiver.send_metadata(there, 2, [there], decode_prefix_len=0)
        reach(receiver.poll, KVPoll.Success)
        sent, got = held(pair.p.pool, here.tolist()), held(pair.d.pool, there.tolist())
        assert len(sent) == LAYERS + 2
        assert all(map(torch.equal, sent, got))
        assert all(map(torch.equal, before, held(pair.d.pool, others))), "another request's pages"
        reach(sender.poll, KVPoll.Success)
        sender.clear()
        receiver.clear()
        until(pair.idle, "idle")
    finally:
        pair.close()


def test_a_prefix_that_the_decode_engine_has_is_not_sent() -> None:
    pair = Pair((PAGE, PAGE), (sparse(), sparse()))
    try:
        req = pair.request(range(PROMPT))
        sender, receiver = pair.sender(req), pair.receiver(req)
        pages = np.array([1, 2, 3], np.int32)
        pair.p.rank.buffers.set_buf(req)
        sender.send(pages, [pages], num_kv_tokens=PROMPT)
        reach(receiver.poll, KVPoll.WaitingForInput)
        prefix = held(pair.d.pool, [1, 2, 4])
        receiver.send_metadata(pages[2:], 2, [pages[2:]], decode_prefix_len=2 * PAGE)
        reach(receiver.poll, KVPoll.Success)
        assert all(map(torch.equal, prefix, held(pair.d.pool, [1, 2, 4])))
        keys = [pool.index_k_with_scale_buffer[0][3] for pool in (pair.p.pool, pair.d.pool)]
        assert torch.equal(*keys)
    finally:
        pair.close()


def test_a_layers_index_keys_have_a_number_of_their_own() -> None:
    pool = sparse(start_layer=5)
    kv, keys = describe_cache(pool, NAMED, own_shard(pool, 0, 1)).geometry.groups
    assert kv.layers == (5, 6, 7)
    assert keys.layers == (INDEX_LAYERS + 5, INDEX_LAYERS + 7)
    assert (keys.key_dim, keys.page_size) == (132, PAGE)


def test_a_pipeline_stage_can_have_no_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sparse()
    none = [buffer[:0] for buffer in pool.index_k_with_scale_buffer]
    monkeypatch.setattr(type(pool), "index_k_with_scale_buffer", none)
    (kv,) = describe_cache(pool, NAMED, own_shard(pool, 0, 1)).geometry.groups
    assert len(kv.layers) == LAYERS


def test_index_keys_of_several_tokens_are_named() -> None:
    pool = sparse()
    pool.index_kpool = 4
    with pytest.raises(UnsupportedGeometryError, match="index keys of 4 tokens each"):
        describe_cache(pool, NAMED, own_shard(pool, 0, 1))


def test_latents_in_two_forms_are_refused_with_both() -> None:
    packed, plain = (
        describe_cache(pool, NAMED, own_shard(pool, 0, 1)).geometry.groups[0]
        for pool in (sparse(fp8=True), sparse())
    )
    assert "key_dim 656 / 576" in unlike(packed, plain, (0, 1, 2))


def fp8_latents(page_size: int) -> MLATokenToKVPool:
    pool = latents(page_size)
    pool.dtype = torch.float8_e4m3fn
    pool.store_dtype = torch.uint8
    pool.kv_buffer = [buffer.to(torch.float8_e4m3fn).view(torch.uint8) for buffer in pool.kv_buffer]
    return pool


@pytest.mark.parametrize(("there", "exact"), [(fp8_latents, True), (latents, False)])
def test_fp8_latents_pass_between_pages_of_any_size_and_into_other_dtypes(
    there: Any, exact: bool
) -> None:
    """SGLang writes them without a scale, so a value is what it says."""
    pools = fp8_latents(16), there(1)
    caches = [describe_cache(pool, NAMED, own_shard(pool, 0, 1)) for pool in pools]
    pages = [random.Random(7).sample(range(1, 128 // size), -(-TOKENS // size)) for size in (16, 1)]
    found = routes(caches[0].geometry, caches[1].geometry, ("raw",), ("raw",))
    for chunk in plan(found, 0, TOKENS, 1 << 20):
        route = found[chunk.route]
        spans = [chunk.pages(g.page_size) for g in (route.source, route.destination)]
        ours, theirs = ([p[n] for n in s] for p, s in zip(pages, spans, strict=True))
        slot = memoryview(bytearray(chunk.nbytes(route)))
        caches[1].scatter(route, chunk, theirs, caches[0].gather(route, chunk, ours, slot))
    for source, destination in zip(pools[0].kv_buffer, pools[1].kv_buffer, strict=True):
        sent = source.view(torch.float8_e4m3fn)[slots_of(pages[0], 16)]
        got = destination[slots_of(pages[1], 1)]
        if exact:
            assert torch.equal(sent.view(torch.uint8), got)
        else:
            assert torch.equal(sent.to(torch.bfloat16), got)


def test_fp8_latents_with_scales_are_named() -> None:
    pool = fp8_latents(16)
    with pytest.raises(UnsupportedGeometryError, match="FP8 latents of layers 1-1 with scales"):
        describe_cache(pool, NAMED, own_shard(pool, 0, 1), scales={1: (0.5, 0.5)})
