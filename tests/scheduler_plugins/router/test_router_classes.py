# SPDX-License-Identifier: Apache-2.0
"""Classes at the front: what a class is promised is kept, or the client is told at once."""

import pytest
import yaml
from router_fakes import World, run, until

from scheduler_plugins.admission.report import EngineReport, RankLoad
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.qos.rules import ClassRule, Match
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.routing.promises import Margins
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


async def tells(world: World, report: bytes) -> None:
    """The prefill engine restarts, with this load, and the router has heard of it."""
    world.p[0].report = report
    await world.p[0].die()
    await world.down(world.p[0])
    await world.p[0].start()
    await until(lambda: world.known(world.p[0]).costs_reported, "the report was heard")
    await world.up(world.p[0])


def test_a_request_whose_promise_would_be_broken_is_turned_away_at_once() -> None:
    async def scenario() -> None:
        async with World(**PROMISES) as world:
            await tells(world, busy(30.0))
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
            engine.load.reported(3600.0, 0, 0, 1e9)
            assert not engine.costs.known
            reply = await world.post("/v1/completions", BODY, **PREMIUM)
            assert reply.status == 200
            engine.load.prefill_ended("other", 0.0)

    run(scenario())


def test_a_class_whose_predictions_were_too_short_is_promised_less() -> None:
    """The first token came late again and again: predictions have to stay further below the promise."""

    async def scenario() -> None:
        async with World(**PROMISES) as world:
            await tells(world, busy(0.7))
            margins = world.app[SHARED].margins
            streamed = {**BODY, "stream": True}
            assert (await world.post("/v1/completions", streamed, **PREMIUM)).status == 200
            assert margins.of("premium") < 1  # it came sooner than was predicted
            assert margins.of("free") == 1
            assert await world.metric("promise_margin", qos="premium") == margins.of("premium")
            late = request_of("premium", promised_s=1.0)
            while margins.of("premium") < 2:
                margins.learn(late, expected_s=0.7, real_s=30.0)
            reply = await world.post("/v1/completions", streamed, **PREMIUM)
            assert reply.status == 429
            assert await world.metric("rejected_total", qos="premium", cause="ttft") == 1

    run(scenario())


@pytest.mark.parametrize("expected_s", [0.1, float("inf"), float("nan")])
def test_predictions_that_refuse_nobody_teach_nothing(expected_s: float) -> None:
    margins = Margins()
    margins.learn(request_of("premium", promised_s=1.0), expected_s, real_s=30.0)
    margins.learn(request_of("free", promised_s=float("inf")), expected_s, real_s=30.0)
    assert margins.of("premium") == margins.of("free") == 1


def request_of(qos: str, promised_s: float) -> Request:
    return Request(id="one", tokens=100, qos=qos, ttft_slo_s=promised_s)


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
