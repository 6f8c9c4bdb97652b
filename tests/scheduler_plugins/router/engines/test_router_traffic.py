# SPDX-License-Identifier: Apache-2.0
"""KV rates and states of an engine, from two looks at its `/metrics`."""

import asyncio
import json

import pytest
from router_fakes import World, run, until

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.endpoints.page import state
from scheduler_plugins.router.engines import slow_probes as looks
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.inquiry import Arrivals, Inquiry
from scheduler_plugins.router.engines.pool import described
from scheduler_plugins.router.engines.traffic import (
    FromProducer,
    Traffic,
    between,
    kv_lines,
    read,
)

BEFORE = """
pd_connector:received_bytes_total{engine="0"} 1000.0
pd_connector:received_bytes_total{engine="1"} 500.0
pd_connector:asked_transfers_total{codec="int8",engine="0"} 3.0
pd_connector:pool_saves_total{cause="full",engine="0"} 7.0
pd_connector:leased_pages{engine="0"} 60.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
"""
AFTER = """
pd_connector:received_bytes_total{engine="0"} 3000.0
pd_connector:received_bytes_total{engine="1"} 1500.0
pd_connector:asked_transfers_total{codec="int8",engine="0"} 3.0
pd_connector:asked_transfers_total{codec="raw",engine="0"} 2.0
pd_connector:pool_saves_total{cause="full",engine="0"} 7.0
pd_connector:pool_misses_total{cause="late",engine="0"} 1.0
pd_connector:distrusted_producers{engine="0"} 1.0
"""


def test_rates_are_of_all_ranks_since_the_look_before() -> None:
    traffic, moved = between(read(BEFORE, 10.0), read(AFTER, 15.0))
    assert (traffic.received_bytes_s, moved.received_bytes, moved.seconds) == (600.0, 3000.0, 5.0)
    assert moved.codecs == {"raw": 2.0}
    assert (traffic.distrusted, traffic.pool_stalls) == (1.0, 1.0)
    assert traffic.unsaved == "", "the pool was full before, not since"


PAIR = """
pd_connector:pair_bytes_total{{codec="int8",engine="0",producer="10.0.0.1:7100"}} {nbytes}
pd_connector:pair_bytes_total{{codec="raw",engine="0",producer="10.0.0.1:7100"}} 50.0
pd_connector:pair_chunks_total{{engine="0",producer="10.0.0.1:7100",prompt="computing"}} 9.0
pd_connector:pair_chunks_total{{engine="0",producer="10.0.0.1:7100",prompt="computed"}} 1.0
pd_connector:pair_transfers_total{{engine="0",producer="10.0.0.1:7100",result="received"}} 7.0
pd_connector:pair_transfers_total{{engine="0",producer="10.0.0.1:7100",result="stalled"}} 1.0
pd_connector:pair_transfers_total{{engine="0",producer="10.0.0.1:7100",result="aborted"}} 4.0
pd_connector:pair_bytes_total{{codec="raw",engine="0",producer="10.0.0.2:7100"}} 10.0
"""


def test_what_came_from_each_producer_is_told_apart() -> None:
    before, after = (read(PAIR.format(nbytes=nbytes), at) for nbytes, at in ((100, 10), (600, 15)))
    found = between(before, after)[0].producers
    assert found["10.0.0.1:7100"] == FromProducer(
        650.0, 10.0, 9.0, 8.0, 1.0, {"int8": 600.0, "raw": 50.0}, 100.0
    )
    assert found["10.0.0.2:7100"].bytes_s == 0.0
    first = between(None, after)[0].producers
    assert first["10.0.0.1:7100"].bytes_s == 0.0, "nothing is known of the time before"


def test_an_engine_that_names_countless_producers_does_not_fill_the_router() -> None:
    text = "".join(
        f'pd_connector:pair_bytes_total{{codec="raw",producer="h:{n}"}} 1.0\n' for n in range(5000)
    )
    assert len(read(text, 1.0).producers) == 256


def test_states_are_those_of_the_last_look() -> None:
    traffic, moved = between(None, read(BEFORE, 10.0))
    assert (traffic.cache_used, traffic.pages, traffic.leased_pages) == (0.75, 100, 60.0)
    assert (traffic.received_bytes_s, moved.received_bytes) == (0.0, 0.0), "nothing is known yet"


