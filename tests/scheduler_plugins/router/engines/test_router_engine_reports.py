# SPDX-License-Identifier: Apache-2.0
"""What engines tell of their load, and how it corrects the router's own counts."""

from dataclasses import replace
from typing import Any

import pytest
from router_fakes import World, run, until

from scheduler_plugins.admission.report import EngineReport, EventPorts, RankLoad
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.counted_load import KNOWN_AFTER_S, EngineLoad
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.engine_reports import apply, from_metrics, from_report
from scheduler_plugins.router.metrics import Metrics

MODEL = CostModel(a=1e-3, d0=0.01)
METRICS = b"""# HELP vllm:num_requests_waiting Number of requests waiting.
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 7.0
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0
"""


def engine() -> BackendEngine:
    return BackendEngine("http://e", Role.PREFILL, Metrics())


def rank(**values: Any) -> RankLoad:
    counts = dict.fromkeys(("queued_tokens", "waiting", "batch", "context"), 0)
    return RankLoad(**{"rank": 0, "model": MODEL, "queued_s": 0.0, **counts, **values})


def test_metrics_of_all_ranks_are_added_up() -> None:
    told = from_metrics(METRICS)
    assert told is not None
    assert (told.waiting, told.batch, told.free_kv) == (4, 5, 0.75 * 16_000)
    assert (told.block_tokens, told.blocks) == (16, 1000)
    assert told.ranks == (0, 1)


def test_ranks_that_have_not_stepped_yet_are_known_by_their_caches() -> None:
    """With several API servers vLLM's gauges come with a rank's first step."""
    text = b"".join(
        b'vllm:cache_config_info{block_size="32",engine="%d",num_gpu_blocks="9"} 1.0\n' % number
        for number in range(3)
    )
    told = from_metrics(text)
    assert told is not None
    assert told.ranks == (0, 1, 2)


def test_two_ranks_that_are_half_full_have_room() -> None:
    second = b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.8\n'
    told = from_metrics(METRICS + second)
    assert told is not None
    assert told.free_kv == 0.75 * 16_000, "a request goes to one of them"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"vllm:num_requests_waiting nothing\n",
        b"vllm:num_requests_waiting 1.2.3\n",
    ],
)
def test_metrics_of_something_else_tell_nothing(text: bytes) -> None:
    assert from_metrics(text) is None


def test_a_report_brings_the_cost_model_and_the_events_addresses() -> None:
    ports = EventPorts(events="tcp://*:5557", replay="tcp://10.0.0.9:5558")
    report = EngineReport(ranks=(rank(queued_s=2.0),), block_tokens=32, blocks=9, kv_events=ports)
    told = from_report(report.encode(), "10.0.0.1")
    assert told is not None
    assert told.kv_events == ("tcp://10.0.0.1:5557", "tcp://10.0.0.9:5558")
    one = engine()
    apply(one, told, 0.0)
    assert (one.costs, one.block_tokens) == (MODEL, 32)
    assert one.queued_s(0.0) == 2.0
    assert from_report(b"{}x", "h") is None
    assert from_report(b"[]", "h") is None


@pytest.mark.parametrize(
    "odd",
    [
        {"queued_s": -1e9},
        {"queued_s": 1e300},
        {"batch": -5},
        {"context": -1},
        {"model": replace(MODEL, a=-1.0)},
        {"model": replace(MODEL, b=1e300)},
    ],
)
def test_a_load_that_no_engine_has_is_no_report(odd: dict[str, Any]) -> None:
    """An engine with less than no work would get every request, and infinite predictions cannot be rounded."""
    assert from_report(EngineReport(ranks=(rank(), rank(**odd))).encode(), "h") is None
    assert from_metrics(b"vllm:num_requests_running 3\nvllm:num_requests_waiting -7\n") is None


