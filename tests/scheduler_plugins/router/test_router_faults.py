# SPDX-License-Identifier: Apache-2.0
"""Engines and clients that fail: an answer from another engine or a clear error, never a hang."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from router_fakes import (
    Behaviour,
    World,
    die_inside_json,
    drop_at_once,
    event,
    hang,
    run,
    slow,
    status,
    stream,
    until,
    waits_for_kv,
)

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.failures import UnreachableError
from scheduler_plugins.router.handoff import prefill
from scheduler_plugins.router.handoff.prefill import PrefillCopy

HUNG_S = 2.5
"""Silence after which an engine is hung. All engines of a test share a thread, which may have to wait for a processor."""


STREAMS = [stream(0, then=then) for then in ("die", "half", "stop")]


@pytest.mark.parametrize(
    ("behave", "cause"),
    [
        (drop_at_once, "died"),
        (STREAMS[0], "died"),
        (STREAMS[1], "died"),
        (STREAMS[2], "truncated"),
        (status(500), "status_500"),
        (status(503), "status_503"),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_a_decode_engine_that_dies_before_the_first_byte_is_replaced(
    behave: Behaviour, cause: str, streams: bool
) -> None:
    cause = "malformed" if behave in STREAMS and not streams else cause  # not what was asked for

    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = behave
            reply = await world.complete(stream=streams)
            assert reply.status == 200
            assert "d1" in reply.text
            assert "d00" not in reply.text
            assert await world.metric("retries_total", cause=cause) == 1

    run(scenario())


def test_the_second_attempt_has_a_transfer_of_its_own() -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = drop_at_once
            world.p[0].behave = slow(0.05)
            await world.complete()
            await world.idle()
            first, second = (d.bodies[0]["kv_transfer_params"] for d in world.d)
            assert first["remote_request_id"] != second["remote_request_id"]
            sent = [params["transfer_id"] for params in world.p[0].params if params]
            assert second["remote_request_id"] in sent

    run(scenario())


def test_an_answer_that_breaks_off_halfway_is_asked_for_again() -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = die_inside_json
            assert (await world.complete()).json["served_by"] == "d1"

    run(scenario())


@pytest.mark.parametrize("then", ["die", "half", "stop"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(then: str) -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = stream(2, then=then)
            reply = await world.complete(stream=True)
            assert reply.status == 200
            assert reply.content.startswith(event("d00") + event("d01"))
            last = reply.events[-1]
            assert last["error"]["type"] == "stream_interrupted"
            assert "a decode engine failed" in last["error"]["message"]
            assert world.d[1].bodies == []
            assert await world.metric("requests_total", outcome="interrupted") == 1

    run(scenario())


def test_the_next_request_on_the_connection_of_an_interrupted_stream_is_answered() -> None:
    """Clients send it as soon as the stream has ended: a connection that is closed then would lose it."""

    async def scenario() -> None:
        async with World() as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            body = b'{"prompt":"a","stream":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n"
            for then, said in (("die", b"stream_interrupted"), ("end", b"[DONE]")):
                world.d[0].behave = stream(1, then=then)
                writer.write(head % len(body) + body)
                received = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert said in received
            writer.close()
            await writer.wait_closed()

    run(scenario())


def test_an_engine_that_refuses_connections_gets_no_more_requests_until_it_is_healthy() -> None:
    async def scenario() -> None:
        # The long pause between checks shows that the failed request itself takes it out.
        async with World(decode=2, health_interval_s=30) as world:
            dead = world.d[0]
            await dead.die()
            for _ in range(3):
                assert (await world.complete()).json["served_by"] == "d1"
            assert not world.known(dead).up
            assert await world.metric("retries_total", cause="connect") == 1
            assert await world.metric("engine_up", engine=dead.url) == 0

        async with World(decode=2) as world:
            await world.d[0].die()
            await world.down(world.d[0])
            await world.d[0].start()
            await world.up(world.d[0])
            served = {(await world.complete()).json["served_by"] for _ in range(2)}
            assert served == {"d0", "d1"}

    run(scenario())


def test_an_engine_that_cannot_be_reached_is_down_before_any_check_has_run() -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            engine = world.known(world.d[0])
            world.app[SHARED].pool.report_failure(
                engine, UnreachableError("no connection", refused=True)
            )
            assert not engine.up
            await world.up(world.d[0])

    run(scenario())


def test_no_engine_is_asked_twice_and_prefill_engines_are_the_last_resort() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.d[0].behave = drop_at_once
            assert (await world.complete()).json["served_by"] == "p0"
            assert len(world.d[0].bodies) == 1
            assert world.p[0].params[-1] is None

    run(scenario())


@pytest.mark.parametrize("how", ["unhealthy", "hung"])
def test_an_engine_whose_health_fails_gets_no_more_requests(how: str) -> None:
    async def scenario() -> None:
        async with World(decode=2, health_timeout_s=HUNG_S) as world:
            world.d[0].healthy, world.d[0].hung = how != "unhealthy", how == "hung"
            await world.down(world.d[0])
            for _ in range(3):
                assert (await world.complete()).json["served_by"] == "d1"
            assert world.d[0].bodies == []

    run(scenario())


@pytest.mark.parametrize("streams", [True, False])
def test_a_hung_decode_engine_is_left_without_waiting_for_the_first_byte_limit(
    streams: bool,
) -> None:
    async def scenario() -> None:
        async with World(decode=2, health_timeout_s=HUNG_S) as world:
            world.d[0].behave = hang
            task = asyncio.create_task(world.complete(stream=streams))
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            world.d[0].hung = True
            assert "d1" in (await task).text
            assert await world.metric("retries_total", cause="unhealthy") == 1

    run(scenario())


def test_a_stream_of_an_engine_that_hangs_is_interrupted() -> None:
    async def scenario() -> None:
        async with World(health_timeout_s=HUNG_S) as world:
            world.d[0].behave = stream(2, then="hang")
            task = asyncio.create_task(world.complete(stream=True))
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            world.d[0].hung = True
            assert (await task).events[-1]["error"]["type"] == "stream_interrupted"

    run(scenario())


def test_an_engine_that_drains_may_finish_what_it_has() -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = slow(1)
            task = asyncio.create_task(world.complete())
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            await world.d[0].refuse()
            await world.down(world.d[0])
            assert (await world.complete()).json["served_by"] == "d1"
            assert (await task).json["served_by"] == "d0"

    run(scenario())


def test_draining_has_an_end() -> None:
    async def scenario() -> None:
        async with World(decode=2, drain_timeout_s=0.2) as world:
            world.d[0].behave = hang
            task = asyncio.create_task(world.complete())
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            await world.d[0].refuse()
            assert (await task).json["served_by"] == "d1"

    run(scenario())


@pytest.mark.parametrize(
    ("streams", "limit"), [(True, "first_byte_timeout_s"), (False, "answer_timeout_s")]
)
def test_a_silent_but_healthy_engine_is_left_at_the_limit(streams: bool, limit: str) -> None:
    async def scenario() -> None:
        async with World(decode=2, **{limit: HUNG_S}) as world:
            world.d[0].behave = hang
            assert "d1" in (await world.complete(stream=streams)).text
            assert await world.metric("retries_total", cause="first_byte_timeout") == 1
            assert world.d[0].cancelled == 1

    run(scenario())


def test_a_stream_that_pauses_too_long_is_interrupted_and_a_long_one_is_not() -> None:
    async def scenario() -> None:
        async with World(idle_timeout_s=1.0) as world:
            world.d[0].behave = stream(7, gap_s=0.2)
            assert (await world.complete(stream=True)).events[-1] == "[DONE]"
            world.d[0].behave = stream(1, then="hang")
            last = (await world.complete(stream=True)).events[-1]
            assert "idle_timeout" in last["error"]["message"]

    run(scenario())


@pytest.mark.parametrize(
    ("behave", "cause"), [(status(500), "status_500"), (drop_at_once, "died"), (hang, None)]
)
def test_whatever_prefill_does_decode_answers(
    monkeypatch: pytest.MonkeyPatch, behave: Behaviour, cause: str | None
) -> None:
    monkeypatch.setattr(prefill, "REFUSAL_GRACE_S", 10)

    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = behave
            world.d[0].behave = slow(0.1)
            assert (await world.complete()).json["served_by"] == "d0"
            assert len(world.d[0].bodies) == 1
            assert world.d[0].cancelled == 0
            await world.idle()
            counted = await world.metric("prefill_failures_total", cause=cause) if cause else 1
            assert counted == 1

    run(scenario())


def test_a_decode_engine_waiting_for_a_refused_prefill_is_asked_again_without_a_transfer() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = status(500)
            world.d[0].behave = waits_for_kv
            assert (await world.complete()).json["served_by"] == "d0"
            assert len(world.d[0].bodies) == 2
            assert await world.metric("retries_total", cause="prefill_refused") == 1
            assert await world.metric("retries_total") == 1

    run(scenario())


def test_a_prefill_engine_that_died_is_not_asked_and_comes_back_with_its_new_address() -> None:
    async def scenario() -> None:
        async with World() as world:
            await world.p[0].die()
            await world.down(world.p[0])
            assert (await world.complete()).status == 200
            assert world.d[0].params == [None]
            world.p[0].engine_id = "engine-after-restart"
            await world.p[0].start()
            await world.up(world.p[0])
            await world.complete()
            params = world.d[0].params[1]
            assert params is not None
            assert params["remote_engine_id"] == "engine-after-restart"

    run(scenario())


def test_a_restart_between_two_health_checks_is_seen_in_the_answer() -> None:
    async def scenario() -> None:
        async with World(health_interval_s=30) as world:

            async def answers_with_address(engine, request, body):  # type: ignore[no-untyped-def]
                return engine.describe(body)

            world.p[0].behave = answers_with_address
            world.d[0].behave = slow(0.1)
            world.p[0].engine_id = "engine-after-restart"
            await world.complete()

            def known_id() -> str | None:
                address = world.known(world.p[0]).address
                return address.engine_id if address else None

            await until(lambda: known_id() == "engine-after-restart", "the new address is known")

    run(scenario())


def test_a_prefill_engine_without_an_address_is_not_used_for_a_handoff() -> None:
    async def scenario() -> None:
        world = World(prefill=2)
        world.p[0].engine_id = None
        async with world:
            for _ in range(2):
                await world.complete()
            await world.idle()
            assert [len(p.bodies) for p in world.p] == [0, 2]
            assert world.known(world.p[0]).up
            # It is asked again now and then: the first answer may have been a hiccup.
            world.p[0].engine_id = "late"
            await until(lambda: world.known(world.p[0]).address is not None, "p0 has an address")

    run(scenario())


def test_engines_with_a_key_are_probed_with_the_routers_and_asked_with_the_clients() -> None:
    async def scenario() -> None:
        world = World(api_key="secret")
        world.p[0].api_key = world.d[0].api_key = "secret"
        async with world:
            assert world.known(world.p[0]).address is not None
            assert (await world.complete()).status == 401
            body = {"prompt": "a"}
            reply = await world.post("/v1/completions", body, Authorization="Bearer secret")
            assert reply.json["served_by"] == "d0"

    run(scenario())


def test_a_prefill_engine_that_is_up_is_probed_once() -> None:
    async def scenario() -> None:
        async with World() as world:
            checks = world.p[0].health_checks
            await until(lambda: world.p[0].health_checks > checks + 5, "some checks have passed")
            assert world.p[0].probes == 1

    run(scenario())


def test_without_decode_engines_a_prefill_engine_serves_alone() -> None:
    async def scenario() -> None:
        async with World() as world:
            await world.d[0].die()
            assert (await world.complete()).json["served_by"] == "p0"
            await world.down(world.d[0])
            assert (await world.complete()).json["served_by"] == "p0"
            whole = [body for body in world.p[0].bodies if "kv_transfer_params" not in body]
            assert len(whole) == 2
            assert await world.metric("flows_total", flow="prefill_alone") == 2
            assert (await world.get("/health")).status == 200

    run(scenario())


def test_with_no_engine_left_the_client_gets_a_503_and_the_log_names_them_all(caplog) -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            for engine in world.p + world.d:
                await engine.die()
            for reply in (await world.complete(), await world.complete(stream=True)):
                assert reply.status == 503
                assert int(reply.headers["Retry-After"]) >= 1
                error = reply.json["error"]
                assert error["type"] == "service_unavailable"
                counts = {role: sum(causes.values()) for role, causes in error["engines"].items()}
                assert counts == {"decode": 2, "prefill": 1}
                assert {"connect", "down"} >= {*error["engines"]["decode"]}
                assert "decode: " in error["message"]
                *_, logged = (text for text in caplog.messages if "could serve the req" in text)
                for engine in world.p + world.d:
                    assert str(engine.port) not in reply.text
                    assert engine.url in logged
            for engine in world.p + world.d:
                await world.down(engine)
            assert (await world.get("/health")).status == 503
            assert (await world.get("/v1/models")).status == 503

    run(scenario())


def test_a_request_that_kills_engines_does_not_go_round_all_of_them() -> None:
    async def scenario() -> None:
        async with World(decode=4, attempts=2) as world:
            for engine in world.d:
                engine.behave = drop_at_once
            reply = await world.complete()
            assert reply.status == 503
            assert "decode: 2 died, 2 not_tried" in reply.text
            assert sum(len(engine.bodies) for engine in world.d) == 2

    run(scenario())


@pytest.mark.parametrize("code", [400, 401, 404])
def test_an_error_of_the_client_passes_unchanged_and_ends_the_prefill(code: int) -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.p[0].behave = hang
            world.d[0].behave = status(code)
            reply = await world.complete()
            assert reply.status == code
            assert reply.json == {"error": {"message": f"d0 says {code}", "code": code}}
            await until(lambda: world.p[0].running == 0, "the prefill copy is cancelled")
            assert world.d[1].bodies == []
            assert await world.metric("prefill_failures_total") == 0
            assert await world.metric("requests_total", outcome="client_error") == 1

    run(scenario())


def test_decode_ending_first_ends_the_prefill() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = hang
            world.d[0].behave = slow(0.05)
            await world.complete()
            await until(lambda: world.p[0].cancelled == 1, "the prefill copy is cancelled")

    run(scenario())


@pytest.mark.parametrize("when", ["before the first byte", "inside the stream", "not streaming"])
def test_a_client_that_leaves_takes_both_requests_with_it(when: str) -> None:
    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = hang
            world.d[0].behave = stream(1, then="hang") if when == "inside the stream" else hang
            streams = when != "not streaming"
            task = asyncio.create_task(
                world.client.post("/v1/completions", json={"prompt": "a", "stream": streams})
            )
            await until(lambda: world.p[0].running == world.d[0].running == 1, "both are running")
            if when == "inside the stream":
                response = await task
                await response.content.readany()
                response.close()
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(
                lambda: world.p[0].cancelled == world.d[0].cancelled == 1, "both are cancelled"
            )
            await world.idle()
            assert await world.metric("requests_total", outcome="client_gone") == 1

    run(scenario())


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_with_its_whole_answer_was_served(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of one request closes its connection at once, while the prefill copy is being let go."""
    run_copy = PrefillCopy._run

    async def slow_to_go(copy: PrefillCopy) -> None:
        try:
            await run_copy(copy)
        finally:
            await asyncio.sleep(0.3)

    monkeypatch.setattr(PrefillCopy, "_run", slow_to_go)

    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = hang
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True)
            ) as client:
                asked = {"prompt": "a", "stream": streams}
                async with client.post(
                    f"http://127.0.0.1:{world.port}/v1/completions", json=asked
                ) as response:
                    assert response.status == 200
                    await response.read()
            await world.idle()
            assert await world.metric("requests_total", outcome="ok") == 1
            assert await world.metric("requests_total", outcome="client_gone") == 0

    run(scenario())


