# SPDX-License-Identifier: Apache-2.0
"""Classes at the front: what a class is promised is kept, or the client is told at once."""

import pytest
import yaml
from router_fakes import World, run, until

from scheduler_plugins.admission.report import EngineReport, RankLoad
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.qos.rules import ClassRule, Match
from scheduler_plugins.router.settings.settings_file import SettingsError, parse

CLASSES = (
    QosClass(name="premium", reserved_fraction=0.5, priority=2, slo=Slo(ttft_ms=1000)),
    QosClass(name="free", reserved_fraction=0.5, priority=1),
)
ROUTES = (ClassRule(match=Match(header="x-tier: premium"), qos="premium"),)
PROMISES = {"classes": CLASSES, "routes": ROUTES, "policy": "conductor"}
BODY = {"model": "m", "prompt": "hello"}
PREMIUM = {"X-Tier": "premium"}


def busy(queued_s: float) -> bytes:
    load = RankLoad(
        rank=0,
        queued_s=queued_s,
        queued_tokens=0,
        waiting=1,
        batch=0,
        context=0,
        model=CostModel(a=1e-4),
    )
    return EngineReport(ranks=(load,)).encode()


def test_a_request_whose_promise_would_be_broken_is_turned_away_at_once() -> None:
    async def scenario() -> None:
        async with World(**PROMISES) as world:
            world.p[0].report = busy(30.0)
            await world.p[0].die()
            await world.down(world.p[0])
            await world.p[0].start()
            await until(lambda: world.known(world.p[0]).told_costs, "the report was heard")
            reply = await world.post("/v1/completions", BODY, **PREMIUM)
            assert reply.status == 429
            assert int(reply.headers["Retry-After"]) >= 20
            assert not world.p[0].bodies
            assert not world.d[0].bodies
            assert await world.metric("rejected_total", qos="premium", cause="ttft") == 1
            # Nothing is promised to the other class.
            assert (await world.post("/v1/completions", BODY)).status == 200

    run(scenario())


def test_a_guess_turns_nobody_away() -> None:
    """Costs that nobody told are counted in tokens: no promise is judged by them."""

    async def scenario() -> None:
        async with World(**PROMISES) as world:
            engine = world.known(world.p[0])
            engine.load.prefill_sent("other", 10**6, 3600.0, 0.0)
            engine.load.told(3600.0, 0, 0, 1e9)
            assert not engine.costs.known
            reply = await world.post("/v1/completions", BODY, **PREMIUM)
            assert reply.status == 200
            engine.load.prefill_ended("other", 0.0)

    run(scenario())


def test_classes_are_read_from_the_file() -> None:
    content = {
        "engines": [{"url": "a:1", "role": "prefill"}, {"url": "b:2", "role": "decode"}],
        "classes": [
            {"name": "premium", "reserved_fraction": 0.4, "priority": 2, "slo": {"ttft_ms": 900}},
            {"name": "free", "reserved_fraction": 0.6, "priority": 1},
        ],
        "routes": [{"match": {"header": "x-tier: premium"}, "qos": "premium"}],
    }
    config = parse(yaml.safe_dump(content).encode(), {}, "file")
    assert [one.name for one in config.classes] == ["premium", "free"]
    content["routes"] = [{"match": {}, "qos": "nobody"}]
    with pytest.raises(SettingsError, match="nobody"):
        parse(yaml.safe_dump(content).encode(), {}, "file")
