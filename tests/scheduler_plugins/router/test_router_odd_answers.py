# SPDX-License-Identifier: Apache-2.0
"""Engines, or what stands before them, that answer as no engine should."""

import asyncio
import itertools
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import (
    DEADLINE_S,
    DONE,
    FakeEngine,
    World,
    answer,
    choices,
    event,
    forever,
    run,
    says,
    slow,
    status,
)

from scheduler_plugins.admission.endpoints import GENERATE
from scheduler_plugins.router.client import answers
from scheduler_plugins.router.client.answers import (
    EVENT_ENDS,
    EventCutter,
    before_error,
    retry_after_s,
)
from scheduler_plugins.router.engines import circuit
from scheduler_plugins.router.engines import exchange as exchange_module
from scheduler_plugins.router.request import responder

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
    content: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's page, or another server at its port. It is the fastest, so it would get nearly all requests."""

    monkeypatch.setattr(circuit, "FIRST_PAUSE_S", circuit.LONGEST_PAUSE_S)  # for all of the test

    async def odd(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=content, content_type="text/html")

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = odd
            for _ in range(12):
                assert (await world.complete(stream=stream)).status == 200
            assert await world.metric("retries_total", cause="malformed") == 5, "then it is paused"
            world.d[1].behave = world.p[0].behave = odd
            reply = await world.complete(stream=stream)
            assert reply.status == 503
            assert "malformed" in reply.text
            assert not content or content not in reply.text

    run(scenario())


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"choices": null}',
        b'{"choices": []}',
        b'{"error": {"message": "no", "code": 500}}',
        b'{"error": "no"}',
        b'{"choices": [{"text": "\xff"}]}',
        b'{"choices": null, "pad": "' + b" " * (2 << 20) + b'"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", GENERATE])
def test_an_answer_that_is_none_is_asked_for_elsewhere(content: bytes, path: str) -> None:
    async def odd(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=content, content_type="application/json")

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = odd
            body = {"model": "m", "prompt": "a", "token_ids": [1], "sampling_params": {}}
            for _ in range(2):
                assert (await world.post(path, body)).json["served_by"] == "d1"
            cause = "status_500" if b"500" in content else "malformed"
            assert await world.metric("retries_total", cause=cause) >= 1
            world.p[0].behave = world.d[1].behave = odd
            reply = await world.post(path, body)
            assert (reply.status, reply.json["error"]["type"]) == (503, "service_unavailable")

    run(scenario())


def test_an_error_of_the_client_with_status_200_reaches_it_with_its_own_status() -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}

    async def odd(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(error)

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            for fake in world.p + world.d:
                fake.behave = odd
            reply = await world.complete()
            assert (reply.status, reply.json) == (400, error)
            assert await world.metric("retries_total") == 0

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_is_no_answer_to_who_wants_none_and_the_other_way_round(stream: bool) -> None:
    async def odd(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        return await answer(engine, request, {**body, "stream": not stream})

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = odd
            for _ in range(2):
                assert "d1" in (await world.complete(stream=stream)).text
            assert await world.metric("retries_total", cause="malformed") >= 1

    run(scenario())


@pytest.mark.parametrize("content", [b"{}", b'{"choices": null}', b'{"error": {"message": "no"}}'])
def test_a_prefill_engine_that_answers_nothing_has_failed_its_copy(content: bytes) -> None:
    async def odd(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=content, content_type="application/json")

    async def scenario() -> None:
        async with World(prefill=2, decode=1) as world:
            world.p[0].behave, world.d[0].behave = odd, slow(0.1)
            for _ in range(2):
                assert (await world.complete()).status == 200
            assert await world.metric("prefill_failures_total", cause="malformed") >= 1

    run(scenario())


@pytest.mark.parametrize("code", [201, 202, 204, 206])
def test_no_other_success_than_200_is_an_answer(code: int) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = status(code)
            for _ in range(2):
                assert (await world.complete()).status == 200
            assert await world.metric("retries_total", cause="malformed") >= 1

    run(scenario())


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_an_answer_without_an_end_does_not_take_all_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responder, "MOST_EVENT_BYTES", 1 << 20)
    monkeypatch.setattr(answers, "MOST_EVENT_BYTES", 1 << 20)
    monkeypatch.setattr(exchange_module, "MOST_ANSWER_BYTES", 1 << 20)
    sent = 0

    async def endless(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(b"data: " if "event" in kind else b'{"text": "')
        for _ in range(500):
            await response.write(b"z" * 65536)
            sent += 65536
        return response

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = endless
            for _ in range(2):
                assert (await world.complete(stream="event" in kind)).status == 200
            assert await world.metric("retries_total", cause="malformed") >= 1
            assert sent < 500 * 65536

    run(scenario())


@given(
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"a", b"data: x"]), max_size=30),
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_events_are_the_same_however_they_are_cut(parts: list[bytes], sizes: list[int]) -> None:
    whole, at, got, cutter = b"".join(parts), 0, b"", EventCutter()
    for size in itertools.cycle(sizes):
        if at >= len(whole):
            break
        got, at = got + cutter.feed(whole[at : at + size]), at + size
    ends = [whole.rfind(mark) + len(mark) for mark in EVENT_ENDS if mark in whole]
    assert got + cutter.held == whole
    assert got.endswith(EVENT_ENDS) or not got
    # An empty line behind an end is another end, or the beginning of what follows.
    assert cutter.held.lstrip(b"\r\n") == whole[max(ends, default=0) :].lstrip(b"\r\n")


@pytest.mark.parametrize("then", ["end", "hang", "die"])
@pytest.mark.parametrize("more", [b"", DONE, event("late"), b": comment\n\n"])
def test_nothing_comes_after_the_end_mark(more: bytes, then: str) -> None:
    async def scenario() -> None:
        async with World(idle_timeout_s=DEADLINE_S) as world:
            world.d[0].behave = says(event("a"), DONE, *filter(None, (more,)), then=then)
            async with asyncio.timeout(DEADLINE_S / 2):
                reply = await world.complete(stream=True)
            assert reply.events == [choices("a"), "[DONE]"]
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