def test_a_client_that_stops_reading_does_not_hold_an_engine_for_ever() -> None:
    async def endless(engine, request, body):  # type: ignore[no-untyped-def]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(event("x" * 250_000))

    async def scenario() -> None:
        async with World(idle_timeout_s=0.5) as world:
            world.d[0].behave = endless
            response = await world.client.post(
                "/v1/completions", json={"prompt": "a", "stream": True}
            )
            await until(lambda: world.d[0].cancelled == 1, "the decode request is cancelled")
            response.close()
            await world.idle()
            assert await world.metric("requests_total", outcome="client_gone") == 1

    run(scenario())


def test_many_requests_while_engines_come_and_go_all_get_an_answer() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=3) as world:
            for engine in world.p + world.d:
                engine.behave = slow(0.01)
            replies = [asyncio.create_task(world.complete(prompt=str(n))) for n in range(60)]
            await asyncio.sleep(0)
            for engine in (world.d[0], world.p[0], world.d[1]):
                await engine.die()
                await engine.start()
                replies += [asyncio.create_task(world.complete(prompt="x")) for _ in range(20)]
            assert {reply.status for reply in await asyncio.gather(*replies)} == {200}

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", b"not json", "not JSON"),
        ("/v1/completions", b"", "not JSON"),
        ("/v1/completions", b"\xff\xfe", "not JSON"),
        ("/v1/completions", b"[1]", "a list"),
        ("/v1/completions", b"[" * 50_000, "nested too deeply"),
        ("/v1/completions", b"[" * 100_000, "must be a JSON object"),
        ("/v1/completions", b'{"prompt":' + b"[" * 100_000, "nested too deeply"),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', "NaN"),
        ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', "1e999"),
        ("/v1/completions", {"prompt": 5}, "prompt is a number"),
        ("/v1/completions", {"prompt": "a", "stream": "perhaps"}, "stream is a string"),
        ("/v1/completions", {"prompt": "a", "n": True}, "n is a boolean"),
        ("/v1/completions", {"prompt": "a", "n": "two"}, "n is a string"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens is a number"),
        ("/v1/completions", {"prompt": "a", "model": {}}, "model is an object"),
        ("/v1/chat/completions", {"model": "m"}, "messages is missing"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages is a string"),
    ],
)
def test_bad_input_is_a_400_that_says_what_is_wrong(path: str, body: object, names: str) -> None:
    async def scenario() -> None:
        async with World() as world:
            reply = await world.post(path, body)
            assert reply.status == 400
            assert reply.json["error"]["type"] == "invalid_request_error"
            assert names in reply.json["error"]["message"]
            assert world.d[0].bodies == world.p[0].bodies == []
            assert (await world.complete()).status == 200

    run(scenario())


def test_errors_of_http_have_the_same_shape() -> None:
    async def scenario() -> None:
        async with World(body_mib=1) as world:
            big = await world.post("/v1/completions", {"prompt": "a" * (2 << 20)})
            assert (big.status, big.json["error"]["code"]) == (413, 413)
            assert (await world.get("/v1/nothing")).json["error"]["code"] == 404
            wrong = await world.get("/v1/completions")
            assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")

    run(scenario())


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with World(idle_timeout_s=0.3) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 9\r\n\r\n{")
            assert b" 400 " in await reader.readline()
            writer.close()

    run(scenario())
