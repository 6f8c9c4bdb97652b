# SPDX-License-Identifier: Apache-2.0
"""Engines that are stopped end their answers early, with `finish_reason` `abort` (vLLM's SIGTERM): no answer is cut off by that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import DONE, FakeEngine, World, answer, choices, forever, run, says, until

ABORTED = {"index": 0, "text": "", "finish_reason": "abort"}
STREAM = {"model": "m", "prompt": "hi", "stream": True}


def told(*choices: dict[str, Any], **more: Any) -> bytes:
    content = {"id": "a", "choices": list(choices), **more}
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def word(text: str, token: int) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": [token], "prompt_token_ids": [9]}
    return told({**choice, "finish_reason": None})


async def stopped(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    content = {"id": "a", "choices": [{**ABORTED, "text": "half an"}]}
    return web.Response(body=json.dumps(content, separators=(",", ":")).encode())


def test_an_answer_in_one_piece_comes_from_another_engine() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = stopped
            for _ in range(30):  # more than the retry budget has at once
                reply = await world.complete()
                assert (reply.status, reply.json["served_by"]) == (200, "d1")
            assert await world.metric("retries_total", cause="aborted") > 0
            world.d[1].behave = world.p[0].behave = stopped
            assert (await world.complete()).status == 503, "an error, and no half answer"

    run(scenario())


@pytest.mark.parametrize("together", [False, True])
def test_a_stream_goes_on_at_another_engine(together: bool) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            parts = [word("The ", 1), told(ABORTED), DONE]
            world.d[0].behave = says(*([b"".join(parts)] if together else parts))
            world.d[1].behave = says(word("end", 2), DONE)
            events = (await world.post("/v1/completions", STREAM)).events
            assert [event["choices"][0]["text"] for event in events[:-1]] == ["The ", "end"]
            assert events[-1] == "[DONE]"
            assert world.d[1].bodies[-1]["prompt"] == [9, 1]

    run(scenario())


@pytest.mark.parametrize(
    "last",
    [told(ABORTED), b"", told(usage={"completion_tokens": 0})],
    ids=["abort", "nothing", "usage"],
)
@pytest.mark.parametrize("more", [{}, {"stop": ["x"]}])
def test_a_stream_that_was_turned_away_with_an_abort_begins_elsewhere(
    more: dict[str, Any], last: bytes
) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = says(last + DONE)
            events = (await world.post("/v1/completions", {**STREAM, **more})).events
            assert events[:-1] == [choices(f"d1{n}") for n in range(4)]

    run(scenario())


def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = says(word("The ", 1), told(ABORTED) + DONE)
            events = (await world.post("/v1/completions", {**STREAM, "stop": ["x"]})).events
            assert events[-1]["error"]["type"] == "stream_interrupted"
            assert b'abort"' not in json.dumps(events[:-1]).encode()

    run(scenario())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("more", [{}, {"stop": ["x"]}])
def test_a_stream_that_was_aborted_on_purpose_ends_so(together: bool, more: dict[str, Any]) -> None:
    """The engine serves on, so it was told to end this request: by `/abort_requests`, or by `/pause`."""

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].is_paused = 200
            usage = told(usage={"completion_tokens": 1})
            parts = [word("The ", 1), told(ABORTED), usage, DONE]
            world.d[0].behave = says(*([b"".join(parts)] if together else parts))
            events = (await world.post("/v1/completions", {**STREAM, **more})).events
            reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
            assert reasons == [None, "abort"]
            assert (events[-2]["usage"], events[-1]) == ({"completion_tokens": 1}, "[DONE]")
            assert not world.d[1].bodies
            assert await world.metric("retries_total") == 0

    run(scenario())


def test_a_stream_of_which_nothing_was_said_is_aborted_on_purpose() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].is_paused = 200
            world.d[0].behave = says(told(ABORTED) + DONE)
            events = (await world.post("/v1/completions", STREAM)).events
            assert events[0]["choices"][0]["finish_reason"] == "abort"
            assert events[1:] == ["[DONE]"]

    run(scenario())


def test_an_answer_in_one_piece_that_was_aborted_on_purpose_is_the_answer() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].is_paused = 200
            world.d[0].behave = stopped
            reply = await world.complete()
            assert reply.json["choices"][0] == {**ABORTED, "text": "half an"}
            opened = await world.metric("circuit_opened_total", engine=world.d[0].url)
            assert opened == 0, "the engine has failed nothing"

    run(scenario())


@pytest.mark.parametrize("status", [None, 500])
def test_an_engine_that_takes_no_more_commands_is_being_stopped(status: int | None) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].is_paused = status
            world.d[0].behave = stopped
            reply = await world.complete()
            assert reply.json["served_by"] == "d1"

    run(scenario())


def test_a_text_about_aborts_is_a_text() -> None:
    async def scenario() -> None:
        async with World() as world:
            text = '"finish_reason":"abort"'
            world.d[0].behave = says(word(text, 1), DONE)
            events = (await world.post("/v1/completions", STREAM)).events
            assert events[0]["choices"][0]["text"] == text

    run(scenario())


def test_a_prompt_that_was_not_computed_is_computed_elsewhere() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=1) as world:
            world.p[0].behave = stopped

            async def waits(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                """KV of the first engine never comes."""
                params = body["kv_transfer_params"]
                if params["remote_engine_id"] == "engine-p0":
                    await forever()
                return await answer(engine, request, body)

            world.d[0].behave = waits
            assert (await world.complete()).status == 200
            assert await world.metric("prefill_failures_total", cause="aborted") == 1

    run(scenario())


def test_a_prefill_engine_that_dies_costs_none_of_its_many_requests() -> None:
    """Their decode engines, which may compute no prompts, fail them all at once: that is not a reason to retry fewer."""

    async def scenario() -> None:
        async with World(prefill=2, decode=2, attempts=1) as world:
            died = world.p[0]

            async def dies(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                await forever()
                raise AssertionError

            async def wants_kv(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                params = body.get("kv_transfer_params") or {}
                if params.get("remote_engine_id") != "engine-p0":
                    return await answer(engine, request, body)
                await until(lambda: world.known(died).prefills == 0, "its copies have failed")
                return web.json_response({"error": {"message": "no KV", "code": 500}}, status=500)

            died.behave = dies
            for fake in world.d:
                fake.behave = wants_kv
            tasks = [asyncio.create_task(world.complete()) for _ in range(60)]
            await until(lambda: died.running == 30, "half of them are there")
            await died.die()
            replies = await asyncio.gather(*tasks)
            assert [reply.status for reply in replies] == [200] * 60
            for fake in world.d:
                opened = await world.metric("circuit_opened_total", engine=fake.url)
                assert opened == 0, "nobody else is to blame"

    run(scenario())
