# SPDX-License-Identifier: Apache-2.0
"""What a client is told of its prompt's cached tokens: what was cached when the prompt was computed, not what was handed over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import DEADLINE_S, DONE, Behaviour, FakeEngine, World, choices, hang, run, status
from test_router_kinds import world as world_of_kinds

from scheduler_plugins.router.handoff.usage import PromptUsage, UsagePatch, prompt_usage

PROMPT, CACHED, CREATED = 200, 16, 176


def usage(cached: int | None, created: int | None = None) -> dict[str, Any]:
    details = {"cached_tokens": cached, "created_cache_tokens": created}
    counts = {"prompt_tokens": PROMPT, "completion_tokens": 2, "total_tokens": PROMPT + 2}
    return {**counts, "prompt_tokens_details": details}


THEIRS = usage(PROMPT - 1, 0)
"""What a decode engine says of a prompt that was handed over."""
SAYS = {
    "vLLM with details": {"usage": usage(CACHED, CREATED)},
    "vLLM without": {"kv_transfer_params": {"remote_prefill_cached_tokens": CACHED}},
    "SGLang": {"meta_info": {"cached_tokens": CACHED}},
}


def decodes(*, at_once: bool = False) -> Behaviour:
    """A decode engine; its usage comes in an event of its own, or with the stream's end."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "é\ud83d"}], "usage": THEIRS})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        said = [b'data: {"choices":[{"text":"a"}]}\n\n'] * 2
        last = f"data: {json.dumps({'choices': [], 'usage': THEIRS})}\n\n".encode() + DONE
        for part in [b"".join(said) + last] if at_once else [*said, last]:
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    return behave


def prefills(says: dict[str, Any], after_s: float = 0.0) -> Behaviour:
    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await asyncio.sleep(after_s)
        return web.json_response({"id": "cmpl-1", **choices("a"), **says})

    return behave


async def told(w: World, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """The usage that a client gets."""
    asked = {"messages": []} if "chat" in path else {"prompt": "hello"}
    reply = await w.post(path, {"model": "m", **asked, **body})
    assert reply.status == 200
    if not body.get("stream"):
        return dict(reply.json["usage"])
    *texts, last, end = reply.events
    assert end == "[DONE]"
    assert len(texts) == 2
    return dict(last["usage"])


@pytest.mark.parametrize("after_s", [0.0, 0.2], ids=["soon", "late"])
@pytest.mark.parametrize("stream", [False, True, "at once"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("says", SAYS)
def test_the_prefill_engines_count_is_the_clients(
    says: str, path: str, stream: Any, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_plugins.router.handoff.prefill.USAGE_S", DEADLINE_S)

    async def scenario() -> None:
        async with World() as w:
            w.p[0].behave = prefills(SAYS[says], after_s)
            w.d[0].behave = decodes(at_once=stream == "at once")
            created = CREATED if "details" in says else None
            found = await told(w, path, stream=bool(stream))
            assert found == usage(CACHED, created)
            assert await w.metric("cached_tokens_total", what="actual") == CACHED

    run(scenario())


@pytest.mark.parametrize(
    "says",
    [
        {"usage": usage(PROMPT - 1)},
        {"meta_info": {"cached_tokens": PROMPT - 1, "prompt_tokens": PROMPT}},
        {"kv_transfer_params": {"remote_prefill_cached_tokens": PROMPT}},
    ],
    ids=["vLLM", "SGLang", "without the prompt's length"],
)
def test_the_cached_part_of_prompts_is_one_at_most(says: dict[str, Any]) -> None:
    """The prompt is 5 bytes long, which the router takes for one or two tokens. The engine counts 200."""

    async def scenario() -> None:
        async with World() as w:
            w.p[0].behave, w.d[0].behave = prefills(says), decodes()
            await told(w)
            counted = await w.metric("counted_prompt_tokens_total")
            assert counted == PROMPT
            for what in ("actual", "expected"):
                assert await w.metric("cached_tokens_total", what=what) <= counted

    run(scenario())


OLD = prefills({})


@pytest.mark.parametrize("behave", [OLD, hang, status(500)], ids=["old", "hung", "refuses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_count_that_nobody_tells_is_null(
    monkeypatch: pytest.MonkeyPatch, behave: Behaviour, stream: bool
) -> None:
    """vLLM 0.31 tells none. A wrong figure would be billed. Where P took nothing, nothing was handed over."""
    monkeypatch.setattr("scheduler_plugins.router.handoff.prefill.USAGE_S", 0.1)

    async def scenario() -> None:
        async with World() as w:
            w.p[0].behave, w.d[0].behave = behave, decodes()
            found = await told(w, stream=stream)
            refused = behave not in (hang, OLD)
            assert found == (THEIRS if refused else usage(None))

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}])
def test_what_one_engine_computes_alone_it_counts_itself(
    body: dict[str, Any], stream: bool
) -> None:
    async def scenario() -> None:
        async with World() as w:
            w.d[0].behave = decodes()
            assert await told(w, stream=stream, **body) == THEIRS

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", "vs")
def test_an_sglang_decode_engine_is_told_with_the_kv(prefill: str, stream: bool) -> None:
    """Its own figure stays where its prefill engine's answer has none."""

    async def scenario() -> None:
        async with world_of_kinds(prefill, "s") as w:
            w.d[0].behave = decodes()
            w.p[0].behave = prefills({})
            assert await told(w, stream=stream) == THEIRS
            w.p[0].behave = prefills(SAYS["vLLM with details"])
            assert await told(w, stream=stream) == usage(CACHED, CREATED)

    run(scenario())


def test_no_count_is_above_the_prompts_length() -> None:
    """A stream that goes on elsewhere has a longer prompt there."""
    patch = UsagePatch(PromptUsage(PROMPT + 50, PROMPT + 60))
    event = f"data: {json.dumps({'usage': THEIRS})}\n\n".encode()
    (found, _) = patch.events(event).split(b"\n\n")
    assert json.loads(found.removeprefix(b"data: "))["usage"] == usage(PROMPT, PROMPT)
    assert patch.events(patch.events(event)) == patch.events(event)


@pytest.mark.parametrize(
    "odd",
    [
        b'data: {"usage": 5, "prompt_tokens_details": 1}',
        b'data: {"prompt_tokens_details"',
        b'data: {"usage":{"prompt_tokens_details":null,"prompt_tokens":3}}',
        b"data: [DONE]",
        b': "prompt_tokens_details"',
    ],
)
def test_what_is_no_usage_passes_as_it_is(odd: bytes) -> None:
    assert UsagePatch(PromptUsage(1, 2)).events(odd + b"\n\n") == odd + b"\n\n"
    assert prompt_usage(odd) == prompt_usage({"usage": []}) == PromptUsage()


@pytest.mark.parametrize("space", ["", " ", "\n  "])
def test_all_but_the_usage_of_an_answer_stays_byte_for_byte(space: str) -> None:
    """It is not parsed: with log probabilities it can be very long."""
    usage = json.dumps({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}})
    before = b'{"choices": [{"text": "\\"usage\\": {", "logprob": NaN}], "usage":' + space.encode()
    after = b', "more": [1.0,  2e5, "\xc3\xa9"]}'
    found = UsagePatch(PromptUsage(3)).whole(before + usage.encode() + after)
    assert found.startswith(before)
    assert found.endswith(after)
    middle = json.loads(found[len(before) : -len(after)])
    assert middle["prompt_tokens_details"] == {"cached_tokens": 3}
    null = b'{"usage":null,"choices":[{"prompt_tokens_details":5}]}'
    assert UsagePatch(PromptUsage(3)).whole(null) == null
