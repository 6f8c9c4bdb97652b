# SPDX-License-Identifier: Apache-2.0
"""Engines of several models behind one router."""

import pytest
from router_fakes import World, run, status, until

from scheduler_plugins.router.endpoints.app_keys import SHARED


def two_models(**settings: object) -> World:
    """A pair with model `m`, and a pair with `other`."""
    world = World(prefill=2, decode=2, **settings)
    world.p[1].model = world.d[1].model = "other"
    return world


@pytest.mark.parametrize("policy", ["round_robin", "conductor", "prefix_hash"])
def test_a_request_goes_to_engines_of_its_model(policy: str) -> None:
    async def scenario() -> None:
        async with two_models(policy=policy) as world:
            for name, n in (("m", 0), ("adapter", 0), ("other", 1), ("other-adapter", 1)) * 2:
                reply = await world.complete(model=name)
                assert (reply.status, reply.json["served_by"]) == (200, f"d{n}")
            assert {body["model"] for body in world.p[0].bodies} <= {"m", "adapter"}
            assert {body["model"] for body in world.p[1].bodies} <= {"other", "other-adapter"}
            world.d[1].behave = status(500)
            assert (await world.complete(model="other")).json["served_by"] == "p1"
            world.p[1].behave = status(500)
            failed = await world.complete(model="other")
            assert failed.status == 503, "engines of another model do not help"
            assert failed.json["error"]["engines"] == {
                "decode": {"status_500": 1},
                "prefill": {"status_500": 1},
            }

    run(scenario())


def test_a_model_whose_engines_are_down_is_not_asked_of_others() -> None:
    async def scenario() -> None:
        async with two_models() as world:
            for fake in (world.p[1], world.d[1]):
                await fake.die()
                await world.down(fake)
            assert (await world.complete(model="other")).status == 503
            assert (await world.complete(model="m")).status == 200

    run(scenario())


def test_a_model_that_nobody_serves_is_refused_by_an_engine() -> None:
    async def scenario() -> None:
        async with two_models() as world:
            for fake in world.p + world.d:
                fake.behave = status(404)
            assert (await world.complete(model="unheard of")).status == 404
            unnamed = await world.post("/v1/completions", {"prompt": "a"})
            assert unnamed.status == 404, "the engine's own answer"

    run(scenario())


def test_all_models_are_listed_once() -> None:
    async def scenario() -> None:
        async with two_models() as world:
            listed = (await world.get("/v1/models")).json["data"]
            names = [one["id"] for one in listed]
            assert names == ["m", "adapter", "other", "other-adapter"]

    run(scenario())


def test_an_adapter_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("scheduler_plugins.router.engines.slow_probes.MODELS_LOOK_S", 0.05)
        async with two_models() as world:
            world.d[1].model = world.p[1].model = "new"
            pool = world.app[SHARED].pool
            await until(
                lambda: sum("new" in one.models for one in pool.engines) == 2,
                "they are asked again",
            )
            assert (await world.complete(model="new")).json["served_by"] == "d1"

    run(scenario())
