# SPDX-License-Identifier: Apache-2.0
"""A stream that the client has whole: whatever its engine does then, nothing follows the end mark."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from router_fakes import DONE, World, run, says

from scheduler_plugins.router.client.downstream import Downstream
from scheduler_plugins.router.engines.exchange import Exchange
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.request.responder import EngineStream

BODY = {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 1}
WORD = (
    b'data: {"id":"a","choices":[{"index":0,"text":"word","finish_reason":"length",'
    b'"prompt_token_ids":[9],"token_ids":[1]}]}\n\n'
)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("pieces", [(WORD + DONE,), (WORD, DONE)])
def test_an_engine_that_is_given_up_after_its_end_mark_has_answered(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], pieces: tuple[bytes, ...]
) -> None:
    """Its answer has no end. A stream that could go on elsewhere got a second end mark, any other one an error behind the first."""
    to_its_end, ending = EngineStream.read_to_its_end, asyncio.Event()

    async def dead_by_then(stream: EngineStream) -> None:
        ending.set()
        await to_its_end(stream)

    def found_dead(self: Exchange, now: float) -> EngineFailedError | None:
        return EngineFailedError("unhealthy", "x") if ending.is_set() else None

    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = says(*pieces, then="hang")
            monkeypatch.setattr(EngineStream, "read_to_its_end", dead_by_then)
            monkeypatch.setattr(Exchange, "silence", found_dead)
            reply = await world.post("/v1/completions", {**BODY, **more})
            assert [event == "[DONE]" for event in reply.events] == [False, True]
            assert not world.d[1].bodies
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())


def test_an_engine_is_not_given_up_while_the_client_takes_its_whole_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be found dead just when its last byte has come."""
    finish, finishing = Downstream.finish, asyncio.Event()

    async def slowly(self: Downstream) -> web.StreamResponse:
        finishing.set()
        await asyncio.sleep(0.3)
        return await finish(self)

    def found_dead(self: Exchange, now: float) -> EngineFailedError | None:
        return EngineFailedError("unhealthy", "x") if finishing.is_set() else None

    async def scenario() -> None:
        async with World(decode=2) as world:
            monkeypatch.setattr(Downstream, "finish", slowly)
            monkeypatch.setattr(Exchange, "silence", found_dead)
            reply = await world.complete()
            assert reply.json["served_by"] == "d0"
            assert not world.d[1].bodies
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
def test_an_engine_that_is_given_up_just_with_its_end_mark_has_answered(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    async def pass_to(self: Exchange, take: Callable[[bytes], bool]) -> bool:
        while take(await self.read()):
            pass
        raise EngineFailedError("unhealthy", "x")

    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = says(WORD, WORD, DONE)
            monkeypatch.setattr(Exchange, "pass_to", pass_to)
            reply = await world.post("/v1/completions", {**BODY, "max_tokens": 2, **more})
            assert [event == "[DONE]" for event in reply.events] == [False, False, True]
            assert not world.d[1].bodies
            assert await world.metric("requests_total", outcome="ok") == 1

    run(scenario())
