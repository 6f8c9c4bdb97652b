# SPDX-License-Identifier: Apache-2.0
"""Whenever engines are lost, and however their bytes come and the client reads: it is sent what one engine would have said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.streams import AnswerInPieces, Client, cut, nobody

from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.request.responder import Responder
from scheduler_plugins.router.request.resume import StreamRecord

PROMPT = [901, 902]
# A token without text is a part of a character, which comes with its last part.
WORDS = ["the ", "quick ", "", "", "é ", "brown ", "fox ", "", "漢 ", "jumps "]
CONTEXT_TOKENS = len(PROMPT) + len(WORDS)


def answer_to(body: dict[str, Any], chat: bool) -> Iterator[bytes]:
    """The events of an engine, which has this model and the client's or the router's request."""
    prompt = body.get("prompt", PROMPT)
    first = len(prompt) - len(PROMPT)
    assert prompt == [*PROMPT, *range(first)]
    assert not first or WORDS[first - 1], "it begins within a character"
    most = body.get("max_tokens") or (CONTEXT_TOKENS if chat else 16)
    ids = range(first, min(first + most, len(WORDS)))
    for token in ids:
        said = {"delta": {"content": WORDS[token]}} if chat else {"text": WORDS[token]}
        choice = {"index": 0, **said, "finish_reason": "length" if token == ids[-1] else None}
        told = {"prompt_token_ids": prompt if token == first else None, "token_ids": [token]}
        event = {"id": "a", "choices": [{**choice, **told}]}
        yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    event = {"id": "a", "choices": [], "usage": usage}
    yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
    yield b"data: [DONE]\n\n"


def answer_of(data: bytes, cuts: list[int], lost_at: int | None) -> Any:
    """An engine's answer in pieces of these sizes, in turn. `lost_at`: bytes that come before it is given up, -1: all;
    None: it lives."""
    if lost_at is None:
        return AnswerInPieces(cut(data, cuts))
    return AnswerInPieces(
        cut(data[: lost_at % (len(data) + 1)], cuts), EngineFailedError("died", "x")
    )


async def served(
    body: dict[str, Any], chat: bool, cuts: list[int], client: Any, lost: list[int]
) -> None:
    """As `ClientRequest` does it: by one engine after the other, of which the last one lives."""
    record = StreamRecord(body, "/v1/chat/completions" if chat else "/v1/completions")
    record.context_tokens = CONTEXT_TOKENS
    responder = Responder(client, "r", Metrics(), 0.0, nobody)
    asked = body
    for lost_at in [*lost, None]:
        # What goes on is a completion, unless nothing was said.
        data = b"".join(answer_to(asked, chat and "messages" in asked))
        answer = answer_of(data, cuts, lost_at)
        try:
            await responder.pass_on(answer, "flow", record=record)
            return
        except EngineFailedError:
            if responder.whole:
                return
            if not client.begun:
                continue
            if (ending := record.ending()) is not None:
                client.sent += ending
                return
            rest = record.next_body()
            assert rest is not None
            record.resume()
            asked = rest
    raise AssertionError("the last engine lives")


@given(
    st.booleans(),
    st.sampled_from([None, 1, 2, 5, 9, 40]),
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.just(-1) | st.integers(0, 4000), max_size=4),
)
def test_the_client_is_sent_each_token_once(
    chat: bool, most: int | None, cuts: list[int], keeps_up: list[bool], lost: list[int]
) -> None:
    asked = {"messages": []} if chat else {"prompt": PROMPT}
    body = {**asked, "stream": True, "max_tokens": most, "stream_options": {"include_usage": True}}
    client = Client(keeps_up)
    asyncio.run(served(body, chat, cuts, client, lost))
    *events, end = client.sent.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [choice for event in told for choice in event["choices"]]
    said = [one["delta"].get("content", "") if chat else one["text"] for one in choices]
    tokens = min(most or 16, len(WORDS))
    assert "".join(said) == "".join(WORDS[:tokens])
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
    (usage,) = [event["usage"] for event in told if event.get("usage")]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), tokens)
    assert b"token_ids" not in client.sent
