# SPDX-License-Identifier: Apache-2.0
"""A decode engine is lost in mid-stream: another one goes on, and the client sees one answer."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import (
    CONTEXT_TOKENS,
    DONE,
    FakeEngine,
    World,
    drop,
    forever,
    run,
    says,
    status,
    until,
)

from scheduler_plugins.router.request.resumable import resumable
from scheduler_plugins.router.request.resume import StreamRecord

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
        """`dies_after`: number of tokens. `owes`: it dies after the last token, before it has told why it ended
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
    [
        {"seed": 7},
        {"logprobs": 3},
        {"logprob_token_ids": [1]},
        {"stop": ["x"]},
        {"presence_penalty": 1.0},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
        {"n": 2},
    ],
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


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_a_stream_goes_on_though_one_side_has_no_room(full: str) -> None:
    """Its client cannot be told to come back later."""

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = Speaker(4)
            if full == "prefill":
                world.d[1].behave = Speaker()

                async def fills(engine, request, body):  # type: ignore[no-untyped-def]
                    first = world.p[0]
                    done = lambda: first.headers and not world.known(first).prefills  # noqa: E731
                    await until(lambda: bool(done()), "the prompt was computed")
                    first.behave = status(429)
                    return await Speaker(4)(engine, request, body)

                world.d[0].behave = fills
            else:
                world.d[1].behave, world.p[0].behave = status(429), Speaker()
            events = await asked(world, "/v1/completions", COMPLETION)
            assert said(events) == WHOLE
            assert events[-1] == "[DONE]"

    run(scenario())


def test_a_chat_without_a_limit_goes_on_up_to_the_end_of_the_context() -> None:
    """vLLM reads a completion without `max_tokens`, or with `null`, as one of 16 tokens."""

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(5), Speaker()
            assert said(await asked(world, "/v1/chat/completions", CHAT)) == WHOLE
            left = CONTEXT_TOKENS - len(PROMPT) - 5
            assert world.d[1].bodies[-1]["max_tokens"] == left

    run(scenario())


@pytest.mark.parametrize("told", [None, "4096"])
def test_a_chat_without_a_limit_breaks_off_where_the_context_is_not_known(told: object) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            for engine in world.d:
                engine.context_tokens = told
                await engine.die()
                await world.down(engine)
                await engine.start()
                await world.up(engine)
            world.d[0].behave = world.d[1].behave = Speaker(5)
            events = await asked(world, "/v1/chat/completions", CHAT)
            assert events[-1]["error"]["type"] == "stream_interrupted"
            assert said(events) == " ".join(ANSWER[:5]) + " "

    run(scenario())


def test_a_completion_knows_no_limit_of_chats() -> None:
    """An engine that dies with tokens to come is not taken for one that owes the end alone."""
    record = StreamRecord({**COMPLETION, "max_completion_tokens": 1}, "/v1/completions")
    record.feed(event("a", [1], prompt_token_ids=[9]))
    assert record.ending() is None
    body = record.next_body()
    assert body is not None
    assert body["max_tokens"] == 19


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


def test_events_that_are_not_told_apart_are_not_taken_for_one() -> None:
    """The second one's tokens would be sent again."""
    record = StreamRecord(COMPLETION, "/v1/completions")
    record.feed(event("a", [1], prompt_token_ids=[9]))
    assert record.next_body() is not None
    record.feed((event("b", [2]) + event("c", [3])).replace(b"\n\n", b"\r\n\r\n"))
    assert record.next_body() is None


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
    """SlowProbes at every event closely."""

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
    limited = {**CHAT, "max_tokens": 20}
    body, path = (limited, "/v1/chat/completions") if chat else (COMPLETION, "/v1/completions")
    first = (chat_event if chat else event)("a", [1], prompt_token_ids=[9])
    quick, slow = StreamRecord(body, path), SlowRecord(body, path)
    for one in [first, b"".join(events)] if together else [first, *events]:
        assert quick.feed(one) == slow.feed(one)
        assert quick.next_body() == slow.next_body()
        assert quick.ending() == slow.ending()


def test_calls_and_reasoning_are_not_continued() -> None:
    record = StreamRecord({**CHAT, "max_tokens": 9}, "/v1/chat/completions")
    record.feed(event("a", [1], prompt_token_ids=[9]))
    assert record.next_body() is not None
    record.feed(b'data: {"choices":[{"delta":{"reasoning":"hm"},"token_ids":[2]}]}\n\n')
    assert record.next_body() is None


