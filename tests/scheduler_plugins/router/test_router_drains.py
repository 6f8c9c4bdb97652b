# SPDX-License-Identifier: Apache-2.0
"""An engine that takes no more requests is dead, or finishes those that it has: told by what still moves there.

A vLLM engine that is stopped closes its port, ends its core and leaves its open sockets silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from router_fakes import DONE, Behaviour, FakeEngine, World, answer, forever, hang, run, until
from test_router_stopped_engines import STREAM, word

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines import progress
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics

LEAST_S = 0.5
"""An answer of these engines is late after this silence: their paces are shorter."""
PATIENT_S = 1000.0
WORDS = 12


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LEAST_S", LEAST_S)


def words(
    until_silent: int = WORDS, gap_s: float = 0.01, sent: list[int] | None = None
) -> Behaviour:
    """A stream of all words, or of those after the prompt's. It falls silent for good before the word `until_silent`,
    and notes what it has sent."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begin = len(body["prompt"]) - 1 if isinstance(body["prompt"], list) else 0
        for number in range(begin, WORDS):
            if number == until_silent:
                await forever()
            await response.write(word(f"{number} ", number))
            if sent is not None:
                sent.append(number)
            await asyncio.sleep(gap_s)
        await response.write(DONE)
        return response

    return behave


def said(events: list[Any]) -> list[str]:
    return [event["choices"][0]["text"].strip() for event in events if event != "[DONE]"]


ALL = [str(number) for number in range(WORDS)]


async def is_silent(world: World, fake: FakeEngine) -> None:
    """Wait until the engine has a request and has said what it says."""
    await until(lambda: fake.running == 1, f"{fake.name} has the request")
    signs = world.known(fake).signs
    await until(lambda: signs.last_s > 0, "its first bytes have come")
    await asyncio.sleep(0.3)


async def refuses(world: World, fake: FakeEngine) -> None:
    await fake.refuse()


async def leaves(world: World, fake: FakeEngine) -> None:
    """As one that the file, the name server or Kubernetes no longer names, while it is being stopped."""
    pool = world.app[SHARED].pool
    assert isinstance(pool, EnginePool)
    pool.remove(world.known(fake))
    await fake.refuse()


Stops = Callable[[World, FakeEngine], Awaitable[None]]
STOPS = pytest.mark.parametrize("stops", [refuses, leaves])


@STOPS
def test_a_stream_of_a_dead_engine_goes_on_elsewhere_although_its_time_to_drain_is_long(
    stops: Stops,
) -> None:
    async def scenario() -> None:
        async with World(decode=2, drain_timeout_s=PATIENT_S) as world:
            world.d[0].behave, world.d[1].behave = words(6), words()
            task = asyncio.create_task(world.post("/v1/completions", STREAM))
            await is_silent(world, world.d[0])
            await stops(world, world.d[0])
            events = (await task).events
            assert (said(events), events[-1]) == (ALL, "[DONE]")
            assert await world.metric("resumed_streams_total") == 1

    run(scenario())


@STOPS
def test_a_stream_that_cannot_go_on_gets_its_error_at_once(stops: Stops) -> None:
    async def scenario() -> None:
        async with World(decode=2, drain_timeout_s=PATIENT_S) as world:
            world.d[0].behave, world.d[1].behave = words(6), words()
            task = asyncio.create_task(world.post("/v1/completions", {**STREAM, "stop": ["x"]}))
            await is_silent(world, world.d[0])
            await stops(world, world.d[0])
            events = (await task).events
            assert said(events[:-1]) == ALL[:6]
            assert events[-1]["error"]["type"] == "stream_interrupted"

    run(scenario())


@STOPS
@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["whole", "before its first byte"])
def test_an_answer_of_which_nothing_has_come_is_asked_for_elsewhere(
    stops: Stops, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with World(decode=2, drain_timeout_s=PATIENT_S) as world:
            world.d[0].behave = hang
            task = asyncio.create_task(world.complete(**body))
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            await stops(world, world.d[0])
            assert "d1" in (await task).text
            opened = await world.metric("circuit_opened_total", engine=world.d[0].url)
            assert opened == 0

    run(scenario())


@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["whole", "before its first byte"])
def test_without_another_engine_it_has_its_time_to_drain(body: dict[str, Any]) -> None:
    """It may compute a long prompt, or an answer that is not streamed."""

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def late(
            engine: FakeEngine, request: web.Request, asked: dict[str, Any]
        ) -> web.StreamResponse:
            await go_on.wait()
            return await answer(engine, request, asked)

        async with World(drain_timeout_s=PATIENT_S) as world:
            world.known(world.p[0]).draining = True
            world.d[0].behave = late
            task = asyncio.create_task(world.complete(**body))
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            await world.d[0].refuse()
            await world.down(world.d[0])
            await asyncio.sleep(4 * LEAST_S)
            assert not task.done()
            go_on.set()
            assert "d0" in (await task).text

    run(scenario())


def test_a_slow_stream_of_an_engine_that_drains_is_left_alone() -> None:
    """Its words come farther apart than silence is borne of others."""

    async def scenario() -> None:
        sent: list[int] = []
        async with World(decode=2, drain_timeout_s=LEAST_S) as world:
            world.d[0].behave = words(gap_s=1.6 * LEAST_S, sent=sent)
            task = asyncio.create_task(world.post("/v1/completions", STREAM))
            await until(lambda: len(sent) > progress.FEWEST, "it has a pace")
            await world.d[0].refuse()
            assert said((await task).events) == ALL
            assert world.d[1].bodies == []

    run(scenario())


