# SPDX-License-Identifier: Apache-2.0
"""The client's own limit, at the moments at which it must not spoil an answer."""

import asyncio
from typing import Any

import pytest
from router_fakes import World, run, stream

from scheduler_plugins.router.client.downstream import Downstream
from scheduler_plugins.router.handoff.prefill import PrefillCopy

LIMIT = "X-Request-Timeout-Ms"


@pytest.mark.parametrize("streams", [True, False])
def test_a_limit_that_passes_after_the_answer_leaves_answer_and_connection_alone(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """It is there, and what is left to do is to let go of the engines."""
    leave = PrefillCopy.__aexit__

    async def slowly(self: PrefillCopy, *args: Any) -> None:
        await leave(self, *args)
        await asyncio.sleep(0.6)

    async def scenario() -> None:
        async with World() as world:
            monkeypatch.setattr(PrefillCopy, "__aexit__", slowly)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            body = b'{"prompt": "a", "stream": %s}' % (b"true" if streams else b"false")
            head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n%s\r\n"
            limit = f"{LIMIT}: 300\r\n".encode()
            for _ in range(2):
                writer.write(head % (len(body), limit) + body)
                answer = await reader.readuntil(b"\r\n0\r\n\r\n" if streams else b'"d0"}')
                assert b"200 OK" in answer
                assert b"error" not in answer
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.7)
            assert await world.metric("requests_total", outcome="internal_error") == 0
            assert await world.metric("requests_total", outcome="deadline") == 0

    run(scenario())


def test_a_whole_answer_that_is_stopped_halfway_gets_no_event_into_its_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(self: Downstream) -> None:
        await asyncio.sleep(5)

    async def scenario() -> None:
        async with World() as world:
            monkeypatch.setattr(Downstream, "finish", never)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n%s: 200\r\nContent-Length: 15\r\n\r\n"
            )
            writer.write(head % LIMIT.encode() + b'{"prompt": "a"}')
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
            assert b"data:" not in answer
            writer.close()
            monkeypatch.undo()

    run(scenario())


def test_a_stream_that_is_late_says_so_and_its_connection_serves_again() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.d[0].behave = stream(20, gap_s=0.1)
            headers = {LIMIT: "300"}
            for _ in range(2):
                reply = await world.post(
                    "/v1/completions", {"prompt": "a", "stream": True}, **headers
                )
                assert reply.events[-1]["error"]["type"] == "stream_interrupted"
                assert LIMIT in reply.events[-1]["error"]["message"]
            assert await world.metric("requests_total", outcome="deadline") == 2

    run(scenario())
