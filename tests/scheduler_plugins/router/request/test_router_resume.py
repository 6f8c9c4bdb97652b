# SPDX-License-Identifier: Apache-2.0
"""A decode engine is lost in mid-stream: another one goes on, and the client sees one answer."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import DONE, FakeEngine, World, drop, forever, run, status

from scheduler_plugins.router.request.resume import StreamRecord, resumable

PROMPT = [11, 12, 13]
ANSWER = [
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "again",
    "and",
    "again",
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Speaker:
    """An engine whose model always says the same: token n is the n-th word of `ANSWER`."""

    def __init__(self, dies_after: int | None = None, *, owes: str = "") -> None:
        """`dies_after`: so many tokens. `owes`: it dies after the last one: before it has told why it ended
        (`reason`), or after that (`rest`)."""
        self.dies_after = dies_after
        self.owes = owes

    async def __call__(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        prompt = body["prompt"] if isinstance(body.get("prompt"), list) else PROMPT
        first = len(prompt) - len(PROMPT)
        most = body.get("max_tokens") or len(ANSWER)
        words = list(enumerate(ANSWER))[first : first + most]
        for n, (token, word) in enumerate(words):
            if n == self.dies_after:
                await asyncio.sleep(0.02)
                drop(request)
                await forever()
            choice: dict[str, Any] = {"index": 0}
            said = f"{word} "
            choice |= {"delta": {"content": said}} if chat else {"text": said}
            ends = (token, word) == words[-1] and self.owes != "reason"
            choice["finish_reason"] = "length" if ends else None
            event: dict[str, Any] = {
                "id": f"cmpl-{engine.name}",
                "object": "chat.completion.chunk" if chat else "text_completion",
                "model": "m",
                "choices": [choice],
            }
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
                if n == 0:
                    (event if chat else choice)["prompt_token_ids"] = prompt
            data = json.dumps(event, separators=(",", ":")).encode()
            await response.write(b"data: " + data + b"\n\n")
        if self.owes:
            await asyncio.sleep(0.02)
            drop(request)
            await forever()
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(words)}
            last = {"id": "x", "choices": [], "usage": usage}
            await response.write(f"data: {json.dumps(last)}\n\n".encode())
        await response.write(DONE)
        return response


def said(events: list[Any]) -> str:
    """The answer's text."""
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
    )


async def asked(world: World, path: str, body: dict[str, Any]) -> list[Any]:
    reply = await world.post(path, body)
    assert reply.status == 200, reply.text
    return reply.events


WHOLE = " ".join(ANSWER) + " "
COMPLETION = {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 20}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize("after", [1, 5])
def test_a_stream_goes_on_at_another_engine(path: str, body: dict[str, Any], after: int) -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(after), Speaker()
            events = await asked(world, path, {**body, "stream_options": {"include_usage": True}})
            assert events[-1] == "[DONE]"
            assert said(events) == WHOLE
            assert {event["id"] for event in events[:-1]} == {"cmpl-d0"}
            assert len({event["object"] for event in events[:-1]}) == 1
            assert "token_ids" not in json.dumps(events)
            assert events[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": len(ANSWER)}
            assert world.d[1].bodies[-1]["prompt"] == [*PROMPT, *range(after)]
            assert await world.metric("resumed_streams_total") == 1
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize("owes", ["reason", "rest"])
def test_an_engine_lost_after_its_last_token_costs_nothing(
    path: str, body: dict[str, Any], owes: str
) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(owes=owes), Speaker()
            usage = {"stream_options": {"include_usage": True}, "max_tokens": 5}
            events = await asked(world, path, {**body, **usage})
            assert said(events) == " ".join(ANSWER[:5]) + " "
            reasons = [choice["finish_reason"] for e in events[:-1] for choice in e["choices"]]
            assert [reason for reason in reasons if reason] == ["length"]
            told = events[-2]["usage"]
            assert (told["prompt_tokens"], told["completion_tokens"]) == (3, 5)
            assert events[-1] == "[DONE]"
            assert not world.d[1].bodies
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())


def test_an_engine_that_owes_tokens_and_their_ids_is_not_taken_for_done() -> None:
    record = StreamRecord({**COMPLETION, "max_tokens": 1}, "/v1/completions")
    record.feed(b'data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n')
    assert record.ending() is None


def test_engines_may_be_lost_one_after_the_other() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=3) as world:
            for engine, after in zip(world.d, (3, 2, None), strict=True):
                engine.behave = Speaker(after)
            events = await asked(world, "/v1/completions", COMPLETION)
            assert said(events) == WHOLE
            assert world.d[2].bodies[-1]["max_tokens"] == 20 - 5

    run(scenario())


