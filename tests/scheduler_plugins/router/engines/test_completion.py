# SPDX-License-Identifier: Apache-2.0
"""What counts as an engine's answer."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.router.engines import completion
from scheduler_plugins.router.engines.completion import good_events, status_of
from scheduler_plugins.router.engines.failures import EngineFailedError, OverloadedError

JSON = "application/json"
GOOD = b'data: {"id":"a","choices":[{"index":0,"text":"x"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
NOT_ONE = (
    b"data: {{{\n\n",
    b"data: null\n\n",
    b"data: 5\n\n",
    b"data: []\n\n",
    b"data: {}\n\n",
    b"data: \n\n",
    b'data: {"choices":null}\n\n',
    b'data: {"choices":[null]}\n\n',
    b'data: {"choices":[{"text":"a}\n\n',
    b'data: {"choices":[{"text":"\xff"}]}\n\n',
    b'event: x\ndata: {"choices"\n\n',
    b"data:null\n\n",
)


def status(content: bytes, *, code: int = 200, kind: str = JSON, completes: bool = True) -> int:
    return asyncio.run(status_of(code, kind, content, completes=completes))


@pytest.mark.parametrize(
    "content",
    [
        b'{"choices": [{"text": "a"}]}',
        b' {"choices": [{"logprobs": [NaN, -Infinity]}], "error": null}\n',
        '{"choices": [{"text": "é"}]}'.encode(),
        b'{"choices": [{"text": "\\ud83d"}]}',
    ],
)
def test_an_object_with_choices_is_a_completion(content: bytes) -> None:
    assert status(content) == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b"[]",
        b'{"choices": null}',
        b'{"choices": []}',
        b'{"choices": [5]}',
        b'{"choices": {"text": "a"}}',
        b'{"error": {"message": "no"}}',
        b'{"error": "no"}',
        b'{"choices": [{"text": "\xff\xfe"}]}',
        b'{"choices": [{"text": "a"}]',
        b'{"choices": [{"text": NaN, "a"}]}',
        b"<html></html>",
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("pad", [0, 2 << 20])
def test_anything_else_is_none_however_long_it_is(content: bytes, pad: int) -> None:
    if content.endswith(b"}") and pad:
        content = content[:-1] + b" " * pad + b"}"
    if pad and b"NaN" in content:
        pytest.skip("only the form of a long answer is looked at")
    with pytest.raises(EngineFailedError, match="it answered 200") as failure:
        status(content)
    assert failure.value.cause == "malformed"


@pytest.mark.parametrize("code", [201, 202, 204, 206])
@pytest.mark.parametrize("completes", [True, False])
def test_no_other_success_is_an_answer(code: int, completes: bool) -> None:
    with pytest.raises(EngineFailedError, match=f"it answered {code}"):
        status(b'{"choices": [{}]}', code=code, completes=completes)


def test_an_error_with_status_200_has_the_status_that_it_says() -> None:
    def error(code: object) -> bytes:
        return json.dumps({"error": {"message": "m", "code": code}}).encode()

    assert status(error(400)) == 400
    assert status(error(404), completes=False) == 404
    with pytest.raises(OverloadedError):
        status(error(429))
    with pytest.raises(EngineFailedError) as failure:
        status(error(500))
    assert (failure.value.cause, failure.value.answered) == ("status_500", True)
    with pytest.raises(EngineFailedError) as failure:
        status(error("x"))
    assert failure.value.cause == "malformed"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"data": []}', JSON),
        (b"[{}]", JSON),
        (b"[]", JSON),
        (b'{"id": "resp-1", "error": null}', JSON),
        (b'{"id": "resp-1", "error": {"code": "failed"}}', "application/json; charset=utf-8"),
        (b"\x00\x01", "application/octet-stream"),
    ],
)
def test_endpoints_of_one_engine_answer_with_json_or_bytes(content: bytes, kind: str) -> None:
    assert status(content, kind=kind, completes=False) == 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", JSON),
        (b"", "application/octet-stream"),
        (b"{}", JSON),
        (b"null", JSON),
        (b'"text"', JSON),
        (b"<html></html>", "text/html"),
        (b"<html></html>", ""),
        (b'{"error": {"message": "no"}}', JSON),
        (b'{"data": "\xff"}', JSON),
    ],
)
def test_and_with_nothing_else(content: bytes, kind: str) -> None:
    with pytest.raises(EngineFailedError):
        status(content, kind=kind, completes=False)


def test_others_have_a_turn_while_a_long_answer_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completion, "PARSED_BYTES", 1 << 10)
    turns = 0

    async def scenario() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        content = json.dumps({"choices": [{"text": "é" * (64 << 10)}]}, ensure_ascii=False)
        assert await status_of(200, JSON, content.encode(), completes=True) == 200
        with pytest.raises(EngineFailedError):
            await status_of(200, JSON, content.encode()[:-3] + b'\xc3"}]}', completes=True)
        counting.cancel()

    asyncio.run(scenario())
    assert turns > 200


@pytest.mark.parametrize("bad", NOT_ONE)
def test_events_pass_up_to_the_first_that_is_none(bad: bytes) -> None:
    before = GOOD + b": ping\n\n" + USAGE
    if b"\xff" not in bad:
        assert good_events(before + bad + GOOD, completes=True) == before
    assert good_events(bad, completes=True) == b""
    crlf = (GOOD + bad).replace(b"\n", b"\r\n")
    assert good_events(crlf, completes=True) == b""


@given(st.lists(st.sampled_from([GOOD, USAGE, DONE, b": ping\n\n", b"event: a\n" + GOOD, b'data: {"error":{"code":500}}\n\n', b'data: {"choices":[{"logprob":NaN}]}\n\n'])))  # fmt: skip
def test_good_events_all_pass(events: list[bytes]) -> None:
    whole = b"".join(events)
    assert good_events(whole, completes=True) == whole
    crlf = whole.replace(b"\n", b"\r\n")
    assert good_events(crlf, completes=True) == crlf
    assert good_events(whole, completes=False) == whole


def test_an_event_of_one_engines_endpoint_is_any_object() -> None:
    event = b'event: response.created\ndata: {"type": "response.created"}\n\n'
    assert good_events(event, completes=False) == event
    assert good_events(event + b"data: null\n\n", completes=False) == event