def chat_engine(*deltas: dict[str, Any], dies: bool = False) -> Any:
    """An engine with a parser of reasoning: it keeps back the mark that begins it, and tells its id all the same."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for n, delta in enumerate(deltas):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            choice |= {"token_ids": [n]} if n else {}
            told: dict[str, Any] = {"id": engine.name, "object": "chat.completion.chunk"}
            told |= {"choices": [choice], **({} if n else {"prompt_token_ids": PROMPT})}
            data = json.dumps(told, separators=(",", ":"))
            await response.write(f"data: {data}\n\n".encode())
        await asyncio.sleep(0.02)
        if dies:
            drop(request)
            await forever()
        await response.write(DONE)
        return response

    return behave


ROLE = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(("came", "dies"), [(1, True), (2, True), (1, False)])
def test_a_chat_of_which_nothing_was_said_is_asked_for_again_as_a_chat(
    came: int, dies: bool
) -> None:
    """As a completion of the ids it would show the client the reasoning as the answer. vLLM ends a chat so, too, that it
    aborts before its first token."""

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            thought = [ROLE, {}, {"reasoning": "hm"}, {"content": "yes"}]
            world.d[0].behave = chat_engine(*thought[:came], dies=dies)
            world.d[1].behave = chat_engine(*thought)
            events = await asked(world, "/v1/chat/completions", CHAT)
            assert events[-1] == "[DONE]"
            assert {event["id"] for event in events[:-1]} == {"d0"}
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["hm"]
            assert "".join(delta.get("content", "") for delta in deltas) == "yes"
            assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
            assert "messages" in world.d[1].bodies[-1]
            assert "token_ids" not in json.dumps(events)

    run(scenario())


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


def test_an_engine_that_says_that_its_core_has_died_is_lost_like_any_other() -> None:
    """vLLM's API server outlives the engine's core by some events: an error, and the end mark."""

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            choice = {"index": 0, "text": "The ", "token_ids": [0], "prompt_token_ids": PROMPT}
            event = {"id": "cmpl-d0", "choices": [choice]}
            data = json.dumps(event, separators=(",", ":")).encode()
            error = b'{"error":{"message":"EngineCore died","type":"x","code":500}}'
            # One write: tokens and error come together.
            core_dies = says(b"data: " + data + b"\n\ndata: " + error + b"\n\n" + DONE)
            world.d[0].behave, world.d[1].behave = core_dies, Speaker()
            events = await asked(world, "/v1/completions", COMPLETION)
            assert said(events) == WHOLE
            assert events[-1] == "[DONE]"
            world.d[1].behave = world.p[0].behave = core_dies
            events = await asked(world, "/v1/completions", COMPLETION)
            assert events[-1]["error"]["type"] == "stream_interrupted", "nobody can go on"
            assert said(events) == "The The The ", "every token that came, once"
            plain = {"model": "m", "prompt": "hi", "stream": True, "stop": ["x"]}
            reply = await world.post("/v1/completions", plain)
            assert reply.status == 503, "the client has nothing yet, so all were asked"
            assert "EngineCore died" not in reply.text

    run(scenario())


NONSENSE = ("{", "null", "{{{", "{}", '{"choices":null}', '{"choices":[5]}', '"\ud83d"')


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_stream_with_nonsense_in_it_goes_on_elsewhere_or_ends_with_an_error(
    nonsense: str,
) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            garbage = f"data: {nonsense}\n\n".encode("utf-8", "surrogatepass")
            nonsensical = says(garbage + DONE)
            world.d[0].behave, world.d[1].behave = Speaker(3), nonsensical
            world.p[0].behave = Speaker()
            assert said(await asked(world, "/v1/completions", COMPLETION)) == WHOLE
            world.p[0].behave = nonsensical
            events = await asked(world, "/v1/completions", COMPLETION)
            assert events[-1]["error"]["type"] == "stream_interrupted"
            assert "(malformed)" in events[-1]["error"]["message"] or "no engine" in str(events[-1])
            assert said(events) == "The quick brown "
            # Nothing can go on with the seeded one.
            seeded = {**COMPLETION, "seed": 1}
            first = event_of("The ")
            world.d[0].behave = world.d[1].behave = says(first, garbage, event_of("late"), DONE)
            reply = await world.post("/v1/completions", seeded)
            assert reply.content.startswith(first)
            assert reply.events[-1]["error"]["type"] == "stream_interrupted"
            assert "late" not in reply.text

    run(scenario())


def event_of(text: str) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None}
    return f"data: {json.dumps({'id': 'a', 'choices': [choice]})}\n\n".encode()


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("seed", [None, 1])
def test_a_stream_that_begins_with_nonsense_is_asked_for_elsewhere(
    nonsense: str, seed: int | None
) -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            garbage = f"data: {nonsense}\n\n".encode("utf-8", "surrogatepass")
            world.d[0].behave, world.d[1].behave = says(garbage, DONE), Speaker()
            for _ in range(2):
                assert (
                    said(await asked(world, "/v1/completions", {**COMPLETION, "seed": seed}))
                    == WHOLE
                )
            assert await world.metric("retries_total", cause="malformed") >= 1

    run(scenario())

    run(scenario())


def test_a_prompt_that_was_shortened_is_not_shortened_again() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave, world.d[1].behave = Speaker(3), Speaker()
            events = await asked(
                world, "/v1/completions", {**COMPLETION, "truncate_prompt_tokens": 3}
            )
            assert said(events) == WHOLE
            rest = world.d[1].bodies[-1]
            assert rest["prompt"] == [*PROMPT, 0, 1, 2]
            assert "truncate_prompt_tokens" not in rest

    run(scenario())


@pytest.mark.parametrize(
    "field",
    [
        {"seed": 0},
        {"logprobs": 0},
        {"bad_words": ["a b"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
    ],
)
def test_what_ids_alone_cannot_go_on_with_is_not_resumed(field: dict[str, Any]) -> None:
    assert resumable(CHAT)
    assert not resumable({**CHAT, **field})
    assert resumable({**CHAT, "presence_penalty": 0, "top_logprobs": 0, "logprobs": False})


BYTES = {1: "a", 2: "\ufffd", 3: "\ufffd", 4: "b"}
"""Texts of single tokens; 2 and 3 together are one character."""


def text_of(ids: list[int]) -> str:
    return "".join(BYTES[one] for one in ids).replace("\ufffd\ufffd", "é")


def several(*batches: list[int], goes_on: bool = True) -> Any:
    """An engine that sends several tokens in one event, and keeps back half a character, as vLLM does when its API server is
    busy. `goes_on`: until it dies."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        given = body["prompt"] if isinstance(body["prompt"], list) else PROMPT
        prompt, before = given[:3], given[3:]
        if before and before[-1] == 2:
            text = "the prompt again, "  # vLLM's detokenizer
        else:
            text = ""
        done = list(before)
        for batch in batches:
            told = text_of(done).removesuffix("\ufffd")
            done += [one for one in batch if len(done) < 4]
            new = text + text_of(done).removesuffix("\ufffd").removeprefix(told)
            await response.write(event(new, done[len(before) :], prompt_token_ids=prompt))
            before, text = list(done), ""
        if goes_on:
            await asyncio.sleep(0.02)
            drop(request)
            await forever()
        await response.write(DONE)
        return response

    return behave


