# SPDX-License-Identifier: Apache-2.0
"""Web pages that use the router from their visitors' browsers."""

from __future__ import annotations

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, run, stream

from scheduler_plugins.router.settings.config import RouterConfig

CHAT = "/v1/chat/completions"
PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
ASKED = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "Access-Control-Allow-Origin"


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/nothing"])
def test_a_browser_may_ask_without_a_key_whether_it_may_ask(path: str) -> None:
    async def scenario() -> None:
        async with World(allowed_origins=(PAGE,), client_key="front") as world:
            async with world.client.options(path, headers={"Origin": PAGE, **ASKED}) as found:
                assert (found.status, found.headers[ALLOWED]) == (204, PAGE)
                wanted = ASKED["Access-Control-Request-Headers"]
                assert found.headers["Access-Control-Allow-Headers"] == wanted
                assert "POST" in found.headers["Access-Control-Allow-Methods"]
            async with world.client.options(path, headers={"Origin": OTHER, **ASKED}) as found:
                assert found.status == 403
                assert ALLOWED not in found.headers
            async with world.client.options(path) as found:
                assert found.status != 204, "no browser's question"

    run(scenario())


def test_pages_of_these_origins_read_every_answer_and_others_none() -> None:
    async def scenario() -> None:
        async with World(allowed_origins=(PAGE,)) as world:
            body = {"model": "m", "messages": [], "stream": True}
            for sent, status in ((body, 200), ({}, 400)):
                found = await world.post(CHAT, sent, Origin=PAGE)
                assert (found.status, found.headers[ALLOWED]) == (status, PAGE)
                assert "Origin" in found.headers["Vary"], "a cache keeps them apart"
                assert ALLOWED not in (await world.post(CHAT, sent, Origin=OTHER)).headers
            assert ALLOWED not in (await world.post(CHAT, body)).headers
            async with world.client.get("/health", headers={"Origin": PAGE}) as told:
                assert ALLOWED not in told.headers, "it names the engines"

    run(scenario())


def test_the_routers_word_counts_and_not_the_engines() -> None:
    async def open_to_all(
        engine: FakeEngine, request: web.Request, body: dict[str, object]
    ) -> web.StreamResponse:
        return web.json_response({}, headers={ALLOWED: "*"})

    async def scenario() -> None:
        async with World(allowed_origins=(PAGE,)) as world:
            world.d[0].behave = open_to_all
            body = {"model": "m", "messages": []}
            assert (await world.post(CHAT, body, Origin=PAGE)).headers.getall(ALLOWED) == [PAGE]
            assert ALLOWED not in (await world.post(CHAT, body, Origin=OTHER)).headers

    run(scenario())


def test_all_origins() -> None:
    async def scenario() -> None:
        async with World(allowed_origins=("*",)) as world:
            world.d[0].behave = stream(2)
            body = {"model": "m", "messages": [], "stream": True}
            assert (await world.post(CHAT, body, Origin=OTHER)).headers[ALLOWED] == "*"

    run(scenario())


def test_without_the_option_nothing_is_said_of_origins() -> None:
    async def scenario() -> None:
        async with World() as world:
            async with world.client.options(CHAT, headers={"Origin": PAGE, **ASKED}) as found:
                assert (found.status, found.headers["Allow"]) == (405, "POST")
            found = await world.post(CHAT, {"model": "m", "messages": []}, Origin=PAGE)
            assert ALLOWED not in found.headers

    run(scenario())


@pytest.mark.parametrize("origin", ["chat.example.org", "https://a.org/", "https://a.org/x", ""])
def test_an_origin_is_no_address_of_a_page(origin: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_origins .*must look like"):
        RouterConfig(prefill=("p:1",), decode=("d:1",), allowed_origins=(origin,))
