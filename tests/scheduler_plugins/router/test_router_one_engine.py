# SPDX-License-Identifier: Apache-2.0
"""Endpoints of which one engine serves the whole request."""

import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, answer, run, says, status

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.router.prompt.body import ONE_ENGINE

RESPONSES = "/v1/responses"
OF_EVERY_FAKE = ("/tokenize", "/detokenize")
EVENTS = (
    b'event: response.created\ndata: {"type": "response.created"}\n\n',
    b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
)


class Serving(FakeEngine):
    """A fake engine that has these endpoints."""

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        for path in ONE_ENGINE:
            if path not in OF_EVERY_FAKE:
                app.router.add_post(path, self._complete)


def world(prefill: int = 1, decode: int = 1, **settings: Any) -> World:
    made = World(prefill, decode, **settings)
    made.p = [Serving(f"p{n}", engine_id=f"engine-p{n}") for n in range(prefill)]
    made.d = [Serving(f"d{n}") for n in range(decode)]
    return made


@pytest.mark.parametrize("path", [path for path in ONE_ENGINE if path not in OF_EVERY_FAKE])
def test_one_engine_gets_it_whole_and_another_one_if_that_fails(path: str) -> None:
    async def scenario() -> None:
        async with world(decode=2) as made:
            sent = {
                "model": "m",
                "input": "hello",
                "kv_transfer_params": {"do_remote_prefill": True},
            }
            made.d[0].behave = status(500)
            reply = await made.post(path, sent)
            assert (reply.status, reply.json["served_by"]) == (200, "d1")
            assert made.d[1].bodies == [{"model": "m", "input": "hello"}]
            assert not made.p[0].bodies
            made.d[1].behave = status(404)
            assert (await made.post(path, sent)).status == 404, "the engine says what it has not"
            assert await made.metric("flows_total", flow="decode_alone", cause="endpoint") >= 2
            assert await made.metric("requests_total", route=path, outcome="ok") == 1

    run(scenario())


@pytest.mark.parametrize(
    ("code", "content", "kind"),
    [
        (200, b"<html>Welcome</html>", "text/html"),
        (200, b"", "application/json"),
        (200, b"{}", "application/json"),
        (200, b'{"data": "\xff"}', "application/json"),
        (200, b'{"error": {"message": "no"}}', "application/json"),
        (204, b"", "application/json"),
        (206, b'{"data": []}', "application/json"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", RESPONSES, "/v1/completions/render"])
def test_an_answer_that_is_none_is_asked_for_elsewhere(
    path: str, code: int, content: bytes, kind: str
) -> None:
    async def odd(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=code, body=content, content_type=kind)

    async def scenario() -> None:
        async with world(decode=2) as made:
            made.d[0].behave = odd
            for _ in range(2):
                reply = await made.post(path, {"model": "m", "input": "a"})
                assert (reply.status, reply.json["served_by"]) == (200, "d1")
            assert await made.metric("retries_total", cause="malformed") >= 1

    run(scenario())


@pytest.mark.parametrize("garbage", [b"data: null\n\n", b"data: {{{\n\n", b"data: \xff\n\n"])
def test_a_stream_with_garbage_is_asked_for_elsewhere_or_ends_with_an_error(garbage: bytes) -> None:
    async def scenario() -> None:
        async with world(decode=2) as made:
            body = {"model": "m", "input": "hi", "stream": True}
            made.d[0].behave, made.d[1].behave = says(garbage), says(*EVENTS)
            for _ in range(2):
                assert (await made.post(RESPONSES, body)).content == b"".join(EVENTS)
            for end in (b"\n\n", b""):
                made.d[0].behave = made.d[1].behave = says(EVENTS[0], garbage.strip() + end)
                reply = await made.post(RESPONSES, body)
                assert reply.content.startswith(EVENTS[0])
                assert b"stream_interrupted" in reply.content
                assert garbage.strip() not in reply.content

    run(scenario())


def test_a_stream_of_responses_ends_without_an_end_mark_and_is_never_cut_short() -> None:
    async def scenario() -> None:
        async with world(decode=2) as made:
            body = {"model": "m", "input": "hi", "stream": True}
            made.d[0].behave = made.d[1].behave = says(*EVENTS)
            assert (await made.post(RESPONSES, body)).content == b"".join(EVENTS)
            # Servers may leave out the last event's empty line.
            made.d[0].behave = made.d[1].behave = says(EVENTS[0], EVENTS[1][:-1])
            assert (await made.post(RESPONSES, body)).content == b"".join(EVENTS)[:-1]
            made.d[0].behave = made.d[1].behave = says(EVENTS[0], then="die")
            cut = await made.post(RESPONSES, body)
            assert cut.content.startswith(EVENTS[0])
            assert b"stream_interrupted" in cut.content
            made.d[0].behave, made.d[1].behave = says(then="die"), says(*EVENTS)
            for _ in range(2):
                assert (await made.post(RESPONSES, body)).content == b"".join(EVENTS)

    run(scenario())


def test_they_ask_for_the_clients_key_and_judge_fields_like_any_other() -> None:
    async def scenario() -> None:
        async with world(client_key="secret") as made:
            for path in ONE_ENGINE:
                assert (await made.post(path, {"model": "m"})).status == 401
            key = {"Authorization": "Bearer secret"}
            assert (await made.post("/pooling", {"model": 5}, **key)).status == 400
            assert (await made.post("/pooling", b"{", **key)).status == 400
            assert (await made.post("/pooling", {"prompt": {"a": 1}}, **key)).status == 200

    run(scenario())


def test_what_generates_nothing_breaks_no_promise_of_a_time_per_token() -> None:
    async def scenario() -> None:
        promised = (QosClass(name="only", reserved_fraction=1.0, slo=Slo(tpot_ms=1)),)
        async with world(classes=promised, policy="least_work") as made:
            for engine in made.engines:
                engine.costs = CostModel(a=1e-3, d0=0.01)
            assert (await made.complete()).status == 429, "a step takes ten times as long"
            assert (await made.post("/v1/embeddings", {"model": "m", "input": "a"})).status == 200
            assert (await made.post(RESPONSES, {"model": "m", "input": "a"})).status == 429

    run(scenario())


def test_the_tokenizer_of_any_engine_answers() -> None:
    async def scenario() -> None:
        async with world() as made:
            made.d[0].tokenize = lambda asked: [1, 2]
            reply = await made.post("/tokenize", {"model": "m", "prompt": "hello"})
            assert reply.json == {"tokens": [1, 2]}
            made.d[0].behave = answer

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_the_count_of_cached_tokens_of_a_response_is_the_engines_own(stream: bool) -> None:
    """No KV is handed over for a Response, so what its engine says was cached was cached."""
    usage = {"input_tokens": 200, "input_tokens_details": {"cached_tokens": 16}}
    told = {"id": "resp-1", "object": "response", "usage": usage}
    done = b"event: response.completed\ndata: %b\n\n" % json.dumps({"response": told}).encode()

    async def responds(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        return (
            await says(EVENTS[0], done)(engine, request, body)
            if stream
            else web.json_response(told)
        )

    async def scenario() -> None:
        async with world() as made:
            made.d[0].behave = responds
            reply = await made.post(RESPONSES, {"model": "m", "input": "hi", "stream": stream})
            if stream:
                assert reply.content == EVENTS[0] + done
            else:
                assert reply.json == told
            assert not made.p[0].bodies
            assert "kv_transfer_params" not in made.d[0].bodies[0]

    run(scenario())
