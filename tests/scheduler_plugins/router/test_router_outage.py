# SPDX-License-Identifier: Apache-2.0
"""Where no KV arrives at a decode engine, `/health` says so, and what to set; the engine serves on."""

import logging

import pytest
from router_fakes import World, run, until

from scheduler_plugins.router.engines import watch

OUTAGE = """
# TYPE pd_connector:failing_ranks gauge
pd_connector:failing_ranks{engine="0",model_name="m"} 1.0
pd_connector:failed_transfers_total{cause="unreachable",engine="0",model_name="m"} 7.0
"""


def test_an_outage_of_transfers_shows_in_health_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "OUTAGE_LOOK_S", 0.01)

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
    monkeypatch.setattr(watch, "OUTAGE_LOOK_S", 0.01)

    async def scenario() -> None:
        async with World() as world:
            world.d[0].metrics = text
            checks = world.d[0].health_checks
            await until(lambda: world.d[0].health_checks > checks + 3, "it is looked at")
            assert all(not engine.warning for engine in world.engines)
            assert all(engine.up for engine in world.engines)

    run(scenario())
