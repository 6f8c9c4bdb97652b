# SPDX-License-Identifier: Apache-2.0
"""The client's own limit, at the moments at which it must not spoil an answer, and the limit of a router that stops."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, Reply, World, choices, event, forever, run, says, until

from scheduler_plugins.router import server
from scheduler_plugins.router.client.downstream import Downstream
from scheduler_plugins.router.handoff.prefill import PrefillCopy

LIMIT = "X-Request-Timeout-Ms"
LIMIT_MS = "3600000"


class Limit:
    """The client's limit of an hour. It passes when a test says so: by the clock, a busy machine would decide when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timeout = asyncio.timeout

        def noted(delay_s: float | None) -> asyncio.Timeout:
            scope = timeout(delay_s)
            if delay_s == float(LIMIT_MS) / 1e3:
                self._scope = scope
            return scope

        monkeypatch.setattr(asyncio, "timeout", noted)

    def passes(self) -> None:
        """The hour is over for the request that came last."""
        self._scope.reschedule(asyncio.get_running_loop().time())


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    return Limit(monkeypatch)


@pytest.mark.parametrize("streams", [True, False])
def test_a_limit_that_passes_after_the_answer_leaves_answer_and_connection_alone(
    monkeypatch: pytest.MonkeyPatch, limit: Limit, streams: bool
) -> None:
    """It is there, and what is left to do is to let go of the engines."""
    leave = PrefillCopy.__aexit__

    async def too_late(self: PrefillCopy, *args: Any) -> None:
        await leave(self, *args)
        limit.passes()
        await forever()

    async def scenario() -> None:
        async with World() as world:
            monkeypatch.setattr(PrefillCopy, "__aexit__", too_late)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            body = b'{"prompt": "a", "stream": %s}' % (b"true" if streams else b"false")
            head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n%s\r\n"
            for _ in range(2):
                writer.write(head % (len(body), f"{LIMIT}: {LIMIT_MS}\r\n".encode()) + body)
                answer = await reader.readuntil(b"\r\n0\r\n\r\n" if streams else b'"d0"}')
                assert b"200 OK" in answer
                assert b"error" not in answer
                await world.idle()
            writer.close()
            await writer.wait_closed()
            assert await world.metric("requests_total", outcome="ok") == 2

    run(scenario())


def test_a_whole_answer_that_is_stopped_halfway_gets_no_event_into_its_body(
    monkeypatch: pytest.MonkeyPatch, limit: Limit
) -> None:
    async def never(self: Downstream) -> web.StreamResponse:
        limit.passes()
        await forever()
        raise AssertionError

    async def scenario() -> None:
        async with World() as world:
            monkeypatch.setattr(Downstream, "finish", never)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n%s: %s\r\nContent-Length: 15\r\n\r\n"
            )
            writer.write(head % (LIMIT.encode(), LIMIT_MS.encode()) + b'{"prompt": "a"}')
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
            assert b"data:" not in answer
            writer.close()
            assert await world.metric("requests_total", outcome="client_gone") == 1

    run(scenario())


def test_a_stream_that_is_late_says_so_and_its_connection_serves_again(limit: Limit) -> None:
    async def scenario() -> None:
        async with World() as world:
            world.d[0].behave = says(event("a"), then="hang")
            for _ in range(2):
                async with world.client.post(
                    "/v1/completions",
                    json={"prompt": "a", "stream": True},
                    headers={LIMIT: LIMIT_MS},
                ) as response:
                    begun = await response.content.readany()
                    limit.passes()
                    reply = Reply(200, response.headers, begun + await response.read())
                assert reply.events[-1]["error"]["type"] == "stream_interrupted"
                assert LIMIT in reply.events[-1]["error"]["message"]
            assert await world.metric("requests_total", outcome="deadline") == 2

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_router_that_stops_tells_the_clients_whose_time_is_over(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream gets the error event, and a request without an answer 503; nobody waits for the limit twice."""
    monkeypatch.setattr(server, "LAST_S", 20.0)  # on a busy machine, too

    async def scenario() -> None:
        async with World(shutdown_timeout_s=0.3) as world:
            world.d[0].behave = says(event("a"), then="hang") if stream else hangs
            asked = asyncio.create_task(world.complete(stream=stream))
            await until(lambda: world.d[0].running == 1, "the engine has the request")
            if stream:
                await asyncio.sleep(0.1)
            begun_s = asyncio.get_running_loop().time()
            await world.server.close()
            assert asyncio.get_running_loop().time() - begun_s < 20.0
            reply = await asked
            assert "the router is being stopped" in reply.text
            if stream:
                assert reply.events[0] == choices("a")
                assert reply.events[-1]["error"]["type"] == "stream_interrupted"
            else:
                assert reply.status == 503
                assert reply.headers["Retry-After"] == "1"

    async def hangs(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        await forever()
        raise AssertionError

    run(scenario())