@pytest.mark.parametrize(
    "more",
    [{"seed": 7}, {"logprobs": 3}, {"stop": ["x"]}, {"presence_penalty": 1.0}, {"n": 2}],
)
def test_what_another_engine_could_not_do_alike_ends_with_an_error(more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(4), Speaker()
            events = await asked(world, "/v1/completions", {**COMPLETION, **more})
            assert events[-1]["error"]["type"] == "stream_interrupted"
            assert not world.d[1].bodies
            assert "return_token_ids" not in world.d[0].bodies[0]

    run(scenario())


def test_an_engine_that_tells_no_ids_ends_with_an_error_as_well() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:

            async def mute(engine, request, body):  # type: ignore[no-untyped-def]
                return await Speaker(4)(engine, request, {**body, "return_token_ids": False})

            world.d[0].behave, world.d[1].behave = mute, Speaker()
            events = await asked(world, "/v1/completions", COMPLETION)
            assert events[-1]["error"]["type"] == "stream_interrupted"

    run(scenario())


def test_if_no_other_engine_takes_the_rest_the_client_is_told() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(4), status(400)
            world.p[0].behave = status(500)
            events = await asked(world, "/v1/completions", COMPLETION)
            assert events[-1]["error"]["type"] == "stream_interrupted"
            assert said([*events[:-1], ""]) == " ".join(ANSWER[:4]) + " "

    run(scenario())


def test_a_client_that_asks_for_ids_gets_them() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(4), Speaker()
            events = await asked(world, "/v1/completions", {**COMPLETION, "return_token_ids": True})
            found = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
            assert found == [*range(len(ANSWER))]

    run(scenario())


def event(text: str, ids: list[int], **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None, **more}
    data = json.dumps({"id": "a", "choices": [choice]}, separators=(",", ":"))
    return f"data: {data}\n\n".encode()


def test_half_a_character_is_generated_again() -> None:
    """Its tokens were generated, its text was not sent: the next engine has to say it."""
    record = StreamRecord(COMPLETION, "/v1/completions")
    record.feed(event("a", [1], prompt_token_ids=[9]) + event("", [2]) + event("", [3]))
    body = record.next_body()
    assert body is not None
    assert (body["prompt"], body["max_tokens"]) == ([9, 1], 19)
    record.feed(event("é", [4]))
    body = record.next_body()
    assert body is not None
    assert body["prompt"] == [9, 1, 2, 3, 4]


def test_text_that_looks_like_ids_reaches_the_client() -> None:
    record = StreamRecord(COMPLETION, "/v1/completions")
    text = ',"token_ids":[1,2],"finish_reason":"stop"'
    sent = record.feed(event(text, [5], prompt_token_ids=[9]))
    assert json.loads(sent.removeprefix(b"data: "))["choices"][0] == {
        "index": 0,
        "text": text,
        "finish_reason": None,
    }
    body = record.next_body()
    assert body is not None
    assert body["prompt"] == [9, 5]


class SlowRecord(StreamRecord):
    """Looks at every event closely."""

    def _plain(self, event: bytes) -> bytes | None:
        return None


def chat_event(text: str, ids: list[int], **more: Any) -> bytes:
    delta = {"role": "assistant", **more.pop("delta", {}), "content": text}
    choice = {"index": 0, "delta": delta, "token_ids": ids, "finish_reason": None, **more}
    data = json.dumps({"id": "a", "choices": [choice]}, separators=(",", ":"), ensure_ascii=False)
    return f"data: {data}\n\n".encode()


MORE: list[dict[str, Any]] = [
    {},
    {},
    {"prompt_token_ids": None},
    {"prompt_token_ids": [9]},
    {"finish_reason": "stop"},
    {"token_ids": None},
    {"delta": {"reasoning": "hm"}},
    {"delta": {"tool_calls": [{"id": "x"}]}},
    {"stop_reason": None, "logprobs": None},
]
TEXTS = [
    "",
    "a",
    'say "x" \\',
    "\ufffd",
    "é",
    ',"token_ids":[7],"finish_reason":"stop"',
    "]",
    "\n\n",
]
OTHERS = [
    b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n',
    b'data: {"id":"a","choices":[{"index":0,"text":"b","token_ids":[1,"x"]}]}\n\n',
    b'data: {"id":"a","choices":[{"index":0,"text":"b","token_ids":[1\n\n',
    b": a comment\n\n",
    b"data: [DONE]\n\n",
]
told = st.tuples(
    st.sampled_from(TEXTS),
    st.lists(st.integers(0, 99), max_size=3),
    st.sampled_from(MORE),
    st.sampled_from([event, chat_event]),
).map(lambda made: made[3](made[0], made[1], **made[2]))


@given(st.lists(told | st.sampled_from(OTHERS), max_size=8), st.booleans(), st.booleans())
def test_common_events_are_noted_as_others_are(
    events: list[bytes], chat: bool, together: bool
) -> None:
    body, path = (CHAT, "/v1/chat/completions") if chat else (COMPLETION, "/v1/completions")
    first = (chat_event if chat else event)("a", [1], prompt_token_ids=[9])
    quick, slow = StreamRecord(body, path), SlowRecord(body, path)
    for one in [first, b"".join(events)] if together else [first, *events]:
        assert quick.feed(one) == slow.feed(one)
        assert quick.next_body() == slow.next_body()
        assert quick.ending() == slow.ending()


def test_calls_and_reasoning_are_not_continued() -> None:
    record = StreamRecord(CHAT, "/v1/chat/completions")
    record.feed(event("a", [1], prompt_token_ids=[9]))
    assert record.next_body() is not None
    record.feed(b'data: {"choices":[{"delta":{"reasoning":"hm"},"token_ids":[2]}]}\n\n')
    assert record.next_body() is None


def test_only_streams_of_one_answer_are_recorded() -> None:
    assert resumable(COMPLETION)
    assert not resumable({**COMPLETION, "stream": False})
    assert not resumable({**COMPLETION, "prompt": ["a", "b"]})


def test_a_clients_limit_ends_a_request() -> None:
    async def scenario() -> None:
        async with World() as world:

            async def hangs(engine, request, body):  # type: ignore[no-untyped-def]
                await forever()

            world.d[0].behave = hangs
            limit = {"X-Request-Timeout-Ms": "100"}
            reply = await world.post("/v1/completions", {"model": "m", "prompt": "x"}, **limit)
            assert (reply.status, reply.json["error"]["type"]) == (504, "timeout")
            assert await world.metric("requests_total", outcome="deadline") == 1
            world.d[0].behave = Speaker(2)
            wrong = {"X-Request-Timeout-Ms": "soon"}
            reply = await world.post("/v1/completions", {"model": "m", "prompt": "x"}, **wrong)
            assert reply.status == 400

    run(scenario())