def test_an_engine_that_starts_anew_counts_from_zero() -> None:
    _, moved = between(read(AFTER, 10.0), read(BEFORE, 15.0))
    assert moved.received_bytes == 1500.0
    assert moved.codecs == {}


@pytest.mark.parametrize(
    "text", ["", "{", "pd_connector:sent_bytes_total NaN", "pd_connector:sent_bytes 1e999"]
)
def test_metrics_that_tell_nothing_move_nothing(text: str) -> None:
    traffic, moved = between(read("", 1.0), read(text, 2.0))
    assert (traffic.sent_bytes_s, traffic.cache_used, moved.received_bytes) == (0.0, None, 0.0)


def test_a_rate_of_before_is_not_shown_as_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose `/metrics` fail is not known to move anything. It serves on."""
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def fail(self: Inquiry) -> Arrivals:
        raise EngineFailedError("timeout", "no answer")

    async def scenario() -> None:
        async with World() as world:
            world.d[0].metrics = 'pd_connector:leased_pages{engine="0"} 4.0'
            known = world.known(world.d[0])
            await until(lambda: known.traffic.leased_pages == 4.0, "it is read")
            monkeypatch.setattr(Inquiry, "arrivals", fail)
            await until(lambda: known.traffic == Traffic(), "nothing is known any more")
            assert known.up

    run(scenario())


def test_health_says_how_far_an_engine_has_read_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)
    text = 'pd_connector:weights_bytes{{engine="0"}} 16e9\npd_connector:weights_read_bytes{{engine="0"}} {}\n'

    async def scenario() -> None:
        async with World() as world:
            world.d[0].metrics = text.format("3.1e9")
            known = world.known(world.d[0])
            await until(lambda: known.about.weights, "it is read")
            assert described(known)["weights"] == "weights read 3.1 of 16.0 GB"
            world.d[0].metrics = text.format("16e9")
            await until(lambda: not known.about.weights, "all is read")
            assert "weights" not in described(known)

    run(scenario())


HUGE = """
pd_connector:sent_bytes_total{engine="0"} 1e308
pd_connector:sent_bytes_total{engine="1"} 1e308
pd_connector:leased_pages 1e999
pd_connector:handoffs_total{cause="handed_over"} 1e400
vllm:kv_cache_usage_perc 1e999
vllm:num_requests_running 1e999
vllm:num_requests_waiting{engine="0"} 1e308
vllm:num_requests_waiting{engine="1"} 1e308
""" + "".join(f'pd_connector:asked_transfers_total{{codec="c{n}"}} 1.0\n' for n in range(5000))


def test_numbers_that_no_engine_can_mean_do_not_break_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        async with World() as world:
            world.d[0].metrics = "pd_connector:sent_bytes_total 1.0"
            known, checks = world.known(world.d[0]), world.d[0].health_checks
            await until(lambda: world.d[0].health_checks > checks + 2, "it is looked at")
            world.d[0].metrics = HUGE
            await until(lambda: known.traffic.cache_used == 1.0, "it is read")
            assert known.up
            now_s = asyncio.get_running_loop().time()
            told = state(world.app[SHARED], now_s + 10.0)
            json.dumps(told, allow_nan=False)
            assert len(told["recent"]["codecs"]) <= 64

    run(scenario())


def test_lines_of_others_are_left_out() -> None:
    others = '# HELP x\nvllm:request_seconds_bucket{le="1"} 1.0\n' * 9
    kept = kv_lines((others + BEFORE + others).encode())
    assert "seconds" not in kept
    assert read(kept, 1.0) == read(BEFORE, 1.0)


def test_prefill_engines_are_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        async with World() as world:
            world.p[0].metrics = 'pd_connector:leased_pages{engine="0"} 4.0'
            known = world.known(world.p[0])
            await until(lambda: known.traffic.leased_pages == 4.0, "it is read")
            await world.p[0].die()
            await until(lambda: known.traffic == Traffic(), "an engine that is down moves nothing")

    run(scenario())
