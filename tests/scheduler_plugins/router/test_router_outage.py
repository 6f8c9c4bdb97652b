# SPDX-License-Identifier: Apache-2.0
"""Where no KV arrives at a decode engine, `/health` says so, and what to set; the engine serves on."""

import logging

import pytest
from router_fakes import World, run, until

from scheduler_plugins.router.engines import slow_probes as looks

OUTAGE = """
# TYPE pd_connector:failing_ranks gauge
pd_connector:failing_ranks{engine="0",model_name="m"} 1.0
pd_connector:failed_transfers_total{cause="unreachable",engine="0",model_name="m"} 7.0
"""


def test_an_outage_of_transfers_shows_in_health_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def decode_state(world: World) -> dict[str, str]:
        health = await world.get("/health")
        assert health.status == 200, "it serves: prompts are recomputed"
        (state,) = [e for e in health.json["engines"] if e["role"] == "decode"]
        return state

    async def scenario() -> None:
        async with World() as world:
            assert "warning" not in await decode_state(world)
            world.d[0].metrics = OUTAGE
            engine = next(e for e in world.engines if e.role == "decode")
            await until(lambda: engine.warning, "the outage is seen")
            warning = (await decode_state(world))["warning"]
            assert "no KV has arrived there for a minute" in warning
            assert "unreachable 7" in warning
            assert "PD_CONNECTOR_HOST" in warning
            assert (await world.complete()).status == 200
            world.d[0].metrics = OUTAGE.replace("1.0", "0.0")
            await until(lambda: not engine.warning, "it has ended")
            assert "warning" not in await decode_state(world)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    said = [record for record in caplog.records if "no KV has arrived" in record.message]
    assert len(said) == 1, "once"


@pytest.mark.parametrize("text", ["", "not prometheus at all {", "pd_connector:failing_ranks{} x"])
def test_metrics_that_tell_nothing_are_no_outage(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        async with World() as world:
            world.d[0].metrics = text
            checks = world.d[0].health_checks
            await until(lambda: world.d[0].health_checks > checks + 3, "it is looked at")
            assert all(not engine.warning for engine in world.engines)
            assert all(engine.up for engine in world.engines)

    run(scenario())


@pytest.mark.parametrize("consumes", [True, False])
def test_a_decode_engine_that_was_started_as_kv_producer_is_named(
    monkeypatch: pytest.MonkeyPatch, consumes: bool
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        world = World()
        world.d[0].engine_id, world.d[0].consumes = "d0", consumes
        async with world:
            engine = world.known(world.d[0])
            await until(lambda: engine.handover_known, "it was asked")
            checks = world.d[0].health_checks
            await until(lambda: world.d[0].health_checks > checks + 3, "it is looked at")
            told = "" if consumes else "its kv_role is kv_producer"
            assert told in engine.warning
            assert bool(engine.warning) is not consumes
            assert (await world.get("/health")).json["disaggregates"] is consumes

    run(scenario())


HANDOFFS = """
pd_connector:handoffs_total{cause="handed_over",engine="0",model_name="m"} 2.0
pd_connector:handoffs_total{cause="unaudited",engine="0",model_name="m"} 7.0
pd_connector:handoffs_total{cause="stalled",engine="0",model_name="m"} 1.0
"""


def test_what_became_of_requests_is_counted_as_the_decode_engine_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten were sent both ways, and KV of two moved."""
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        async with World() as world:
            for _ in range(10):
                assert (await world.complete()).status == 200
            assert (await world.complete(n=2)).status == 200
            world.d[0].metrics = HANDOFFS
            engine = world.known(world.d[0])
            await until(lambda: bool(engine.handoffs), "the engine was asked")
            assert await world.metric("flows_total", flow="disaggregated") == 10
            for outcome, count in {"handed_over": 2, "unaudited": 7, "recomputed": 1}.items():
                assert await world.metric("handoffs_total", outcome=outcome) == count
            assert await world.metric("handoffs_total", outcome="recomputed", cause="stalled") == 1
            alone = {"outcome": "alone", "cause": "several_answers"}
            assert await world.metric("handoffs_total", **alone) == 1
            told = (await world.get("/health")).json
            wanted = {"handed_over": 2, "unaudited": 7, "stalled": 1}
            assert told["handoffs"] == wanted
            assert [one.get("handoffs") for one in told["engines"]] == [None, wanted]
            # It restarts: its counters begin at 0 again.
            world.d[0].metrics = HANDOFFS.replace("} 2.0", "} 1.0")
            await until(lambda: engine.handoffs["handed_over"] == 1, "the engine was asked")
            assert await world.metric("handoffs_total", outcome="handed_over") == 3
            assert await world.metric("handoffs_total", outcome="unaudited") == 7

    run(scenario())


OTHERS = """
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
"""


@pytest.mark.parametrize("ours", ["", 'pd_connector:incoming_transfers{engine="0"} 0.0\n'])
def test_a_decode_engine_without_our_connector_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: str
) -> None:
    """Its metrics are vLLM's alone. It answers, so nothing else would show that all prompts are computed twice."""
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        world = World()
        world.d[0].metrics = OTHERS + ours
        async with world:
            engine = world.known(world.d[0])
            checks = world.d[0].health_checks
            await until(lambda: world.d[0].health_checks > checks + 3, "it is looked at")
            assert bool(engine.warning) is not bool(ours)
            if not ours:
                assert "without PDConnector" in engine.warning
                assert "kv_role kv_consumer" in engine.warning

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert ("without PDConnector" in caplog.text) is not bool(ours)


def test_engines_that_all_answer_alone_need_no_connector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a plan whose engines do both: no engine computes prompts for others."""
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.01)

    async def scenario() -> None:
        world = World(prefill=0, decode=2, unnamed=True)
        for engine in world.d:
            engine.metrics = OTHERS
        async with world:
            checks = world.d[0].health_checks
            await until(lambda: world.d[0].health_checks > checks + 3, "it is looked at")
            assert [world.known(engine).warning for engine in world.d] == ["", ""]

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "without PDConnector" not in caplog.text
