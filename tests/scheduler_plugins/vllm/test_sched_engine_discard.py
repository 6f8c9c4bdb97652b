# SPDX-License-Identifier: Apache-2.0
"""What a request for one token leaves is evicted before what others share."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from sched_connectors import Keeps, Loads
from sched_rig import BLOCK, Rig, words
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler

PROFILE = words(1, 4 * BLOCK)


def post(n: int, blocks: int = 3) -> list[int]:
    return words(100 + n, blocks * BLOCK)


def hits(rig: Rig, prompt: list[int]) -> int:
    """Blocks of a prompt that vLLM would find."""
    tokens = rig.hit_tokens(rig.request("probe", [*prompt, 0]))
    del rig.asked["probe"]
    return tokens // BLOCK


def serve(rig: Rig, prompts: Iterable[list[int]], max_tokens: int = 1) -> None:
    """One after the other."""
    for prompt in prompts:
        rig.add(f"r{rig.arrivals}", prompt, max_tokens)
        rig.run()


def test_a_shared_prefix_survives_posts_that_would_flush_it() -> None:
    for scheduler, left in ((None, 4), (Scheduler, 0)):
        rig = Rig(*([scheduler] if scheduler else []), blocks=21)
        serve(rig, [PROFILE + post(0), PROFILE + post(1)])
        assert hits(rig, PROFILE) == 4
        serve(rig, (post(10 + n, 5) for n in range(5)))
        assert hits(rig, PROFILE) == left
        rig.assert_served()


def test_a_shared_prefix_that_nobody_uses_any_more_is_evicted_too() -> None:
    rig = Rig(blocks=21)
    serve(rig, [PROFILE + post(0), PROFILE + post(1)])
    serve(rig, (post(10 + n, 5) for n in range(9)))
    assert hits(rig, PROFILE) == 0
    # What was stored last is there instead.
    assert [hits(rig, post(10 + n, 5)) for n in range(5, 9)] == [5, 5, 5, 5]
    rig.assert_served()


def test_a_shared_prefix_that_is_used_stays_whatever_passes_by() -> None:
    rig = Rig(blocks=21)
    serve(rig, [PROFILE + post(0), PROFILE + post(1)])
    for n in range(12):
        serve(rig, [post(10 + 2 * n, 5), post(11 + 2 * n, 5), PROFILE + post(40 + n)])
        assert hits(rig, PROFILE) == 4


def test_requests_that_generate_more_leave_everything_in_the_order_of_use() -> None:
    rig = Rig(blocks=21)
    serve(rig, [PROFILE + post(0), PROFILE + post(1)], max_tokens=2)
    serve(rig, (post(10 + n, 5) for n in range(8)), max_tokens=2)
    assert hits(rig, PROFILE) == 0


def test_suffixes_stay_while_there_are_blocks_that_hold_nothing() -> None:
    rig = Rig(blocks=61)
    prompts = [PROFILE + post(n) for n in range(6)]
    serve(rig, prompts)
    assert [hits(rig, prompt) for prompt in prompts] == [7] * 6


def test_the_oldest_suffix_goes_first() -> None:
    rig = Rig(blocks=4 + 3 * 3 + 1, seqs=1)
    prompts = [PROFILE + post(n) for n in range(3)]
    serve(rig, prompts)
    assert [hits(rig, prompt) for prompt in prompts] == [7, 7, 7]
    serve(rig, [PROFILE + post(3)])
    assert [hits(rig, prompt) for prompt in [*prompts, PROFILE + post(3)]] == [4, 7, 7, 7]


def test_a_suffix_that_is_found_again_is_a_suffix_no_more() -> None:
    rig = Rig(blocks=4 + 3 * 3 + 1, seqs=1)
    serve(rig, [PROFILE + post(n) for n in range(3)])
    serve(rig, [PROFILE + post(0) + words(7, 3)])
    serve(rig, [PROFILE + post(3), PROFILE + post(4)])
    assert hits(rig, PROFILE + post(0)) == 7


@pytest.mark.parametrize("budget", [64, 7 * BLOCK], ids=["in chunks", "in one step"])
def test_what_a_waiting_request_would_find_is_shared(budget: int) -> None:
    rig = Rig(blocks=41, seqs=1, budget=budget)
    rig.add("first", PROFILE + post(0))
    rig.add("waits", PROFILE + post(1))
    while "first" not in rig.ended:
        rig.step()
    spare = {rig.cache.block_hash(b) for b in _spare_blocks(rig)}
    mine = rig.cache.hashes(rig.request("probe", PROFILE + post(0)))
    assert spare == set(mine[4:])


def test_without_somebody_else_nothing_is_shared() -> None:
    rig = Rig(blocks=41, seqs=1)
    serve(rig, [PROFILE + post(0)])
    assert len(_spare_blocks(rig)) == 7


def test_blocks_that_a_running_request_holds_are_not_touched() -> None:
    rig = Rig(blocks=41, seqs=2, budget=256)
    rig.add("goes on", PROFILE, 30)
    rig.step()
    rig.add("ends", PROFILE + post(0))
    while "ends" not in rig.ended:
        rig.step()
    assert len(_spare_blocks(rig)) == 3
    rig.run()
    rig.assert_served()


def test_blocks_that_vllm_frees_later_are_spare_when_they_are_free() -> None:
    rig = Rig(blocks=8 + 1, depth=2, seqs=1)
    Loads(rig)
    rig.scheduler.defer_block_free = True
    serve(rig, [PROFILE + post(0)])
    assert len(_spare_blocks(rig)) == 7
    rig.add("holds", PROFILE + post(0) + words(7, BLOCK - 4), 3)
    rig.step()
    discard, held = rig.discard, _held(rig, "holds")
    discard._last_hits.clear()
    discard.ended(held, rig.cache.stored(rig.scheduler.requests["holds"]))
    rig.discard.make_room(8)
    assert len(_spare_blocks(rig)) == 7, "held, so not yet to be taken"
    rig.run()
    rig.assert_served()
    rig.discard.make_room(8)
    assert {b.block_id for b in _first_free(rig, 8)} >= {b.block_id for b in _spare_blocks(rig)}


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_prefill_for_another_engine_leaves_what_the_next_prompt_begins_with(max_tokens) -> None:
    rig = Rig(blocks=41)
    keeps = Keeps(rig)
    rig.add("p", PROFILE + post(0), max_tokens, kv={"do_remote_decode": True})
    while not keeps.kept:
        rig.step()
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() < 40, "kept for the connector"
    rig.step(keeps.sent())
    assert _spare_blocks(rig) == []
    rig.run()
    rig.assert_served()


@pytest.mark.parametrize("needed", [1, 5, 9, 14])
def test_the_free_queue_keeps_all_its_blocks(needed: int) -> None:
    rig = Rig(blocks=15, max_model_len=14 * BLOCK, seqs=1)
    serve(rig, [PROFILE + post(n) for n in range(3)])
    rig.discard.make_room(needed)
    queue = rig.scheduler.kv_cache_manager.block_pool.free_block_queue
    assert len({b.block_id for b in queue.get_all_free_blocks()}) == queue.num_free_blocks == 14
    serve(rig, [words(50, needed * BLOCK - 1)])
    rig.assert_served()


def _held(rig: Rig, name: str) -> list[KVCacheBlock]:
    (blocks,) = rig.scheduler.kv_cache_manager.get_blocks(name).blocks
    return [block for block in blocks if block.block_hash is not None]


def _spare_blocks(rig: Rig) -> list[object]:
    discard = rig.discard
    rig.cache.tell(rig.order.prefix_index)
    rig.order.refresh(100)
    discard.catch_up()
    discard._sort_out()
    pool = rig.scheduler.kv_cache_manager.block_pool
    return [pool.blocks[n] for n in discard._spare]


def _first_free(rig: Rig, count: int) -> list[KVCacheBlock]:
    queue = rig.scheduler.kv_cache_manager.block_pool.free_block_queue
    return list(queue.get_all_free_blocks())[:count]
