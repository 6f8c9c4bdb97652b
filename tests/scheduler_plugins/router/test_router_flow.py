# SPDX-License-Identifier: Apache-2.0
"""Requests on healthy engines: who is sent what, and what comes back."""

import asyncio
import json

import pytest
from router_fakes import DONE, World, event, run, slow, stream, until

from pd_connector.kv.geometry import MAX_LAYERS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_both_sides_get_the_request_at_the_same_time() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = slow(30)
            world.d[0].behave = slow(30)
            task = asyncio.create_task(world.complete())
            await until(lambda: world.p[0].running == world.d[0].running == 1, "both are running")
            assert [engine.in_flight for engine in world.engines] == [1, 1]
            assert await world.metric("engine_requests_in_flight") == 2
            assert await world.metric("requests_in_flight") == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario())


def test_the_two_copies_carry_the_contract() -> None:
    async def scenario() -> None:
        async with World() as world:
            request = {**CHAT, "max_completion_tokens": 9, "temperature": 0.5, "tools": [{"a": 1}]}
            reply = await world.post("/v1/chat/completions", {**request, "logprobs": True})
            assert reply.json["served_by"] == "d0"
            decode, prefill = world.d[0].bodies[0], world.p[0].bodies[0]
            transfer = prefill["kv_transfer_params"]["transfer_id"]
            assert len(transfer) == 32
            assert decode == {
                **request,
                "logprobs": True,
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "remote_request_id": transfer,
                    "remote_engine_id": "engine-p0",
                    "remote_host": "127.0.0.1",
                    "remote_port": 7000,
                    "remote_ranks": [["127.0.0.1", 7000, 0, MAX_LAYERS, 0]],
                    "tp_size": 1,
                    "remote_block_ids": None,
                },
            }
            assert prefill == {
                **request,
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "stream": False,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "transfer_id": transfer,
                },
            }

    run(scenario())


def test_every_request_has_a_transfer_id_of_its_own() -> None:
    async def scenario() -> None:
        async with World() as world:
            for _ in range(3):
                await world.complete()
            ids = {params["remote_request_id"] for params in world.d[0].params if params}
            assert len(ids) == 3

    run(scenario())


def test_a_stream_reaches_the_client_byte_for_byte() -> None:
    async def scenario() -> None:
        async with World() as world:
            reply = await world.complete(stream=True)
            assert reply.content == b"".join(event(f"d0{n}") for n in range(4)) + DONE
            assert reply.headers["Content-Type"] == "text/event-stream"
            assert world.p[0].bodies[0]["stream"] is False
            assert await world.metric("time_to_first_token_seconds_count") == 1
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())


def test_events_are_sent_on_as_they_come() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.d[0].behave = stream(2, then="hang")
            body = {"prompt": "hello", "stream": True}
            async with world.client.post("/v1/completions", json=body) as response:
                assert await response.content.readuntil(b"\n\n") == event("d00")
                assert await response.content.readuntil(b"\n\n") == event("d01")

    run(scenario())


def test_engines_of_both_sides_take_turns() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=3) as world:
            for _ in range(6):
                await world.complete()
            await world.idle()
            assert [len(d.bodies) for d in world.d] == [2, 2, 2]
            assert [len(p.bodies) for p in world.p] == [3, 3]

    run(scenario())


def test_what_one_transfer_id_cannot_name_goes_to_decode_alone() -> None:
    async def scenario() -> None:
        async with World() as world:
            for body in (
                {"prompt": ["a", "b"]},
                {"prompt": [[1, 2], [3]]},
                {"n": 2},
                {"best_of": 2},
                {"use_beam_search": True},
                {"prompt_logprobs": 1},
                {"echo": True, "logprobs": 1},
            ):
                assert (await world.complete(**body)).status == 200
                assert "kv_transfer_params" not in world.d[0].bodies[-1]
            assert world.p[0].bodies == []
            assert await world.metric("flows_total", flow="decode_alone") == 7

    run(scenario())


def test_a_single_prompt_in_a_list_is_disaggregated() -> None:
    async def scenario() -> None:
        async with World() as world:
            for prompt in (["a"], [1, 2, 3], [[1, 2, 3]]):
                await world.complete(prompt=prompt)
            await world.idle()
            assert len(world.p[0].bodies) == 3

    run(scenario())