def test_what_is_silent_waits_while_another_answer_of_the_engine_moves() -> None:
    """The engine drains: it has an answer that is not streamed, and prompts that wait."""

    async def scenario() -> None:
        moves = asyncio.Event()
        async with World(decode=2, drain_timeout_s=LEAST_S) as world:

            async def both(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                if body.get("stream"):
                    try:
                        return await words(gap_s=0.4)(engine, request, body)
                    finally:
                        moves.set()
                await moves.wait()
                return await answer(engine, request, body)

            world.d[0].behave = both
            world.known(world.d[1]).draining = True
            streams = asyncio.create_task(world.post("/v1/completions", STREAM))
            whole = asyncio.create_task(world.complete())
            await until(lambda: world.d[0].running == 2, "d0 has both")
            world.known(world.d[1]).draining = False
            await world.d[0].refuse()
            assert said((await streams).events) == ALL
            assert (await whole).json["served_by"] == "d0"

    run(scenario())


def test_an_engine_that_answers_that_it_drains_is_believed() -> None:
    """SGLang's `/health` answers 503 from SIGTERM until the last answer is whole."""

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def late(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            await go_on.wait()
            return await answer(engine, request, body)

        async with World(decode=2, drain_timeout_s=PATIENT_S) as world:
            world.d[0].behave = late
            task = asyncio.create_task(world.complete())
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            world.d[0].healthy = False
            await world.down(world.d[0])
            await asyncio.sleep(4 * LEAST_S)
            assert not task.done()
            go_on.set()
            assert (await task).json["served_by"] == "d0"

    run(scenario())


@pytest.mark.parametrize(
    ("before", "drains"), [({}, False), ({"refusing": True}, True), ({"answers": True}, True)]
)
def test_an_engine_that_refuses_in_the_end_drains_unless_it_hung(
    before: dict[str, bool], drains: bool
) -> None:
    """A Service without a ready pod refuses after the pod's own 503."""
    engine = BackendEngine("http://e:1", Role.DECODE, Metrics())
    engine.set_up()
    engine.set_down(1.0, "first", **{"refusing": False, **before})
    engine.set_down(2.0, "then", refusing=True)
    assert engine.gone is not drains
    assert engine.ended == 1


def test_an_answer_of_the_process_before_is_not_awaited_from_the_next_one() -> None:
    """A new process listens at the same address before the old one has closed its sockets."""

    async def scenario() -> None:
        async with World(decode=2, drain_timeout_s=PATIENT_S) as world:
            world.d[0].behave, world.d[1].behave = words(6), words()
            task = asyncio.create_task(world.post("/v1/completions", STREAM))
            await is_silent(world, world.d[0])
            await world.d[0].refuse()
            await world.down(world.d[0])
            after = FakeEngine("after")
            after.place = world.d[0].place
            await after.start()
            await world.up(world.d[0])
            assert said((await task).events) == ALL
            opened = await world.metric("circuit_opened_total", engine=after.url)
            assert opened == 0, "the new process has failed nothing"
            await after.die()

    run(scenario())


def test_a_prompt_at_a_prefill_engine_that_is_dead_is_computed_elsewhere() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=1, drain_timeout_s=PATIENT_S) as world:
            world.p[0].behave = hang

            async def waits(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                """KV of the first engine never comes."""
                if body["kv_transfer_params"]["remote_engine_id"] == "engine-p0":
                    await forever()
                return await answer(engine, request, body)

            world.d[0].behave = waits
            task = asyncio.create_task(world.complete())
            await until(lambda: world.p[0].running == 1, "p0 has the prompt")
            await world.p[0].refuse()
            assert (await task).json["served_by"] == "d0"
            assert await world.metric("prefill_failures_total", cause="unhealthy") == 1
            assert len(world.p[1].bodies) == 1

    run(scenario())


def test_a_stream_outlives_a_rollout_of_more_engines_than_may_fail_it() -> None:
    """Each engine is stopped after it has said something. The request is not to blame for that."""

    async def scenario() -> None:
        async with World(decode=4, drain_timeout_s=PATIENT_S, attempts=1) as world:
            for number, fake in enumerate(world.d):
                fake.behave = words(3 * number + 3)
            task = asyncio.create_task(world.post("/v1/completions", STREAM))
            for fake in world.d[:-1]:
                await is_silent(world, fake)
                await fake.refuse()
            assert said((await task).events) == ALL

    run(scenario())


def test_a_stream_comes_back_to_an_engine_that_was_restarted_since() -> None:
    async def scenario() -> None:
        async with World(prefill=0, decode=2, unnamed=True, drain_timeout_s=PATIENT_S) as world:
            first, second = world.d
            first.behave, second.behave = words(4), words(8)
            task = asyncio.create_task(world.post("/v1/completions", STREAM))
            await is_silent(world, first)
            await first.refuse()
            await until(lambda: second.running == 1, "it goes on elsewhere")
            after = FakeEngine("after")
            after.place, after.behave = first.place, words()
            await after.start()
            await world.up(first)
            await second.refuse()
            assert said((await task).events) == ALL
            await after.die()

    run(scenario())
