# SPDX-License-Identifier: Apache-2.0
"""What a client was sent and what is noted of it are the same, whenever its engine is given up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_fakes import run
from support.streams import AnswerInPieces, Client, nobody

from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.request.responder import Responder
from scheduler_plugins.router.request.resume import StreamRecord

BODY = {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 20}


def event(token: int) -> bytes:
    choice = {"index": 0, "text": f"word{token} ", "token_ids": [token], "prompt_token_ids": [9]}
    content = {"id": "a", "choices": [{**choice, "finish_reason": None}]}
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def given_up(error: BaseException, last: bytes = b"") -> Any:
    """An engine's answer of one event, and of `last`. The engine is given up just when that was taken."""
    return AnswerInPieces([event(1), last or event(2) + event(3)], error)


def slow() -> Any:
    """A client that reads so slowly that a write has to wait."""
    return Client(keeps_up=[False])


@pytest.mark.parametrize("error", [asyncio.CancelledError(), EngineFailedError("died", "x")])
def test_events_that_are_noted_are_sent_though_the_engine_is_given_up_then(
    error: BaseException,
) -> None:
    """The next engine goes on after the last one that is noted."""

    async def scenario() -> None:
        client = slow()
        answer = given_up(error)
        record = StreamRecord(BODY, "/v1/completions")
        responder = Responder(client, "r", Metrics(), 0.0, nobody)
        with pytest.raises(type(error)):
            await responder.pass_on(answer, "flow", record=record)
        body = record.next_body()
        assert body is not None
        assert body["prompt"] == [9, 1, 2, 3]
        assert [client.sent.count(f"word{token} ".encode()) for token in (1, 2, 3)] == [1, 1, 1]

    run(scenario())


def test_a_stream_that_is_given_up_with_its_end_mark_is_whole() -> None:
    async def scenario() -> None:
        client = slow()
        answer = given_up(EngineFailedError("died", "x"), event(2) + b"data: [DONE]\n\n")
        responder = Responder(client, "r", Metrics(), 0.0, nobody)
        record = StreamRecord(BODY, "/v1/completions")
        with pytest.raises(EngineFailedError):
            await responder.pass_on(answer, "flow", record=record)
        assert responder.whole
        assert client.sent.endswith(b"data: [DONE]\n\n")

    run(scenario())


def test_events_that_cannot_be_noted_are_not_sent() -> None:
    """They would tell the second engine's name and the ids that nobody asked for."""

    async def scenario() -> None:
        client = slow()
        wrong = b'data: {"choices":[{"text":"wrong","token_ids":[2]\n\n'
        answer = given_up(EngineFailedError("died", "x"), wrong)
        record = StreamRecord(BODY, "/v1/completions")
        record.feed(event(0))
        record.resume()
        responder = Responder(client, "r", Metrics(), 0.0, nobody)
        with pytest.raises(EngineFailedError, match="x"):
            await responder.pass_on(answer, "flow", record=record)
        assert b"word1 " in client.sent
        assert b"wrong" not in client.sent

    run(scenario())
