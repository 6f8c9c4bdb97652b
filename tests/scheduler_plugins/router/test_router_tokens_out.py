# SPDX-License-Identifier: Apache-2.0
"""Token ids in and out (vLLM's `/inference/v1/generate`): a pair serves them as it serves completions."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    DEADLINE_S,
    DONE,
    FakeEngine,
    World,
    answer,
    drop,
    forever,
    run,
    says,
    status,
)
from test_router_kinds import world as world_of

from scheduler_plugins.admission.endpoints import GENERATE
from scheduler_plugins.admission.prompt import PromptMemory
from scheduler_plugins.router.handoff import prefill
from scheduler_plugins.router.prompt.body import COMPLETIONS, as_completion, parse
from scheduler_plugins.router.prompt.describe import describe
from scheduler_plugins.router.request.resumable import TokenRecord

PROMPT = [11, 12, 13]
ANSWER = list(range(100, 112))
SAMPLING = {"max_tokens": 20, "temperature": 0}
ASKED = {"model": "m", "token_ids": PROMPT, "sampling_params": SAMPLING}


class Speaker:
    """An engine whose model says `ANSWER`, as vLLM's endpoint says it."""

    def __init__(self, dies_after: int | None = None, *, owes: str = "") -> None:
        """`dies_after`: number of tokens. `owes`: it dies after the last token, before it has told why it ended
        (`reason`), or after that (`rest`)."""
        self.dies_after, self.owes = dies_after, owes

    async def __call__(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        prompt, sampling = body["token_ids"], body["sampling_params"]
        ids = ANSWER[len(prompt) - len(PROMPT) :][: sampling["max_tokens"]]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        head = {"request_id": f"generate-tokens-{engine.name}", "output_mode": "tokens"}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": "length", "token_ids": ids}
            return web.json_response({**head, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(event: dict[str, Any]) -> None:
            data = json.dumps({**head, **event}, separators=(",", ":")).encode()
            await response.write(b"data: " + data + b"\n\n")

        for n, token in enumerate(ids):
            if n == self.dies_after:
                await asyncio.sleep(0.02)
                drop(request)
                await forever()
            ends = n == len(ids) - 1 and self.owes != "reason"
            row = {"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []}
            choice = {"index": 0, "logprobs": {"content": [row]}, "token_ids": [token]}
            choice |= {"finish_reason": "length" if ends else None}
            choice |= (
                {"weight_versions": [{"version": "a", "start": 0, "end": len(ids)}]} if ends else {}
            )
            await say({"choices": [choice], "usage": None})
        if self.owes:
            await asyncio.sleep(0.02)
            drop(request)
            await forever()
        if (body.get("stream_options") or {}).get("include_usage"):
            await say({"choices": [], "usage": usage})
        await response.write(DONE)
        return response


def ids_in(events: list[Any]) -> list[int]:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return [token for choice in choices for token in choice["token_ids"]]


def test_both_engines_get_the_tokens_and_one_transfer() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = world.d[0].behave = Speaker()
            sampling = {**SAMPLING, "n": 1, "logprobs": 3, "min_tokens": 2, "stop_token_ids": [7]}
            more = {"output_mode": "tokens", "return_token_ids": True, "cache_salt": "s"}
            theft = {"do_remote_prefill": True, "remote_host": "elsewhere"}
            sampling["extra_args"] = {"kv_transfer_params": theft, "own": 1}
            sent = {**ASKED, **more, "sampling_params": sampling}
            transfers = {"kv_transfer_params": {**theft, "pool": {"read": False}}}
            reply = await world.post(GENERATE, {**sent, **transfers, "ec_transfer_params": theft})
            assert reply.json["choices"][0]["token_ids"] == ANSWER
            sampling["extra_args"] = {"own": 1}
            prefill, decode = world.p[0].bodies[0], world.d[0].bodies[0]
            params = decode.pop("kv_transfer_params")
            assert decode == sent
            assert params["pool"] == {"read": False}
            assert params["remote_engine_id"] == "engine-p0"
            told = prefill.pop("kv_transfer_params")
            assert told["transfer_id"] == params["remote_request_id"]
            assert told["pool"] == {"read": False}
            one = {
                "max_tokens": 1,
                "temperature": 0,
                "stop_token_ids": [7],
                "extra_args": {"own": 1},
            }
            kept = {"model": "m", "token_ids": PROMPT, "cache_salt": "s", "stream": False}
            assert prefill == {**kept, "sampling_params": one}
            assert await world.metric("requests_total", route=GENERATE, outcome="ok") == 1

    run(scenario())


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("n", 2, "several_answers"),
        ("prompt_logprobs", 0, "prompt_logprobs"),
        ("prompt_logprob_token_ids", [[1]], "prompt_logprobs"),
    ],
)
def test_what_no_transfer_can_serve_one_engine_serves(field: str, value: Any, cause: str) -> None:
    async def scenario() -> None:
        async with World() as world:
            world.d[0].behave = Speaker()
            sent = {**ASKED, "sampling_params": {**SAMPLING, field: value}}
            assert (await world.post(GENERATE, sent)).status == 200
            assert world.d[0].bodies == [sent]
            assert not world.p[0].bodies
            assert await world.metric("flows_total", flow="decode_alone", cause=cause) == 1

    run(scenario())


@pytest.mark.parametrize("logprobs", [None, 0, 5])
@pytest.mark.parametrize("after", [1, 5])
def test_a_stream_goes_on_at_another_engine(after: int, logprobs: int | None) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(after), Speaker()
            more = {"stream": True, "stream_options": {"include_usage": True}}
            sampling = {**SAMPLING, "logprobs": logprobs}
            events = (
                await world.post(GENERATE, {**ASKED, **more, "sampling_params": sampling})
            ).events
            assert events[-1] == "[DONE]"
            assert ids_in(events) == ANSWER
            assert {event["request_id"] for event in events[:-1]} == {"generate-tokens-d0"}
            assert events[-2]["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": len(ANSWER),
                "total_tokens": 3 + len(ANSWER),
            }
            assert events[-3]["choices"][0]["weight_versions"] is None, "known for a part only"
            rest = world.d[1].bodies[-1]
            assert rest["token_ids"] == [*PROMPT, *ANSWER[:after]]
            assert rest["sampling_params"] == {**sampling, "max_tokens": 20 - after}
            assert world.p[0].bodies[-1]["token_ids"] == rest["token_ids"]
            assert await world.metric("resumed_streams_total") == 1

    run(scenario())


@pytest.mark.parametrize("field", ["seed", "stop", "min_tokens", "presence_penalty", "extra_args"])
def test_a_stream_that_would_differ_elsewhere_ends_with_its_error(field: str) -> None:
    value = {"stop": ["x"], "extra_args": {"own": 1}}.get(field, 1)

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(3), Speaker()
            sampling = {**SAMPLING, field: value}
            sent = {**ASKED, "stream": True, "sampling_params": sampling}
            events = (await world.post(GENERATE, sent)).events
            assert events[-1]["error"]["type"] == "stream_interrupted"

    run(scenario())


@pytest.mark.parametrize("owes", ["reason", "rest"])
def test_an_engine_lost_after_its_last_token_costs_nothing(owes: str) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(owes=owes), Speaker()
            more = {"stream": True, "stream_options": {"include_usage": True}}
            sent = {**ASKED, **more, "sampling_params": {**SAMPLING, "max_tokens": 5}}
            events = (await world.post(GENERATE, sent)).events
            assert ids_in(events) == ANSWER[:5]
            reasons = [choice["finish_reason"] for e in events[:-1] for choice in e["choices"]]
            assert [reason for reason in reasons if reason] == ["length"]
            assert events[-2]["usage"]["total_tokens"] == 8
            assert not world.d[1].bodies

    run(scenario())


def test_a_stream_without_a_limit_goes_on_to_the_end_of_the_context() -> None:
    record = TokenRecord({"token_ids": PROMPT, "sampling_params": {}, "stream": True})
    record.feed(b'data: {"request_id":"r","choices":[{"index":0,"token_ids":[100]}]}\n\n')
    assert record.next_body() is None, "the context is not known"
    record.context_tokens = 10
    rest = record.next_body()
    assert rest is not None
    assert rest["sampling_params"]["max_tokens"] == 10 - 3 - 1


@pytest.mark.parametrize(
    ("ids", "text", "goes_on"),
    [([1], "a", True), ([1], "", False), ([1], "�", False), ([1, 2], "ab", False)],
)
def test_text_goes_on_only_behind_a_whole_character(
    ids: list[int], text: str, goes_on: bool
) -> None:
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, "output_mode": "text"}
    record = TokenRecord({**body, "stream": True})
    choice = {"index": 0, "token_ids": ids, "text": text, "finish_reason": None}
    event = {"request_id": "r", "output_mode": "text", "choices": [choice]}
    record.feed(f"data: {json.dumps(event)}\n\n".encode())
    assert (record.next_body() is not None) is goes_on


def test_token_ids_are_known_by_the_index_as_those_of_a_completion() -> None:
    ids = list(range(300))
    body = {**ASKED, "token_ids": ids, "cache_salt": "s"}
    sent = as_completion(parse(json.dumps(body).encode(), GENERATE), GENERATE)
    like = parse(json.dumps({"model": "m", "prompt": ids, "cache_salt": "s"}).encode(), COMPLETIONS)
    found, wanted = (
        describe(one, {}, "r", 0.0, PromptMemory(0)) for one in (sent, {**like, "max_tokens": 20})
    )
    assert list(found.hashes) == list(wanted.hashes) != []
    assert (found.tokens, found.max_tokens) == (wanted.tokens, wanted.max_tokens) == (300, 20)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m", "sampling_params": {}}, "token_ids"),
        ({"model": "m", "token_ids": "1, 2", "sampling_params": {}}, "token_ids"),
        ({"model": "m", "token_ids": [1]}, "sampling_params"),
        ({"model": "m", "token_ids": [1], "sampling_params": []}, "sampling_params"),
        ({"model": "m", "token_ids": [1], "sampling_params": {"max_tokens": "x"}}, "max_tokens"),
        ({"model": "m", "token_ids": [1], "sampling_params": {"n": 1.5}}, "n"),
    ],
)
def test_a_body_of_another_form_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with World() as world:
            reply = await world.post(GENERATE, body)
            assert (reply.status, reply.json["error"]["param"]) == (400, param)
            assert not world.d[0].bodies

    run(scenario())