@pytest.mark.parametrize("cut", [[[1, 2]], [[1], [2]], [[1, 2, 3]], [[1], [2, 3]], [[1], [2], [3]]])
def test_half_a_character_among_several_tokens_is_generated_again(cut: list[list[int]]) -> None:
    """Else the next engine's prompt would end with it, and vLLM's detokenizer then says the whole prompt."""

    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            for fake in world.p + world.d:
                fake.detokenize = text_of
            rest = [1, 2, 3, 4][len(text_of_sent(cut)) :]
            world.d[0].behave, world.d[1].behave = several(*cut), several(rest, goes_on=False)
            events = await asked(world, "/v1/completions", COMPLETION)
            assert said(events) == "aéb"
            assert events[-1] == "[DONE]"

    run(scenario())


def text_of_sent(batches: list[list[int]]) -> list[int]:
    """The tokens whose text was sent."""
    ids = [one for batch in batches for one in batch]
    while ids and text_of(ids).endswith("\ufffd"):
        ids.pop()
    return ids


def test_a_stream_of_which_nobody_can_tell_where_its_text_ends_is_not_continued() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            world.d[0].behave = several([1, 2])  # and no engine detokenizes
            events = await asked(world, "/v1/completions", COMPLETION)
            assert events[-1]["error"]["type"] == "stream_interrupted"
            assert said(events) == "a"

    run(scenario())


def test_what_the_client_has_been_shown_is_not_generated_again() -> None:
    record = StreamRecord({**COMPLETION, "return_token_ids": True}, "/v1/completions")
    record.feed(event("a", [1], prompt_token_ids=[9]))
    assert record.next_body() is not None
    record.feed(event("", [2]))
    assert record.next_body() is None, "it has seen the id"
    garbled = StreamRecord(COMPLETION, "/v1/completions")
    garbled.feed(event("a\ufffd", [1], prompt_token_ids=[9]))
    assert garbled.next_body() is None, "it has seen the text"
    garbled.feed(event("b", [2]))
    assert garbled.next_body() is not None
