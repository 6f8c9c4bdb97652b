# SPDX-License-Identifier: Apache-2.0
"""What decode steps cost is learnt from streams, as prefills are from prompts that were computed alone."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from router_fakes import DONE, FakeEngine, World, event, run, until

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.registry import PREFILL, WRAPPER
from scheduler_plugins.router.prompt.body import COMPLETIONS
from scheduler_plugins.router.request import pace as module
from scheduler_plugins.router.request.pace import FEWEST, MOST, Pace
from scheduler_plugins.router.request.resume import StreamRecord
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.sim.mock.server import MockEngine
from scheduler_plugins.sim.mock.settings import MockSettings

AT_ONCE = 12
COSTS = CostModel(a=1e-5, d0=0.012, d1=5e-4)
SLOW = CostModel(a=1e-5, d0=0.048, d1=2e-3)


@pytest.mark.parametrize("policy", [None, *PREFILL, WRAPPER])
def test_requests_at_the_same_time_are_shared_by_plain_decode_engines(policy: str | None) -> None:
    """With the default policy and with each other, by engines that tell nothing of their costs."""

    async def scenario() -> None:
        released = asyncio.Event()

        async def holds(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
            response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(event(engine.name))
            await released.wait()
            await response.write(DONE)
            return response

        async with World(prefill=3, decode=3, policy=policy or RouterConfig.policy) as world:
            for fake in world.d:
                fake.behave = holds
            asked = [
                asyncio.create_task(world.complete(prompt=f"{n} says " * 200, stream=True))
                for n in range(AT_ONCE)
            ]
            await until(lambda: sum(d.running for d in world.d) == AT_ONCE, "all decode")
            running = [fake.running for fake in world.d]
            released.set()
            await asyncio.gather(*asked)
            if policy == "random":
                assert max(running) < AT_ONCE
            else:
                assert running == [4, 4, 4]
            prefilled = [len(fake.bodies) for fake in world.p]
            assert max(prefilled) < AT_ONCE, "the other side is shared, too"

    run(scenario())


def decode_engine() -> BackendEngine:
    return BackendEngine("http://d", Role.DECODE, Metrics(), kind=Kind.VLLM)


class Lessons:
    """Keeps what was learnt, and has a clock that is turned by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.learnt = list[tuple[StepLoad, float]]()
        monkeypatch.setattr(module, "monotonic", lambda: self.now_s)

    def __call__(self, engine: BackendEngine, load: StepLoad, duration_s: float) -> None:
        self.learnt.append((load, duration_s))


def token_events(count: int) -> bytes:
    choice = {"index": 0, "text": "a", "token_ids": [7] * count}
    return (
        f"data: {json.dumps({'id': 'c', 'choices': [choice]}, separators=(',', ':'))}\n\n".encode()
    )


@pytest.mark.parametrize("per_event", [1, 3])
def test_a_lesson_is_the_time_of_a_token_and_the_load_of_that_time(
    monkeypatch: pytest.MonkeyPatch, per_event: int
) -> None:
    """Engines send several tokens together when they are busy; ids tell how many."""
    lessons, engine = Lessons(monkeypatch), decode_engine()
    record = StreamRecord({"stream": True, "prompt": "p", "max_tokens": 500}, COMPLETIONS)
    watched = Pace(engine, record, lessons)
    engine.load.decode_sent("own", 100, 500)
    for n in range(MOST + 1):
        watched.note(record.feed(token_events(per_event)))
        lessons.now_s += 0.02 * per_event
        if n == MOST // per_event // 2:
            engine.load.decode_sent("other", 300, 500)
    ((load, step_s),) = lessons.learnt
    assert step_s == pytest.approx(0.02)
    assert watched.tokens == per_event * (MOST + 1), "those of the answer, not its events"
    assert load == StepLoad(0, 0, 2, 250), "the mean of both ends"


def test_what_says_nothing_of_the_engine_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = Lessons(monkeypatch)

    def watch(events: int, engine: BackendEngine, *, slow_client: bool = False) -> None:
        watched = Pace(engine, None, lessons)
        for _ in range(events):
            watched.note(b'data: {"choices":[]}\n\n')
            lessons.now_s += 0.01
        if slow_client:
            watched.give_up()
        watched.end()
        watched.end()

    watch(FEWEST, decode_engine())  # with the first token that is one step too few
    watch(FEWEST + 5, decode_engine(), slow_client=True)
    told = decode_engine()
    told.costs_reported = True
    watch(FEWEST + 5, told)
    assert not lessons.learnt
    watch(FEWEST + 5, decode_engine())
    assert len(lessons.learnt) == 1, "once"


@pytest.mark.quiet
def test_an_engine_that_decodes_slowly_is_found_out_and_gets_less() -> None:
    """Three plain engines behind the default router, one four times as slow."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:

            async def start(costs: CostModel) -> MockEngine:
                mock = MockEngine(MockSettings(costs=costs))
                await mock.start()
                stack.push_async_callback(mock.close)
                return mock

            p, *d = [await start(one) for one in (COSTS, COSTS, COSTS, SLOW)]
            urls = [f"http://127.0.0.1:{one.port}" for one in (p, *d)]
            config = RouterConfig(prefill=(urls[0],), decode=tuple(urls[1:]), port=0)
            router = await stack.enter_async_context(RouterServer(config))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            known = {one.url: one for one in router.app[SHARED].pool.engines}
            engines = [known[url] for url in urls[1:]]
            in_flight = Counter[str]()
            most, then = 600, 50

            async def client() -> None:
                nonlocal most, then
                while most > 0 and then > 0:
                    most -= 1
                    then -= enough()
                    body = {"model": "mock", "prompt": f"{most} " * 30, "max_tokens": FEWEST + 2}
                    url = f"http://127.0.0.1:{router.port}/v1/completions"
                    async with session.post(url, json={**body, "stream": True}) as answer:
                        await answer.read()
                    if enough():
                        in_flight.update({one.url: one.batch for one in engines})

            def enough() -> bool:
                return all(one.costs.knows_decode for one in engines)

            assert not enough()
            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
            assert enough(), [one.costs for one in engines]
            steps_s = [one.costs.decode_step_s(4, 200) for one in engines]
            assert steps_s[2] > 2 * max(steps_s[:2]), steps_s
            shares = [in_flight[one.url] / in_flight.total() for one in engines]
            assert 0 < shares[2] < 0.8 * min(shares[:2]), shares

    run(scenario())
