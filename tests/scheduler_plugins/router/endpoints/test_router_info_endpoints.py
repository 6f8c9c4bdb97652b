# SPDX-License-Identifier: Apache-2.0
"""Small endpoints that clients and platforms ask besides the model list and `/health`."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, run


class Versioned(FakeEngine):
    """An engine that tells its version."""

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/version", self._version)

    odd: web.Response | None = None
    """What it answers instead of its version and its models."""

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return self.odd or web.json_response({"version": f"1-{self.name}"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return self.odd or await super()._models(request)


def test_one_model_is_told_by_its_name() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.d[0].model = world.p[0].model = "org/big"
            found = await world.get("/v1/models/org/big")
            assert (found.status, found.json["id"]) == (200, "org/big")
            missing = await world.get("/v1/models/org/small")
            assert (missing.status, missing.json["error"]["code"]) == (404, 404)
            assert "org/small" in missing.json["error"]["message"]
            for fake in (world.d[0], world.p[0]):
                await fake.die()
                await world.down(fake)
            assert (await world.get("/v1/models/org/big")).status == 503

    run(scenario())


@pytest.mark.parametrize(
    "odd",
    [
        {"text": "<html></html>", "content_type": "text/html"},
        {"text": "", "content_type": "application/json"},
        {"text": "{}", "content_type": "application/json"},
        {"text": '{"error": {"message": "no"}}', "content_type": "application/json"},
        {"status": 204},
    ],
)
def test_what_is_no_answer_is_not_told(odd: dict[str, Any]) -> None:
    async def scenario() -> None:
        made = World()
        made.p, made.d = [Versioned("p0", "engine-p0")], [Versioned("d0")]
        async with made as world:
            for _ in range(2):
                world.d[0].odd = web.Response(**odd)
                assert (await world.get("/version")).json == {"version": "1-p0"}
                world.d[0].odd = web.Response(**odd)
                assert [one["id"] for one in (await world.get("/v1/models")).json["data"]]

    run(scenario())


def test_a_model_is_told_to_clients_with_the_key_only() -> None:
    async def scenario() -> None:
        async with World(client_key="front") as world:
            assert (await world.get("/v1/models/m")).status == 401

    run(scenario())


def test_the_version_is_that_of_an_engine_that_is_up() -> None:
    async def scenario() -> None:
        made = World()
        made.p, made.d = [Versioned("p0", "engine-p0")], [Versioned("d0")]
        async with made as world:
            assert (await world.get("/version")).json == {"version": "1-d0"}
            await world.d[0].die()
            assert (await world.get("/version")).json == {"version": "1-p0"}
            await world.p[0].die()
            assert (await world.get("/version")).status == 503

    run(scenario())


def test_a_ping_is_health_without_the_engines_names() -> None:
    async def scenario() -> None:
        async with World() as world:
            for found in (await world.get("/ping"), await world.post("/ping", {})):
                assert (found.status, found.content) == (200, b"")
            for fake in (world.d[0], world.p[0]):
                await fake.die()
                await world.down(fake)
            assert (await world.get("/ping")).status == 503

    run(scenario())
