# SPDX-License-Identifier: Apache-2.0
"""A prefill engine dies with its copy, before the decode engine has answered."""

from typing import Any

from aiohttp import web
from router_fakes import FakeEngine, World, answer, choices, drop_at_once, hang, run, until

from scheduler_plugins.router.endpoints.app_keys import SHARED


async def needs_p1(engine, request, body):  # type: ignore[no-untyped-def]
    source = (body.get("kv_transfer_params") or {}).get("remote_engine_id")
    return await (answer if source in (None, "engine-p1") else hang)(engine, request, body)


def test_another_prefill_engine_computes_the_prompt() -> None:
    async def scenario() -> None:
        async with World(prefill=2, health_interval_s=30) as world:
            world.p[0].behave = drop_at_once
            world.d[0].behave = needs_p1
            assert (await world.complete()).status == 200
            sources = [(params or {}).get("remote_engine_id") for params in world.d[0].params]
            assert sources == ["engine-p0", "engine-p1"]
            assert await world.metric("retries_total", cause="prefill_refused") == 1

    run(scenario())


def test_a_decode_engine_that_answers_meanwhile_is_not_disturbed() -> None:
    async def scenario() -> None:
        async with World(prefill=2, health_interval_s=30) as world:
            world.p[0].behave = drop_at_once
            assert (await world.complete()).status == 200
            assert len(world.d[0].bodies) == 1

    run(scenario())


def test_what_the_index_expected_is_compared_with_what_the_engine_says() -> None:
    async def scenario() -> None:
        async with World() as world:
            usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}

            async def telling(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                return web.json_response({"id": "x", "usage": usage, **choices("a")})

            counted = world.app[SHARED].metrics.registry.get_sample_value
            labels = {"what": "actual"}

            async def after_prefill(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                await until(
                    lambda: counted("pd_router:cached_tokens_total", labels) == 2, "it is counted"
                )
                return await answer(engine, request, body)

            world.p[0].behave, world.d[0].behave = telling, after_prefill
            assert (await world.complete()).status == 200
            world.p[0].behave = answer  # it says nothing of its cache
            assert (await world.complete()).status == 200
            assert counted("pd_router:cached_tokens_total", labels) == 2

    run(scenario())
