# SPDX-License-Identifier: Apache-2.0
"""Web pages that use the router from their visitors' browsers."""

from __future__ import annotations

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, answer, run, stream

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
        more = {
            "Access-Control-Allow-Credentials": "true",
            "access-control-expose-headers": "*",
            "Access-Control-Allow-Private-Network": "true",
            "Set-Cookie": "session=engine",
            "Alt-Svc": 'h3="engine:443"',
        }
        answered = await answer(engine, request, dict(body))
        answered.headers.update({ALLOWED: "*", **more})
        return answered

    async def scenario() -> None:
        async with World(allowed_origins=(PAGE,)) as world:
            world.d[0].behave = open_to_all
            body = {"model": "m", "messages": []}
            found = (await world.post(CHAT, body, Origin=PAGE)).headers
            assert found.getall(ALLOWED) == [PAGE]
            of_router = {ALLOWED, "Access-Control-Expose-Headers"}
            assert {
                name for name in found if name.lower().startswith("access-control")
            } == of_router
            assert found.getall("Access-Control-Expose-Headers") == ["X-Request-Id, Retry-After"]
            assert not {"Set-Cookie", "Alt-Svc"} & set(found)
            assert ALLOWED not in (await world.post(CHAT, body, Origin=OTHER)).headers
        async with World() as world:
            world.d[0].behave = open_to_all
            found = (await world.post(CHAT, body)).headers
            assert not [name for name in found if name.lower().startswith("access-control")]

    run(scenario())


def test_all_origins() -> None:
    async def scenario() -> None:
        async with World(allowed_origins=("*",)) as world:
            world.d[0].behave = stream(2)
            body = {"model": "m", "messages": [], "stream": True}
            assert (await world.post(CHAT, body, Origin=OTHER)).headers[ALLOWED] == "*"

    run(scenario())


PAGES_REQUESTS = (
    ("POST", CHAT, {"Origin": OTHER, "Content-Type": "text/plain"}),
    ("POST", CHAT, {"Origin": "null", "Content-Type": "text/plain"}),
    ("POST", "/ping", {"Origin": OTHER}),
    ("OPTIONS", CHAT, {"Origin": OTHER, **ASKED}),
    ("GET", "/live", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
    ("GET", "/v1/models", {"Origin": OTHER}),
)
"""What a browser sends for any page that a user visits, without asking first."""


@pytest.mark.parametrize(("method", "path", "headers"), PAGES_REQUESTS)
def test_no_page_that_nobody_allowed_reaches_an_engine_or_takes_a_seat(
    method: str, path: str, headers: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with World() as world:
            body = b'{"model": "m", "messages": []}' if method == "POST" else None
            async with world.client.request(method, path, data=body, headers=headers) as found:
                assert found.status == 403
                assert "--allowed-origins" in await found.text()
            assert not world.p[0].bodies + world.d[0].bodies
            assert (await world.post(CHAT, body or b'{"messages": []}')).status == 200

    run(scenario())


def test_a_page_that_a_front_serves_under_the_same_name_may_ask() -> None:
    async def scenario() -> None:
        async with World(host="0.0.0.0") as world:
            body = {"model": "m", "messages": []}
            same = {"Origin": PAGE, "Host": "chat.example.org"}
            assert (await world.post(CHAT, body, **same)).status == 200
            assert (await world.post(CHAT, body, **{**same, "Origin": OTHER})).status == 403
        async with World() as world:  # on loopback the name may have been made to lead here
            assert (await world.post(CHAT, body, **same)).status == 403

    run(scenario())


@pytest.mark.parametrize("path", ["/", "/live", "/health", "/metrics"])
def test_a_name_that_was_made_to_lead_to_this_machine_reads_nothing_of_the_engines(
    path: str,
) -> None:
    async def scenario() -> None:
        async with World(allowed_origins=(PAGE,)) as world:
            statuses = {}
            for host in ("evil.example.org", "localhost:1", "[::1]:1", "chat.example.org"):
                async with world.client.get(path, headers={"Host": host}) as found:
                    statuses[host] = found.status
            assert statuses == {
                "evil.example.org": 403,
                "localhost:1": 200,
                "[::1]:1": 200,
                "chat.example.org": 200,
            }

    run(scenario())


@pytest.mark.parametrize("origin", ["chat.example.org", "https://a.org/", "https://a.org/x", ""])
def test_an_origin_is_no_address_of_a_page(origin: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_origins .*must look like"):
        RouterConfig(prefill=("p:1",), decode=("d:1",), allowed_origins=(origin,))
