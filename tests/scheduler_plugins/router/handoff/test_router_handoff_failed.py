# SPDX-License-Identifier: Apache-2.0
"""A prefill engine has computed the prompt, and its KV did not pass: the decode engine goes on by itself, and is let. If
it cannot, a pair is asked again before the client hears of it."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from router_fakes import Behaviour, FakeEngine, World, answer, hang, run, says, status, until
from test_router_kinds import world

from pd_connector.errors import HANDOFF_FAILED, Cause
from pd_connector.sglang.recompute import REPEATABLE
from scheduler_plugins.router.engines.circuit import FAILURES
from scheduler_plugins.router.handoff import prefill


@pytest.fixture
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine is given up at once if its prefill engine has failed it."""
    monkeypatch.setattr(prefill, "REFUSAL_GRACE_S", 0.0)


def handoff_failed(cause: Cause) -> Behaviour:
    """As SGLang's prefill engine answers with our backend."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        told = f"{HANDOFF_FAILED}: {cause}: the decode engine did not take all of it"
        request_id = f"req.rid='{'f' * 32}' req.bootstrap_room={body['bootstrap_room']}"
        message = f"Prefill transfer failed for request rank=0 {request_id} with exception {told}"
        return web.json_response({"object": "error", "message": message, "code": 500}, status=500)

    return behave


def goes_on(made: World) -> Behaviour:
    """A decode engine that answers some time after its prefill engine has failed."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        known = [made.known(each) for each in made.p]
        await until(lambda: any(each.bodies for each in made.p), "the prefill engine was asked")
        await until(lambda: not any(each.copies for each in known), "it has failed")
        return await answer(engine, request, body)

    return behave


@pytest.mark.usefixtures("_no_grace")
@pytest.mark.parametrize("cause", sorted(REPEATABLE))
@pytest.mark.parametrize("streams", [False, True])
def test_the_decode_engine_has_it_computed_again_and_is_not_disturbed(
    cause: Cause, streams: bool
) -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            w.p[0].behave, w.d[0].behave = handoff_failed(cause), goes_on(w)
            assert (await w.complete(stream=streams)).status == 200
            assert len(w.d[0].bodies) == 1
            assert await w.metric("retries_total") == 0
            assert await w.metric("prefill_failures_total", cause="handoff") == 1

    run(scenario())


@pytest.mark.usefixtures("_no_grace")
@pytest.mark.parametrize("pair", [("ss", "s"), ("s", "v")], ids=["two to choose", "vLLM decodes"])
def test_whoever_decodes_and_whatever_else_could_be_asked(pair: tuple[str, str]) -> None:
    async def scenario() -> None:
        async with world(*pair) as w:
            for engine in w.p:
                engine.behave = handoff_failed(Cause.LEASE_EVICTED)
            w.d[0].behave = goes_on(w)
            for number in range(FAILURES + 1):
                assert (await w.complete()).status == 200
                assert len(w.d[0].bodies) == number + 1
            assert all(w.known(each).circuit.cause == "" for each in w.p), "it is not to blame"

    run(scenario())


async def needs_kv(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A decode engine that waits for KV, and gets it the second time."""
    behave = hang if len(engine.bodies) == 1 else answer
    return await behave(engine, request, body)


async def fails_once(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    return await (status(500) if len(engine.bodies) == 1 else answer)(engine, request, body)


async def fails_once_in_its_stream(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    error = says(b'data: {"error": {"message": "lease_evicted", "code": 500}}\n\n')
    return await (error if len(engine.bodies) == 1 else answer)(engine, request, body)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("prefill_fails", [False, True])
def test_the_only_pair_is_asked_again(streams: bool, prefill_fails: bool) -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            if prefill_fails:
                w.p[0].behave = fails_once
                w.d[0].behave = needs_kv
            else:
                w.d[0].behave = fails_once_in_its_stream if streams else fails_once
            assert (await w.complete(stream=streams)).status == 200
            assert [len(each.bodies) for each in (*w.p, *w.d)] == [2, 2]
            assert await w.metric("retries_total") == 1

    run(scenario())


def test_both_sides_may_have_failed() -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            w.p[0].behave = w.d[0].behave = fails_once
            assert (await w.complete()).status == 200

    run(scenario())


def test_the_only_pair_is_asked_twice_at_most() -> None:
    async def scenario() -> None:
        async with world("s", "s", attempts=9) as w:
            w.d[0].behave = status(500)
            assert (await w.complete()).status == 503
            assert len(w.d[0].bodies) == 2

    run(scenario())


@pytest.mark.parametrize("code", [429, 503])
def test_a_pair_that_lacks_room_is_not_asked_again(code: int) -> None:
    async def scenario() -> None:
        async with world("s", "s", attempts=9) as w:
            w.d[0].behave = status(code)
            assert (await w.complete()).status == 429
            assert len(w.d[0].bodies) == 1

    run(scenario())


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_stream_that_breaks_off_tells_nothing_of_an_engine(
    more: dict[str, Any], at_once: bool
) -> None:
    word = b'data: {"id":"a","choices":[{"index":0,"text":"word"}]}\n\n'
    message = "Decode transfer failed for decode_req.req.rid='f08f' bootstrap_room=66"
    error = b'data: {"error": {"message": "%s", "code": 500}}\n\n' % message.encode()

    async def scenario() -> None:
        async with world("s", "s") as w:
            w.d[0].behave = says(*((word + error,) if at_once else (word, error)))
            reply = await w.complete(stream=True, **more)
            assert "bootstrap_room" not in reply.text
            assert at_once or "a decode engine failed (status_500)" in reply.text

    run(scenario())
