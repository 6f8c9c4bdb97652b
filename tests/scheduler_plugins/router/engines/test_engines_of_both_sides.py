# SPDX-License-Identifier: Apache-2.0
"""A URL that is named on both sides is one engine: its loads are added, and it is not its own partner."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import aiohttp
import pytest
from router_fakes import DONE, FAST, FakeEngine, World, choices, event, run, until

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.counted_load import EngineLoad
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.policies.base import Decision, Policy, Request, Route, View
from scheduler_plugins.router.policies.registry import PREFILL
from scheduler_plugins.router.settings.config import RouterConfig


async def handing_over(world: World) -> None:
    """Wait until every engine that can hand KV over has been asked where."""
    engines = world.engines
    await until(lambda: all(one.address or not one.hands_over for one in engines), "all are known")


def partners(world: World) -> list[tuple[str, str]]:
    """The decode engine of each request, by the transfers that both sides were told of."""
    prefilled = {}
    for fake in (*world.p, *world.d):
        for params in filter(None, fake.params):
            if params.get("do_remote_decode"):
                prefilled[params["transfer_id"]] = fake.name
    return [
        (prefilled[params["remote_request_id"]], fake.name)
        for fake in (*world.p, *world.d)
        for params in filter(None, fake.params)
        if params.get("do_remote_prefill")
    ]


@pytest.mark.parametrize("policy", ["round_robin", "least_delay", "jsq", "random"])
def test_two_engines_of_both_sides_hand_over_to_each_other(policy: str) -> None:
    async def scenario() -> None:
        async with World(2, 0, both=True, policy=policy) as world:
            await handing_over(world)
            for n in range(40):
                reply = await world.complete(prompt=f"{n} says " * 50)
                assert reply.status == 200
            found = partners(world)
            assert len(found) == 40
            assert set(found) == {("p0", "p1"), ("p1", "p0")}, "each does each part"

    run(scenario())


def test_an_engine_that_is_alone_on_both_sides_answers_alone() -> None:
    async def scenario() -> None:
        async with World(1, 1, both=True) as world:
            assert (await world.complete()).status == 200
            assert partners(world) == [("p0", "d0")], "there is a partner"
            assert (await world.get("/health")).json["disaggregates"] is True
            await world.d[0].die()
            await world.down(world.d[0])
            assert (await world.get("/health")).json["disaggregates"] is False
            assert (await world.complete()).status == 200
            assert world.p[0].params[-1] is None, "it hands nothing over to itself"
            assert len(partners(world)) == 1

    run(scenario())


def test_the_loads_of_both_parts_are_added() -> None:
    async def scenario() -> None:
        released = asyncio.Event()

        async def holds(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
            if not body.get("stream"):  # a prompt for another engine
                await released.wait()
                return aiohttp.web.json_response({"id": "c", **choices("a")})
            response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(event("a"))
            await released.wait()
            await response.write(DONE)
            return response

        async with World(2, 0, both=True) as world:
            for fake in world.p:
                fake.behave = holds
            asked = [asyncio.create_task(world.complete(stream=True)) for _ in range(6)]
            await until(lambda: sum(fake.running for fake in world.p) == 12, "all run")
            loads = [world.known(fake) for fake in world.p]
            assert [(one.prefills, one.batch, one.open_requests) for one in loads] == [
                (3, 3, 6)
            ] * 2
            assert [one.in_flight for one in loads] == [6, 6]
            assert await world.metric("engine_requests_in_flight", role="both") == 12
            released.set()
            await asyncio.gather(*asked)

    run(scenario())


def test_an_engine_that_changes_to_both_sides_keeps_what_it_has() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=1) as world:
            pool = world.app[SHARED].pool
            known = world.known(world.d[0])
            known.load.decode_sent("open", 100, 10)
            settings = {**FAST, "prefill": pool.config.prefill, "decode": pool.config.decode}
            url = world.d[0].url
            world.d[0].engine_id = "engine-d0"
            pool.use(RouterConfig(**{**settings, "prefill": (*settings["prefill"], url)}))
            assert world.known(world.d[0]) is known
            assert (known.role, known.batch) == (Role.BOTH, 1)
            await until(lambda: known.address is not None, "it has been asked where it hands over")
            pool.use(RouterConfig(**settings))
            assert (known.role, known.batch, len(pool.engines)) == (Role.DECODE, 1, 3)
            known.load.decode_ended("open")

    run(scenario())


def test_an_engines_own_word_counts_no_request_of_ours_twice() -> None:
    """vLLM counts prompts and sequences together: of these two run and one waits."""
    load = EngineLoad()
    load.prefill_sent("a", 1000, 1.0, now_s=0.0)
    load.prefill_sent("b", 1000, 1.0, now_s=0.0)
    load.decode_sent("c", 500, 10)
    load.reported_requests(waiting=1, running=2, now_s=1.0)
    assert (load.batch, load.context, load.prefills) == (1, 500, 2)
    load.reported_requests(waiting=1, running=5, now_s=1.0)
    assert load.batch == 4, "three are of other clients"


def test_what_a_prefill_costs_is_shared_with_engines_of_both_sides() -> None:
    async def scenario() -> None:
        async with World(2, 0, both=True) as world:
            pool = world.app[SHARED].pool
            first, second = (world.known(fake) for fake in world.p)
            await until(lambda: all(one.models for one in pool.engines), "all have been asked")
            for tokens in [100, 700, 3000, 9000] * 40:
                pool.learnt(first, StepLoad.of([(0, tokens)]), 2e-3 * tokens)
            assert second.costs.prefill_s(3000) == pytest.approx(6.0, rel=0.1)

    run(scenario())


class Same(Policy):
    """Names one engine for both parts."""

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        name = view.engines(Role.DECODE)[0].name
        return Route(name, name)


def test_an_engine_that_a_policy_names_for_both_parts_answers_alone() -> None:
    async def scenario() -> None:
        async with World(2, 0, both=True) as world:
            world.app[SHARED].policy = Same()
            assert (await world.complete()).status == 200
            assert world.p[0].params == [None]

    run(scenario())


@pytest.mark.parametrize("policy", PREFILL)
def test_one_engine_of_both_sides_answers_alone_by_every_policy(policy: str) -> None:

    async def scenario() -> None:
        async with World(1, 0, both=True, policy=policy) as world:
            assert (await world.complete()).status == 200
            assert world.p[0].params == [None]

    run(scenario())
