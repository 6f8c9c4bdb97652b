# SPDX-License-Identifier: Apache-2.0
"""What the queue believes to be cached is what vLLM would find."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_rig import BLOCK, Rig, words
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from scheduler_plugins.vllm.cache import CacheView
from scheduler_plugins.vllm.request_queue import describe


def believed(rig: Rig, prompt: list[int]) -> int:
    """Tokens that our queue takes to be cached."""
    rig.cache.tell(rig.order.prefix_index)
    request = describe(rig.request("probe", prompt), rig.cache)
    del rig.asked["probe"]
    return rig.order.estimator.known_tokens(request)


def found(rig: Rig, prompt: list[int]) -> int:
    """Tokens that vLLM finds."""
    tokens = rig.hit_tokens(rig.request("probe", prompt))
    del rig.asked["probe"]
    return tokens


def assert_agree(rig: Rig, prompts: list[list[int]]) -> list[int]:
    hits = [found(rig, prompt) for prompt in prompts]
    assert [believed(rig, prompt) for prompt in prompts] == hits
    return hits


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), blocks=st.sampled_from([12, 20, 40]))
def test_hits_agree_after_every_step(seed: int, blocks: int) -> None:
    chosen = random.Random(seed)
    rig = Rig(blocks=blocks, max_model_len=11 * BLOCK, seqs=3)
    prompts = [words(n % 3, chosen.randint(1, 130)) + words(n, 20) for n in range(8)]
    for step in range(20):
        if step < 8:
            rig.add(f"r{step}", prompts[step], chosen.choice([1, 1, 4]))
        if chosen.random() < 0.1:
            rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        if rig.scheduler.has_requests():
            rig.step()
        assert_agree(rig, prompts)
    rig.run()
    rig.assert_served()


def test_waiting_requests_are_filed_as_the_cache_is() -> None:
    """The entries of the queue, not only fresh look-ups, follow what is stored and evicted."""
    rig = Rig(blocks=14, max_model_len=12 * BLOCK, seqs=1)
    profile = words(1, 6 * BLOCK)
    rig.add("first", profile)
    rig.run()
    rig.add("blocker", words(2, BLOCK), 60)
    rig.step()
    rig.add("shares", profile + words(3, 5))
    rig.step()
    entry = rig.order._entries["shares"]
    assert entry.cached == 6
    rig.abort("blocker")
    rig.add("evicts", words(4, 12 * BLOCK - 1))
    rig.abort("shares")
    rig.add("shares too", profile + words(5, 5))
    assert rig.run()[-1] == "evicts"
    assert_agree(rig, [profile + words(6, 5)])


def test_a_reset_of_the_cache_is_seen_and_so_is_what_comes_after_it() -> None:
    rig = Rig()
    prompt = words(1, 100)
    rig.add("a", prompt)
    rig.run()
    assert assert_agree(rig, [prompt]) == [96]
    assert rig.scheduler.reset_prefix_cache()
    assert type(rig.cache.pool.cached_block_hash_to_block) is BlockHashToBlockMap
    rig.add("b", prompt[:40])
    rig.run()
    assert assert_agree(rig, [prompt]) == [32]


def test_blocks_evicted_by_number_are_seen() -> None:
    rig = Rig()
    prompt = words(1, 100)
    rig.add("a", prompt)
    rig.run()
    pool = rig.cache.pool
    third = [b for b in pool.blocks if b.block_hash is not None][2]
    pool.evict_blocks({third.block_id})
    (hits,) = assert_agree(rig, [prompt])
    assert hits < 96


def test_a_block_that_is_cached_twice_and_lost_once_is_still_there() -> None:
    rig = Rig(budget=128)
    prompt = words(1, 47)
    for name in ("a", "b"):
        rig.add(name, prompt, 5)
    for _ in range(3):
        rig.step()
    # Each has filled its third block by itself, with the same token.
    twins = [rig.scheduler.kv_cache_manager.get_blocks(name).blocks[0][2] for name in "ab"]
    assert twins[0] is not twins[1]
    longer = prompt + rig.answers["a"]
    for twin, hits in zip(twins, (48, 32), strict=True):
        rig.cache.pool.evict_blocks({twin.block_id})
        assert assert_agree(rig, [longer]) == [hits]


def test_without_prefix_caching_there_are_no_hits() -> None:
    rig = Rig(caching=False)
    prompt = words(1, 100)
    rig.add("a", prompt)
    rig.run()
    assert assert_agree(rig, [prompt]) == [0]


def test_a_request_that_must_not_read_the_cache_finds_nothing() -> None:
    rig = Rig()
    prompt = words(1, 100)
    rig.add("a", prompt)
    rig.run()
    request = rig.request("b", prompt)
    assert describe(request, rig.cache).block_hashes
    request.skip_reading_prefix_cache = True
    assert describe(request, rig.cache).block_hashes == ()


class _Ears:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def added(self, blocks: object) -> None:
        self.heard.append(list(blocks))  # type: ignore[call-overload]

    def removed(self) -> None:
        self.heard.append("removed")


def test_evictions_are_told_before_additions_and_everything_once() -> None:
    rig = Rig(blocks=12, max_model_len=11 * BLOCK)
    view, ears = CacheView(rig.scheduler.kv_cache_manager), _Ears()
    view.tell(ears)
    ears.heard.clear()
    rig.add("a", words(1, 10 * BLOCK))
    rig.run()
    rig.add("b", words(2, 10 * BLOCK))
    rig.run()
    view.tell(ears)
    first, *rest = ears.heard
    assert first == "removed"
    assert len(rest) == 1
    assert len(rest[0]) == len(set(rest[0])), "what came twice is told once"
    view.tell(ears)
    assert len(ears.heard) == 2


def _hybrid() -> list[object]:
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    return [SlidingWindowSpec(**common, sliding_window=32), FullAttentionSpec(**common)]


def test_of_several_groups_the_one_with_full_attention_counts() -> None:
    rig = Rig(groups=_hybrid(), blocks=129)
    view = rig.cache
    assert view.group == 1
    prompt = words(1, 100)
    rig.add("a", prompt)
    rig.run()
    assert believed(rig, prompt) == 96 >= found(rig, prompt) > 0


@pytest.mark.parametrize("groups", [None, _hybrid()], ids=["one group", "hybrid"])
def test_models_of_several_groups_are_served_too(groups: list[object] | None) -> None:
    rig = Rig(groups=groups, blocks=129)
    for n in range(6):
        rig.add(f"r{n}", words(n % 2, 80) + words(10 + n, 20), 1 + n % 3)
    assert sorted(rig.run()) == [f"r{n}" for n in range(6)]
    assert not rig.scheduler.requests
