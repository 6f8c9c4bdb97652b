# SPDX-License-Identifier: Apache-2.0
"""An engine that answers 429 or 503 has no room: another one of its role is asked, then the client told."""

import asyncio
from email.utils import format_datetime

import pytest
from router_fakes import Behaviour, World, hang, run, slow, status, waits_for_kv

from scheduler_plugins.router.client.answers import LONGEST_RETRY_S, retry_after_s
from scheduler_plugins.router.handoff import prefill


@pytest.mark.parametrize("code", [429, 503])
def test_a_refused_prefill_goes_to_the_next_prefill_engine_at_once(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(prefill, "REFUSAL_GRACE_S", 60)

    async def scenario() -> None:
        async with World(prefill=3, health_interval_s=30) as world:
            for engine in world.p[:2]:
                engine.behave = status(code)

            async def needs_p2(engine, request, body):  # type: ignore[no-untyped-def]
                source = body["kv_transfer_params"]["remote_engine_id"]
                return await (slow(0) if source == "engine-p2" else hang)(engine, request, body)

            world.d[0].behave = needs_p2
            assert (await world.complete()).json["served_by"] == "d0"
            # Overload of the prefill side did not move to the decode side.
            assert all(params is not None for params in world.d[0].params)
            assert [len(engine.bodies) for engine in world.p] == [1, 1, 1]
            assert await world.metric("retries_total", cause="prefill_refused") == 2
            assert await world.metric("prefill_failures_total", cause=f"status_{code}") == 2

    run(scenario())


def test_when_all_prefill_engines_are_overloaded_the_client_is_told_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "REFUSAL_GRACE_S", 60)

    async def scenario() -> None:
        async with World(prefill=2, health_interval_s=30) as world:
            world.p[0].behave = status(429, Retry_After="7")
            world.p[1].behave = status(503, Retry_After="4")
            world.d[0].behave = waits_for_kv
            reply = await world.complete()
            assert (reply.status, reply.headers["Retry-After"]) == (429, "4")
            assert reply.json["error"]["type"] == "rate_limit_exceeded"
            assert all(params is not None for params in world.d[0].params)
            assert await world.metric("requests_total", outcome="overloaded") == 1

    run(scenario())


def test_a_prefill_engine_that_only_fails_does_not_turn_the_client_away() -> None:
    """The other side of the rule above: without an overload, decode computes the prompt."""

    async def scenario() -> None:
        async with World(prefill=2) as world:
            for engine in world.p:
                engine.behave = status(500)
            world.d[0].behave = waits_for_kv
            assert (await world.complete()).status == 200
            assert world.d[0].params[-1] is None

    run(scenario())


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("code", [429, 503])
def test_an_overloaded_decode_engine_is_passed_by(code: int, streams: bool) -> None:
    async def scenario() -> None:
        async with World(decode=3, attempts=1) as world:
            world.d[0].behave = world.d[1].behave = status(code)
            reply = await world.complete(stream=streams)
            # Engines that turn a request away have not accepted it: attempts=1 still reaches d2.
            assert reply.status == 200
            assert "d2" in reply.text

    run(scenario())


@pytest.mark.parametrize("behave", [status(429, Retry_After="9"), status(503, Retry_After="9")])
def test_when_all_decode_engines_are_overloaded_no_prefill_engine_decodes(
    behave: Behaviour,
) -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = behave
            world.d[1].behave = status(429, Retry_After="3")
            world.p[0].behave = slow(0.02)
            reply = await world.complete()
            assert (reply.status, reply.headers["Retry-After"]) == (429, "3")
            assert all(params is not None for params in world.p[0].params), "p0 served alone"
            assert world.d[0].url not in reply.text

    run(scenario())


def test_requests_for_one_engine_are_passed_on_as_well() -> None:
    async def scenario() -> None:
        async with World(decode=2) as world:
            world.d[0].behave = status(429, Retry_After="5")
            assert (await world.complete(n=2)).json["served_by"] == "d1"
            world.d[1].behave = status(429, Retry_After="2")
            reply = await world.complete(n=2)
            assert (reply.status, reply.headers["Retry-After"]) == (429, "2")
            assert world.p[0].bodies == []

    run(scenario())


def test_an_overload_takes_no_engine_out_of_service() -> None:
    async def scenario() -> None:
        async with World(decode=1, health_interval_s=30) as world:
            before = world.d[0].health_checks
            world.d[0].behave = status(503)
            replies = await asyncio.gather(*(world.complete() for _ in range(20)))
            assert {reply.status for reply in replies} == {429}
            assert world.known(world.d[0]).up
            assert world.d[0].health_checks == before

    run(scenario())


def test_retry_after_is_read_in_both_forms() -> None:
    import datetime

    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
    assert 88 <= retry_after_s({"Retry-After": format_datetime(later, usegmt=True)}) <= 91
    assert retry_after_s({"Retry-After": "12"}) == 12
    assert retry_after_s({"Retry-After": "0"}) == 1
    assert retry_after_s({}) == retry_after_s({"Retry-After": "soon"}) == 1
    assert retry_after_s({"Retry-After": "9" * 30}) == LONGEST_RETRY_S