def test_transfer_parameters_of_the_client_are_not_trusted() -> None:
    async def scenario() -> None:
        async with World() as world:
            forged = {"do_remote_prefill": True, "remote_host": "203.0.113.9"}
            await world.complete(kv_transfer_params=forged)
            await world.complete(kv_transfer_params=forged, n=2)
            assert "203.0.113.9" not in json.dumps(world.d[0].bodies + world.p[0].bodies)
            assert world.d[0].params[1] is None

    run(scenario())


def test_headers_go_to_both_sides_and_come_back() -> None:
    async def scenario() -> None:
        async with World() as world:
            sent = {"Authorization": "Bearer k", "X-Request-Id": "r-1", "Cookie": "c=1"}
            reply = await world.post("/v1/completions", {"prompt": "a"}, **sent)
            assert reply.headers["X-Request-Id"] == "r-1"
            assert reply.headers["X-Engine"] == "d0"
            await world.idle()
            for headers in (world.p[0].headers[0], world.d[0].headers[0]):
                assert headers["Authorization"] == "Bearer k"
                assert headers["X-Request-Id"] == "r-1"
                assert "Cookie" not in headers

    run(scenario())


def test_a_request_without_an_id_gets_one() -> None:
    async def scenario() -> None:
        async with World() as world:
            reply = await world.complete()
            assert world.d[0].headers[0]["X-Request-Id"] == reply.headers["X-Request-Id"]

    run(scenario())


def test_models_health_and_metrics() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=1) as world:
            assert [m["id"] for m in (await world.get("/v1/models")).json["data"]] == [
                "m",
                "adapter",
            ]
            health = (await world.get("/health")).json
            assert health["status"] == "ok"
            assert health["disaggregates"] is True
            assert [(e["role"], e["state"]) for e in health["engines"]] == [
                ("prefill", "up"),
                ("decode", "up"),
            ]
            assert await world.metric("engine_up") == 2
            assert await world.metric("prefill_addressable") == 1

    run(scenario())


def test_what_policies_see_is_counted_at_once_and_taken_back() -> None:
    async def scenario() -> None:
        async with World(2, 2, policy="jsq") as world:
            for engine in (*world.p, *world.d):
                engine.behave = slow(30)
            tasks = [asyncio.create_task(world.complete()) for _ in range(4)]
            await until(
                lambda: [engine.open_requests for engine in world.engines] == [2, 2, 2, 2],
                "each engine has its half",
            )
            assert all(engine.queued_tokens for engine in world.engines if engine.role == "prefill")
            assert all(engine.context for engine in world.engines if engine.role == "decode")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(
                lambda: not any(engine.open_requests for engine in world.engines), "all are gone"
            )
            assert not any(engine.queued_tokens or engine.context for engine in world.engines)

    run(scenario())


@pytest.mark.parametrize(
    ("version", "connection"), [("1.1", "close"), ("1.0", "close"), ("1.0", "keep-alive")]
)
def test_a_stream_has_the_form_that_the_client_knows(version: str, connection: str) -> None:
    """HTTP/1.0 has no chunks, so the connection's end ends a stream, also if the client wants to keep the connection.
    Events after the first are written by the router itself."""
    chunked = version == "1.1"

    async def scenario() -> None:
        async with World() as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            body = b'{"model": "m", "prompt": "a", "stream": true}'
            head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            told, _, got = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
            assert (b"chunked" in told.lower()) is chunked
            assert b"\r\nX-Accel-Buffering: no" in told, "nginx must not collect events"
            if chunked:
                parts, left = list[bytes](), got
                while size := int((split := left.partition(b"\r\n"))[0], 16):
                    parts.append(split[2][:size])
                    assert split[2][size : size + 2] == b"\r\n"
                    left = split[2][size + 2 :]
                got = b"".join(parts)
            events = [event for event in got.split(b"\n\n") if event]
            assert len(events) == 5
            assert all(event.startswith(b"data: ") for event in events)
            assert events[-1] == b"data: [DONE]"

    run(scenario())