@pytest.mark.parametrize("code", [403, 404])
def test_a_prefill_engine_that_lacks_the_endpoint_costs_no_time_and_prefills_other_requests(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM without `--enable-scale-out`, in the middle of a rollout."""
    monkeypatch.setattr(prefill, "REFUSAL_GRACE_S", DEADLINE_S)

    async def lacks(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        return await (status(code) if "token_ids" in body else answer)(engine, request, body)

    async def without_kv(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if "kv_transfer_params" in body and "token_ids" in body:
            await forever()
        return await (Speaker() if "token_ids" in body else answer)(engine, request, body)

    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave, world.d[0].behave = lacks, without_kv
            for _ in range(6):
                reply = await world.post(GENERATE, ASKED)
                assert reply.json["choices"][0]["token_ids"] == ANSWER
            assert await world.metric("circuit_opened_total") == 0
            assert (await world.complete()).status == 200
            assert "prompt" in world.p[0].bodies[-1]

    run(scenario())


def test_its_own_id_is_the_requests_id_everywhere() -> None:
    async def scenario() -> None:
        async with World() as world:
            world.p[0].behave = world.d[0].behave = Speaker()
            reply = await world.post(GENERATE, {**ASKED, "request_id": "mine"})
            assert reply.headers["X-Request-Id"] == "mine"
            assert world.d[0].headers[-1]["X-Request-Id"] == "mine"
            header = {"X-Request-Id": "header"}
            reply = await world.post(GENERATE, {**ASKED, "request_id": "mine"}, **header)
            assert reply.headers["X-Request-Id"] == "header", "as vLLM reads it"
            assert (await world.post(GENERATE, {**ASKED, "request_id": 5})).status == 200

    run(scenario())


def test_an_sglang_prefill_engine_gets_the_ids_as_they_came() -> None:
    async def scenario() -> None:
        async with world_of("s", "v") as world:
            world.d[0].behave = Speaker()
            assert (await world.post(GENERATE, ASKED)).status == 200
            assert world.p[0].bodies[-1]["input_ids"] == PROMPT
            assert world.d[0].bodies[-1]["token_ids"] == PROMPT

    run(scenario())


def test_sglang_engines_do_not_have_it_and_the_client_hears_what_to_use() -> None:
    async def scenario() -> None:
        async with world_of("s", "s") as world:
            reply = await world.post(GENERATE, ASKED)
            assert reply.status == 400
            assert "use /v1/completions, whose prompt takes token ids" in reply.text
            assert (
                "use /tokenize"
                in (await world.post("/v1/completions/render", {"prompt": "a"})).text
            )
            assert not world.d[0].bodies + world.p[0].bodies
        async with world_of("v", "sv") as world:
            world.p[0].behave = world.d[1].behave = Speaker()
            for _ in range(3):
                assert (await world.post(GENERATE, ASKED)).status == 200
            assert not world.d[0].bodies

    run(scenario())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/generate", "use /v1/completions or /inference/v1/generate"),
        ("/inference/v1/abort_requests", "close its connection"),
        ("/completions", "use /v1/completions"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/nothing", "it serves /v1/completions, /v1/chat/completions, /inference/v1/generate"),
        ("/v1/audio/transcriptions", "it serves /v1/completions"),
    ],
)
def test_any_other_path_is_answered_with_what_to_use(path: str, said: str) -> None:
    async def scenario() -> None:
        async with World() as world:
            reply = await world.post(path, {})
            assert (reply.status, reply.json["error"]["code"]) == (404, 404)
            assert said in reply.json["error"]["message"]

    run(scenario())


def test_events_that_are_none_of_token_ids_end_the_stream() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=1) as world:
            good = b'data: {"request_id":"r","choices":[{"index":0,"token_ids":[1]}]}\n\n'
            world.d[0].behave = says(good, b'data: {"choices":[{"token_ids":"x"}]}\n\n', DONE)
            world.p[0].behave = Speaker()
            reply = await world.post(GENERATE, {**ASKED, "stream": True})
            assert reply.content.startswith(good)

    run(scenario())