def test_the_work_of_others_counts_until_it_must_be_done() -> None:
    load = EngineLoad()
    load.prefill_sent("ours", 1000, 1.0, now_s=0.0)
    load.reported(4.0, 7, 900, now_s=1.0)
    assert load.queued_s(1.0) == 4.0
    assert load.queued_s(3.0) == 2.0
    assert (load.batch, load.context) == (7, 900)
    load.reported(0.0, 0, 0, now_s=5.0)
    assert load.queued_s(5.0) == 0.0
    assert load.batch == 0


def test_a_request_just_sent_is_not_taken_for_done_by_a_report_from_before() -> None:
    """Otherwise every report would make the engine look idle, and all would be sent there."""
    load = EngineLoad()
    load.prefill_sent("new", 1000, 3.0, now_s=10.0)
    load.reported(0.0, 0, 0, now_s=10.0 + KNOWN_AFTER_S / 2)
    assert load.queued_s(10.2) == pytest.approx(2.8)


def test_requests_of_others_are_taken_to_be_like_ours() -> None:
    load = EngineLoad()
    load.prefill_sent("ours", 1000, 2.0, now_s=0.0)
    load.reported_requests(3, 4, now_s=0.0)
    assert load.queued_s(0.0) == 6.0
    load.reported_requests(3, 4, now_s=0.0)
    assert load.queued_s(0.0) == 6.0
    assert load.batch == 4
    load.reported_requests(1, 0, now_s=0.0)
    assert (load.queued_s(0.0), load.batch) == (2.0, 0)


def test_costs_are_learnt_from_prompts_that_were_computed_alone() -> None:
    one = engine()
    truth = CostModel(a=2e-4, b=1e-8, c=0.01)
    for tokens in [100, 700, 3000, 9000] * 40:
        one.learn(StepLoad.of([(0, tokens)]), truth.prefill_s(tokens))
    assert one.costs.known
    assert one.costs.prefill_s(5000) == pytest.approx(truth.prefill_s(5000), rel=0.1)
    one.costs_reported = True
    before = one.costs
    one.learn(StepLoad.of([(0, 100)]), 99.0)
    assert one.costs is before


def test_a_live_router_hears_reports_and_metrics() -> None:
    async def scenario() -> None:
        async with World(prefill=2) as world:
            report = EngineReport(ranks=(rank(queued_s=30.0),), block_tokens=16)
            world.p[0].report = report.encode()
            world.p[1].metrics = METRICS.decode()
            for fake in world.p:
                await fake.die()
                await world.down(fake)
                await fake.start()
            first, second = (world.known(fake) for fake in world.p)
            await until(lambda: first.costs == MODEL, "the report was heard")
            assert first.queued_s(0.0) > 20.0
            await until(lambda: second.batch == 5, "the metrics were read")
            # 16,000 tokens: 250 pieces of text.
            recent = world.app[SHARED].pool.caches.prefixes._recent[second.name]
            assert recent.most_blocks == 250

    run(scenario())


def test_a_prefill_engine_that_has_just_come_is_taken_for_one_like_its_peers() -> None:
    """By an invented rate it would look twenty times faster than these here, and get everything."""

    async def scenario() -> None:
        async with World(prefill=3) as world:
            pool = world.app[SHARED].pool
            *peers, late = (world.known(fake) for fake in world.p)
            await until(lambda: all(one.models for one in world.engines), "all have been asked")
            truth = CostModel(a=2e-3, b=1e-9, c=0.01)
            for tokens in [100, 700, 3000, 9000] * 40:
                for one in peers:
                    pool.learnt(one, StepLoad.of([(0, tokens)]), truth.prefill_s(tokens))
            assert late.costs.prefill_s(3000) == pytest.approx(truth.prefill_s(3000), rel=0.1)
            assert not late.costs.known, "what is only assumed turns nobody away"
            for tokens in [100, 700, 3000, 9000] * 40:
                pool.learnt(late, StepLoad.of([(0, tokens)]), 2 * truth.prefill_s(tokens))
            assert late.costs.prefill_s(3000) == pytest.approx(2 * truth.prefill_s(3000), rel=0.1)
            assert late.costs.known

    run(scenario())
