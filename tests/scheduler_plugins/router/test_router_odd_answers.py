# SPDX-License-Identifier: Apache-2.0
"""Engines, or what stands before them, that answer as no engine should."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from router_fakes import DONE, FakeEngine, World, event, forever, run, says, status

from scheduler_plugins.router.client.answers import before_error, retry_after_s

ERROR = b'data: {"error": {"message": "EngineCore is dead", "code": 500}}\n\n'


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("9" * 5000, 1),
        ("Mon, 1 Jan 99999999999999999999 0:0:0", 1),
        ("Wed, 01 Jan 0001 00:00:00 -9999", 1),
        ("-5", 1),
        ("7", 7),
        ("99999", 3600),
        ("", 1),
    ],
)
def test_any_retry_after_is_understood_somehow(told: str, seconds: int) -> None:
    assert retry_after_s({"Retry-After": told}) == seconds


@pytest.mark.parametrize("code", [301, 302, 304, 307, 308])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_redirection_never_shows_a_client_where_an_engine_is(code: int, engines: int) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=engines) as world:
            behave = status(code, Location=f"{world.d[0].url}/elsewhere")
            world.d[0].behave = behave
            reply = await world.complete()
            assert reply.status == 200, "another engine answers"
            for fake in world.p + world.d:
                fake.behave = behave
            async with world.client.post(
                "/v1/completions", json={"model": "m", "prompt": "a"}, allow_redirects=False
            ) as response:
                assert response.status == 503
                assert "Location" not in response.headers
                assert str(world.d[0].port) not in await response.text()

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["<html>Welcome</html>", '{"choices": [{"te', "[1, 2]", ""])
def test_an_engine_that_answers_200_with_no_completion_gets_no_client(
    content: str, stream: bool
) -> None:
    """A proxy's page, or another server at its port. It is the fastest, so it would get nearly all requests."""

    async def odd(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=content, content_type="text/html")

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = odd
            for _ in range(12):
                assert (await world.complete(stream=stream)).status == 200
            assert await world.metric("retries_total", cause="malformed") == 5  # then it is paused
            world.d[1].behave = world.p[0].behave = odd
            reply = await world.complete(stream=stream)
            assert reply.status == 503
            assert "malformed" in reply.text
            assert not content or content not in reply.text

    run(scenario())


@pytest.mark.parametrize("then", ["end", "hang", "die"])
@pytest.mark.parametrize("more", [b"", DONE, event("late"), b": comment\n\n"])
def test_nothing_comes_after_the_end_mark(more: bytes, then: str) -> None:
    async def scenario() -> None:
        async with World(idle_timeout_s=5.0) as world:
            world.d[0].behave = says(event("a"), DONE, *filter(None, (more,)), then=then)
            async with asyncio.timeout(4):
                reply = await world.complete(stream=True)
            assert reply.events == [{"text": "a"}, "[DONE]"]
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())


def test_the_error_of_an_interrupted_stream_names_no_engine() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=1) as world:

            async def breaks_http(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(event("a"))
                await asyncio.sleep(0.05)
                assert request.transport is not None
                request.transport.write(b"no chunk's size\r\n")
                await forever()
                return response

            world.d[0].behave = breaks_http
            reply = await world.complete(stream=True)
            error = reply.events[-1]["error"]
            assert error["type"] == "stream_interrupted"
            assert "127.0.0.1" not in error["message"]
            assert str(world.d[0].port) not in error["message"]

    run(scenario())


def test_an_engines_own_error_is_found_wherever_it_is() -> None:
    assert before_error(event("a") + ERROR + DONE) == (event("a"), (500, "EngineCore is dead"))
    assert before_error(ERROR) == (b"", (500, "EngineCore is dead"))
    theirs = event('data: {"error": {"message": "said", "code": 500}}')
    assert before_error(theirs) == (theirs, None), "a text that says so is none"
    client = b'data: {"error": {"message": "too long", "code": 400}}\n\n'
    assert before_error(client) == (client, None)
