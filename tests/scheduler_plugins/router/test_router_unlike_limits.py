# SPDX-License-Identifier: Apache-2.0
"""Engines of which one takes what the other does not: contexts of unlike lengths, and what else is answered with 400."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    DEADLINE_S,
    FakeEngine,
    World,
    answer,
    hang,
    run,
    status,
    until,
    waits_for_kv,
)
from test_router_kinds import world as world_of_kinds

from scheduler_plugins.router.engines.circuit import FAILURES
from scheduler_plugins.router.handoff import prefill

LONG = list(range(150))


@pytest.fixture(autouse=True)
def _grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine that waited for its KV this long would end the test."""
    monkeypatch.setattr(prefill, "REFUSAL_GRACE_S", DEADLINE_S)


UNLIKE = {
    "context": "This model's maximum context length is 100 tokens",
    "batched tokens": "the prompt has more tokens than --max-num-batched-tokens",
    "adapter": "LoRA is not enabled",
    "parser": '"auto" tool choice requires --enable-auto-tool-choice',
    "feature": "prompt_embeds are disabled",
}
"""What a prefill engine lacks, and what it answers then (docs/router.md has the table)."""


def refuses_from(tokens: int, says: str = "too long") -> Any:
    """An engine with a context of `tokens` tokens: one token more than a prompt must fit."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if len(body["prompt"]) + 1 > tokens:
            return web.json_response({"error": {"message": says, "code": 400}}, status=400)
        return await (waits_for_kv if engine.engine_id is None else answer)(engine, request, body)

    return behave


def context(engine: FakeEngine, tokens: int) -> None:
    engine.context_tokens = tokens
    engine.behave = refuses_from(tokens, f"{engine.name} takes {tokens} tokens")


def test_a_prefill_engine_is_not_asked_for_a_prompt_beyond_its_context() -> None:
    async def scenario() -> None:
        made = World(prefill=2)
        context(made.p[0], 100)
        async with made as w:
            for _ in range(4):
                assert (await w.complete(prompt=LONG)).status == 200
            assert (len(w.p[0].bodies), len(w.p[1].bodies)) == (0, 4)
            context(w.p[1], 100)
            w.known(w.p[1]).context_tokens = 100
            assert (await w.complete(prompt=LONG)).status == 200
            assert len(w.p[1].bodies) == 4
            assert await w.metric("flows_total", cause="too_long") == 1

    run(scenario())


@pytest.mark.parametrize("lacks", UNLIKE)
def test_what_a_prefill_engine_does_not_take_the_decode_engine_answers_at_once(lacks: str) -> None:
    """The next prompt finds the prefill engine unchanged, because a 400 says nothing about the engine."""

    async def scenario() -> None:
        async with World() as w:
            w.d[0].behave = waits_for_kv
            w.p[0].behave = refuses_from(100, UNLIKE[lacks])
            for _ in range(2 * FAILURES):
                assert (await w.complete(prompt="x" * 150)).status == 200
            assert w.known(w.p[0]).circuit.cause == ""
            w.d[0].behave = answer
            before = len(w.p[0].bodies)
            assert (await w.complete(prompt="short")).status == 200
            assert len(w.p[0].bodies) == before + 1

    run(scenario())


def test_after_a_400_only_prefill_engines_with_a_longer_context_are_asked() -> None:
    async def scenario() -> None:
        made = World(prefill=3)
        for engine, tokens in zip(made.p, (100, 90, 4096), strict=True):
            context(engine, tokens)
        async with made as w:

            async def waits(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                await until(lambda: bool(w.p[2].bodies), "an engine has computed the prompt")
                return await answer(engine, request, body)

            w.d[0].behave = waits
            assert (await w.complete(prompt="x" * 150)).status == 200
            assert [len(engine.bodies) for engine in w.p] == [1, 0, 1]

    run(scenario())


def test_a_decode_engine_with_a_longer_context_answers_what_another_refuses() -> None:
    async def scenario() -> None:
        made = World(prefill=1, decode=3)
        for engine, tokens in zip(made.d, (100, 90, 4096), strict=True):
            context(engine, tokens)
        made.d[2].behave = answer
        async with made as w:
            assert (await w.complete(prompt="x" * 150)).json["served_by"] == "d2"
            assert [len(engine.bodies) for engine in w.d] == [1, 0, 1]
            for engine in w.d:
                engine.bodies.clear()
            for _ in range(3):  # of a prompt that is counted this is known before
                assert (await w.complete(prompt=LONG)).json["served_by"] == "d2"
            assert [len(engine.bodies) for engine in w.d] == [0, 0, 3]
            assert all(w.known(engine).circuit.cause == "" for engine in w.d)
            reply = await w.complete(prompt="x" * 150, bad=1)
            assert reply.status == 200

    run(scenario())


def test_what_no_engine_takes_is_a_400_after_one_question() -> None:
    async def scenario() -> None:
        made = World(prefill=2, decode=2)
        for engine in (*made.p, *made.d):
            context(engine, 100)
        async with made as w:
            for prompt in ("x" * 150, LONG):
                reply = await w.complete(prompt=prompt)
                assert (reply.status, reply.json["error"]["message"][2:]) == (
                    400,
                    " takes 100 tokens",
                )
            assert await w.metric("requests_total", outcome="client_error") == 2
            assert sum(len(engine.bodies) for engine in w.d) <= 4

    run(scenario())


def test_a_400_of_an_sglang_prefill_engine_is_the_clients_answer() -> None:
    """Its decode engine computes no prompt: nobody else could answer."""

    async def scenario() -> None:
        async with world_of_kinds("s", "s") as w:
            w.d[0].behave = hang
            w.p[0].behave = refuses_from(100, "Input length exceeds the maximum")
            for stream in (False, True):
                reply = await w.complete(prompt="x" * 150, stream=stream)
                assert reply.status == 400
                assert reply.json["error"]["message"] == "Input length exceeds the maximum"
            assert w.known(w.p[0]).circuit.cause == ""
            await until(lambda: w.d[0].running == 0, "the decode engine waits no more")

    run(scenario())


@pytest.mark.parametrize("decodes", ["hang", "status 500"])
def test_a_longer_sglang_prefill_engine_takes_what_another_refuses(decodes: str) -> None:
    async def scenario() -> None:
        made = world_of_kinds("ss", "s")
        context(made.p[0], 100)
        async with made as w:

            async def behave(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                if len(engine.bodies) > 1:
                    await until(lambda: bool(w.p[1].bodies), "the second was asked")
                    return await answer(engine, request, body)
                await until(lambda: len(w.p[0].bodies) == 1, "the first was asked")
                return await (hang if decodes == "hang" else status(500))(engine, request, body)

            w.d[0].behave = behave
            reply = await w.complete(prompt="x" * 150)
            assert reply.status == 200
            assert [len(engine.bodies) for engine in w.p] == [1, 1]

    run(scenario())


def test_a_down_engine_with_a_longer_context_makes_it_a_503() -> None:
    """The client may come back."""

    async def scenario() -> None:
        made = world_of_kinds("ss", "s")
        context(made.p[0], 100)
        async with made as w:
            w.d[0].behave = hang
            await w.p[1].die()
            await w.down(w.p[1])
            assert (await w.complete(prompt="x" * 150)).status == 503

    run(scenario())


def test_the_answer_need_not_fit_into_an_sglang_prefill_engines_context() -> None:
    async def scenario() -> None:
        async with world_of_kinds("s", "s") as w:
            asked = {"max_tokens": 500, "min_tokens": 3}
            assert (await w.complete(prompt="short", **asked)).status == 200
            chat = {"model": "m", "messages": [], "max_completion_tokens": 500}
            assert (await w.post("/v1/chat/completions", chat)).status == 200
            first, second = w.p[0].bodies
            assert (first["max_tokens"], first["min_tokens"]) == (1, 1)
            assert (second["max_tokens"], second["max_completion_tokens"]) == (1, 1)
            assert [body.get("max_tokens") for body in w.d[0].bodies] == [500, None]

    run(scenario())


@pytest.mark.parametrize("lacks", ["p0", "d0"])
def test_an_adapter_that_one_side_lacks_is_served_by_the_other_side_alone(lacks: str) -> None:
    async def scenario() -> None:
        made = World()
        both = {engine.name: engine for engine in (*made.p, *made.d)}
        both[lacks].has_adapter = False
        async with made as w:
            reply = await w.complete(model="adapter")
            assert (reply.status, reply.json["served_by"]) == (200, "d0" if lacks == "p0" else "p0")
            assert both[lacks].bodies == []
            assert (await w.complete()).json["served_by"] == "d0"
            assert len(both[lacks].bodies) == 1, "what both have is handed over"

    run(scenario())


def test_an_adapter_that_some_engines_lack_is_handed_over_between_the_others() -> None:
    async def scenario() -> None:
        made = World(prefill=2, decode=2)
        made.p[0].has_adapter = made.d[1].has_adapter = False
        async with made as w:
            for _ in range(4):
                assert (await w.complete(model="adapter")).json["served_by"] == "d0"
            assert [len(engine.bodies) for engine in (*w.p, *w.d)] == [0, 4, 4, 0]

    run(scenario())


@pytest.mark.parametrize("narrow", ["p0", "d0"])
@pytest.mark.parametrize("limit", ["max-num-seqs", "max-loras"])
def test_requests_wait_in_the_queue_of_the_engine_that_has_fewer_slots(
    narrow: str, limit: str
) -> None:
    """vLLM and SGLang let requests wait for a slot. Nobody refuses them, and no engine is blamed for the wait."""

    async def scenario() -> None:
        made = World()
        slot, most, open_now = asyncio.Lock(), 0, 0
        computed: dict[str, asyncio.Event] = {}

        def transfer(body: dict[str, Any]) -> asyncio.Event:
            params = body["kv_transfer_params"]
            name = params.get("remote_request_id") or params["transfer_id"]
            return computed.setdefault(name, asyncio.Event())

        async def behave(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            nonlocal most, open_now
            async with slot if engine.name == narrow else nullcontext():
                if engine.engine_id is None:
                    await transfer(body).wait()
                most, open_now = max(most, open_now + 1), open_now + 1
                await asyncio.sleep(0.01)
                open_now -= 1
                if engine.engine_id is not None:
                    transfer(body).set()
                return await answer(engine, request, body)

        for engine in (*made.p, *made.d):
            engine.behave = behave
        async with made as w:
            model = "m" if limit == "max-num-seqs" else "adapter"
            replies = await asyncio.gather(*(w.complete(model=model) for _ in range(12)))
            assert [reply.status for reply in replies] == [200] * 12
            assert {reply.json["served_by"] for reply in replies} == {"d0"}
            assert [len(engine.bodies) for engine in (*w.p, *w.d)] == [12, 12], "each is asked once"
            assert [w.known(engine).circuit.cause for engine in (*w.p, *w.d)] == ["", ""]
            assert await w.metric("retries_total") == 0

    run(scenario())
