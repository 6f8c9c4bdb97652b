# SPDX-License-Identifier: Apache-2.0
"""Requests that wait at the router: one bounded queue per class."""

from __future__ import annotations

import asyncio

import pytest
from router_fakes import World, run, until

from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.qos.rules import ClassRule, Match
from scheduler_plugins.qos.trust import HEADER, Seen, class_key, signed_class
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.routing.front import FrontQueue, QueueFullError, Turn
from scheduler_plugins.router.settings.config import RouterConfig

SECRET = "a secret that all routers of a test share"

CLASSES = (
    QosClass(name="premium", reserved_fraction=0.5, priority=2),
    QosClass(name="free", reserved_fraction=0.1, priority=1),
)
ROUTES = (ClassRule(match=Match(header="x-tier: premium"), qos="premium"),)


def config(front_queue: int) -> RouterConfig:
    return RouterConfig(prefill=("a:1",), decode=("b:1",), classes=CLASSES, front_queue=front_queue)


def test_the_better_class_goes_first_and_each_class_has_a_bound() -> None:
    async def scenario() -> None:
        front, settings, room, order = FrontQueue(), config(3), False, list[str]()

        async def request(name: str) -> None:
            await front.wait(Turn(name, 1.0, 2, lambda: room), settings)
            order.append(name)

        tasks = [asyncio.create_task(request("free")) for _ in range(3)]
        tasks += [asyncio.create_task(request("premium")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as full:
            await request("free")
        assert full.value.retry_after_s >= 1
        assert front.expected_s(Turn("free", 1.0, 2, lambda: room), CLASSES) == 5 / 2
        assert front.expected_s(Turn("premium", 1.0, 2, lambda: room), CLASSES) == 2 / 2
        tasks[0].cancel()
        room = True
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order[:2] == ["premium", "premium"]
        assert sorted(order[2:]) == ["free", "free"], "the one that left is not served"
        await request("free")
        assert order[-1] == "free", "nobody waits while there is room"

    asyncio.run(scenario())


def test_requests_wait_at_the_router_while_engines_have_enough_to_do() -> None:
    async def scenario() -> None:
        settings = {"classes": CLASSES, "routes": ROUTES, "front_queue": 1, "port": 0}
        async with World(**settings) as world:
            (prefill,) = (e for e in world.engines if e.url == world.p[0].url)
            prefill.load.prefill_sent("another", 10**6, 3600.0, asyncio.get_running_loop().time())
            waiting = asyncio.create_task(world.complete())
            shared = world.app[SHARED]
            await until(lambda: bool(shared.front.waiting), "it waits at the router")
            assert world.p[0].bodies == world.d[0].bodies == []
            refused = await world.complete()
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert await world.metric("requests_waiting", qos="free") == 1
            assert await world.metric("rejected_total", qos="free", cause="queue_full") == 1
            prefill.load.prefill_ended("another", asyncio.get_running_loop().time())
            assert (await waiting).status == 200

    run(scenario())


def test_a_prompt_larger_than_any_cache_stops_nobody() -> None:
    """No engine will ever have room for it: one that has nothing to do says so, and others go on."""

    async def scenario() -> None:
        async with World(front_queue=10) as world:
            (decode,) = (e for e in world.engines if e.url == world.d[0].url)
            decode.free_kv = 1000.0
            async with asyncio.timeout(5):
                large = await world.complete(prompt="word " * 10_000)
                assert large.status == 200, "the engine's own answer"
            decode.load.decode_sent("another", 10, 10)
            waiting = asyncio.create_task(world.complete(prompt="word " * 10_000))
            await until(lambda: bool(world.app[SHARED].front.waiting), "it waits for room")
            decode.load.decode_ended("another")
            assert (await waiting).status == 200

    run(scenario())


def test_without_a_front_queue_they_are_sent_at_once() -> None:
    async def scenario() -> None:
        async with World() as world:
            (prefill,) = (e for e in world.engines if e.url == world.p[0].url)
            prefill.load.prefill_sent("another", 10**6, 3600.0, asyncio.get_running_loop().time())
            assert (await world.complete()).status == 200
            prefill.load.prefill_ended("another", 0.0)

    run(scenario())


def test_a_wait_that_would_break_the_promise_is_refused_before_it_begins() -> None:
    async def scenario() -> None:
        promised = (QosClass(name="only", reserved_fraction=1.0, slo=Slo(ttft_ms=500)),)
        async with World(classes=promised, front_queue=100) as world:
            shared = world.app[SHARED]
            blocker = Turn("only", 3600.0, 1, lambda: False)
            task = asyncio.create_task(shared.front.wait(blocker, shared.config))
            await until(lambda: bool(shared.front.waiting), "somebody waits for long")
            refused = await world.complete()
            assert refused.status == 429
            assert await world.metric("rejected_total", qos="only", cause="ttft") == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario())


def test_both_engines_get_the_signed_class_and_never_the_clients() -> None:
    async def scenario() -> None:
        settings = {"classes": CLASSES, "routes": ROUTES}
        async with World(**settings, router_key=SECRET) as world:
            await world.post(
                "/v1/completions",
                {"model": "m", "prompt": "a"},
                **{"X-Tier": "premium", HEADER: "1.free.00"},
            )
            for fake in (world.p[0], world.d[0]):
                got = {name.lower(): value for name, value in fake.headers[0].items()}
                assert signed_class(got, class_key(SECRET), Seen()) == "premium"
            first, second = (fake.headers[0][HEADER] for fake in (world.p[0], world.d[0]))
            assert first != second, "an engine of both sides believes each once"
        async with World(**settings) as world:
            await world.post(
                "/v1/completions", {"model": "m", "prompt": "a"}, **{HEADER: "1.free.00"}
            )
            assert HEADER not in world.d[0].headers[0], "a client cannot speak for a router"

    run(scenario())
