# SPDX-License-Identifier: Apache-2.0
"""The simulator against formulas, and against doing it token by token."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_bench.scheduler.replay import Setup
from pd_bench.scheduler.workload import lengths, poisson, shared_profiles
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import POLICIES
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.decode import DecodeStage
from scheduler_plugins.sim.engine import SimulatedEngine, SimulatedStep

ONE_S = CostModel(a=0.0, c=1.0)


def engine_of(truth: CostModel, policy: str = "fcfs") -> SimulatedEngine:
    made = Setup(policy).engine()
    return SimulatedEngine(made.queue, LruBlocks(1), truth, page_size=16)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mean_wait_is_that_of_an_m_d_1_queue(load: float) -> None:
    requests = poisson(lengths(1, 60_000), load, 1)
    served = engine_of(ONE_S).run([replace(one, block_hashes=()) for one in requests])
    mean_s = sum(one.ttft_s for one in served) / len(served)
    assert mean_s == pytest.approx(1 + load / (2 * (1 - load)), rel=0.04)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everything_is_served_once_and_the_engine_never_idles_while_one_waits(policy: str) -> None:
    requests = poisson(shared_profiles(1, users=5, posts=20), 15.0, 1)
    engine, steps = Setup(policy, cache_tokens=3000).engine(), list[SimulatedStep]()
    engine.on_step = steps.append
    served = engine.run(requests)
    assert Counter(one.request.id for one in served) == Counter(one.id for one in requests)
    assert all(one.ttft_s > 0 for one in served)
    for one in served:
        assert one.first_token_s is not None
        assert one.start_s is not None
    for before, after in pairwise(steps):
        if after.start_s > before.end_s:
            late = [one for one in served if one.request.arrival_s < after.start_s - 1e-9]
            assert all(one.first_token_s <= before.end_s for one in late)
    computed = sum(step.load.tokens for step in steps)
    assert computed == sum(one.request.tokens - one.cached_tokens for one in served)


def test_blocks_can_be_read_when_their_prefill_has_ended_not_before() -> None:
    first = Waiting(id="a", tokens=33, block_hashes=("x", "xy"), arrival_s=0.0, max_tokens=1)
    second = replace(first, id="b", arrival_s=0.5)
    engine = Setup("fcfs", cache_tokens=320).engine()
    served = engine.run([first, second])
    assert [one.cached_tokens for one in served] == [0, 32]


def test_the_last_blocks_of_a_prompt_are_evicted_first() -> None:
    cache = LruBlocks(4)
    events: list[object] = []
    cache.on_added = events.append
    cache.on_removed = lambda: events.append("evicted")
    cache.store(["a1", "a2", "a3"])
    cache.store(["b1", "b2"])
    assert "a3" not in cache.hashes
    assert cache.prefix(["a1", "a2", "a3"], 3) == 2
    cache.store(["a1"])
    cache.store(["c1", "c2"])
    assert cache.prefix(["a1", "a2"], 2) == 1
    assert cache.prefix(["b1", "b2"], 2) == 1
    assert events[:3] == [["a3", "a2", "a1"], "evicted", ["b2", "b1"]]


def token_by_token(costs: CostModel, sequences: list[tuple[float, int, int]]) -> dict[str, float]:
    """When each sequence ends; (arrival, tokens, more), sorted by arrival."""
    now_s, running, ends = 0.0, dict[str, list[int]](), dict[str, float]()
    coming = [(str(n), *sequence) for n, sequence in enumerate(sequences)]
    while coming or running:
        if not running:
            now_s = max(now_s, coming[0][1])
        while coming and coming[0][1] <= now_s:
            name, _, tokens, more = coming.pop(0)
            running[name] = [tokens, more]
        now_s += costs.decode_step_s(len(running), sum(one[0] for one in running.values()))
        for name, one in list(running.items()):
            one[0] += 1
            one[1] -= 1
            if one[1] == 0:
                del running[name]
                ends[name] = now_s
    return ends


@settings(deadline=None, max_examples=100)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 100), st.integers(1, 30)), max_size=12
    )
)
def test_decode_in_leaps_ends_where_decode_by_tokens_does(
    sequences: list[tuple[int, int, int]],
) -> None:
    # Irrational, so that no step ends in the moment of an arrival: rounding would decide then.
    costs = CostModel(a=1.0, d0=0.1 * math.sqrt(10), d1=0.05 * math.sqrt(2), d2=math.sqrt(3) / 1e3)
    timed = [(float(at), tokens, more) for at, tokens, more in sorted(sequences)]
    stage, ends = DecodeStage(costs), dict[str, float]()
    for n, (at_s, tokens, more) in enumerate(timed):
        ends.update(stage.advance(at_s))
        stage.add(str(n), tokens, more, at_s)
    assert stage.batch == len(stage.decoding())
    ends.update(stage.advance(float("inf")))
    assert stage.batch == 0
    assert ends == pytest.approx(token_by_token(costs, timed))


def test_workloads_have_the_shape_they_claim() -> None:
    requests = shared_profiles(3, users=4, posts=5)
    assert len({one.id for one in requests}) == 20
    assert {one.max_tokens for one in requests} == {1}
    firsts = Counter(one.block_hashes[0] for one in requests)
    assert sorted(firsts.values()) == [5, 5, 5, 5]
    lasts = Counter(one.block_hashes[-1] for one in requests)
    assert len(lasts) >= 20 - 4 * 5
    timed = poisson(requests, 2.0, 3)
    assert timed[-1].arrival_s == pytest.approx(10.0, rel=0.6)
    assert [one.id for one in timed] == [one.id for one in requests]


def test_a_replay_is_the_same_every_time() -> None:
    runs = []
    for _ in range(2):
        requests = poisson(shared_profiles(4, users=4, posts=20), 20.0, 4)
        served = Setup(cache_tokens=3000).engine().run(requests)
        runs.append([one.ttft_s for one in served])
    assert runs[0] == runs[1]
