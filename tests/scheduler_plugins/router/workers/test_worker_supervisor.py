# SPDX-License-Identifier: Apache-2.0
"""What the keeper tells its workers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from router_fakes import FAST, FakeEngine, run, until

from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.counts import SharedCounts
from scheduler_plugins.router.recent_history import BEAT_S
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.workers import messages
from scheduler_plugins.router.workers.child import Child
from scheduler_plugins.router.workers.link import link_to_keeper, link_to_worker
from scheduler_plugins.router.workers.mirror import MirrorPool
from scheduler_plugins.router.workers.supervisor import Supervisor

DECODER = msgspec.msgpack.Decoder(messages.Engines)


class Ear(Child):
    """A worker that keeps what it is told."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.row, child.begin, child.heard, child.ended)
        self.told: list[messages.Engines] = []
        self.beats: list[messages.Beats] = []

    def send(self, message: messages.FromKeeper) -> None:
        if isinstance(message, messages.Beats):
            self.beats.append(message)

    def send_encoded(self, content: bytes) -> None:
        self.told.append(DECODER.decode(content))


@asynccontextmanager
async def kept() -> AsyncIterator[Supervisor]:
    """A keeper of two engines, which looks at them once."""
    fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
    for fake in fakes:
        await fake.start()
    settings = {**FAST, "health_interval_s": 1e6, "workers": 2}
    config = RouterConfig(prefill=(fakes[0].url,), decode=(fakes[1].url,), **settings)
    async with aiohttp.ClientSession() as session:
        keeper = Supervisor(config, Metrics())
        keeper.pool = EnginePool(config, session, Metrics(), keeper.caches, keeper.changed.set)
        await keeper.pool.start()
        yield keeper
        await keeper.pool.close()
        keeper.close()
    for fake in fakes:
        await fake.die()


async def mirror(keeper: Supervisor, link: socket.socket) -> MirrorPool:
    """The engines as the second worker knows them."""
    return MirrorPool(await link_to_keeper(link), SharedCounts(keeper._memory.map, 1), Metrics())


def first_told(keeper: Supervisor) -> messages.Engines:
    """The engines of which a worker is told when it starts."""
    child = keeper.children[0]
    (told,) = (one for one in child.begin(child) if isinstance(one, messages.Engines))
    return told


def test_a_worker_that_took_an_engine_for_down_hears_that_it_is_up_again() -> None:
    """Though all that the keeper knows of it is as before: it was down for less than the pause between two messages."""

    async def scenario() -> None:
        async with kept() as keeper:
            ear = Ear(keeper.children[0])
            keeper.children = [ear]
            telling = asyncio.create_task(keeper.tell())
            await until(lambda: bool(ear.told), "the worker is told")
            known, count = ear.told[-1].engines[1], len(ear.told)
            engine = keeper.pool.engines[1]
            assert (known.url, known.up) == (engine.url, True)
            kind = engine.kind
            ear.heard(ear, messages.Failed(known.id, "connect", "refused", True))
            engine.set_up()
            engine.kind = kind
            await until(lambda: len(ear.told) > count, "the worker is told again")
            assert all(one.up for one in ear.told[-1].engines)
            telling.cancel()

    run(scenario())


def test_a_worker_gives_up_what_it_has_at_an_engine_that_has_left() -> None:
    async def scenario() -> None:
        async with kept() as keeper:
            link, _ = socket.socketpair()
            pool = await mirror(keeper, link)
            told = first_told(keeper)
            pool.use(told)
            stays, leaves = pool.engines
            pool.use(msgspec.structs.replace(told, engines=told.engines[:1]))
            assert leaves.gone
            assert not stays.gone
            link.close()

    run(scenario())


def test_a_worker_knows_which_engines_a_request_is_for_as_the_keeper_does() -> None:
    """Without `was_vllm` its SGLang engines answered requests with fields that only vLLM knows."""

    async def scenario() -> None:
        async with kept() as keeper:
            link, _ = socket.socketpair()
            pool = await mirror(keeper, link)
            keeper.pool.engines[1].context_tokens = 4096
            pool.use(first_told(keeper))
            for theirs, ours in zip(pool.engines, keeper.pool.engines, strict=True):
                assert ours.was_vllm
                for name in ("kind", "was_vllm", "whole", "models", "context_tokens"):
                    assert getattr(theirs, name) == getattr(ours, name), name
            link.close()

    run(scenario())


def test_the_keeper_knows_what_happens_to_the_requests_of_its_workers() -> None:
    async def scenario() -> None:
        async with kept() as keeper:
            ours, theirs = socket.socketpair()
            pool = await mirror(keeper, theirs)
            pool.waiting = lambda: {"default": Front(2, 30, 0.5)}
            link = await link_to_worker(ours)
            pool.history.arrived(0.0, "default", 100, 2.0, 0.1)
            pool.history.prefilled(0.0, "default", 80, 1.5, 2.0)
            pool.history.answered(0.0, "default", 7, 0.05, 0.1)
            pool.history.refused(0.0, "default")
            pool.history.overflowed(0.0, "default")
            child = keeper.children[0]
            child.heard(child, await link.receive())
            now_s = asyncio.get_running_loop().time()
            seen = keeper.pool.history.over(now_s, 10, "default")
            assert (seen.arrivals, seen.uncached, seen.answered, seen.refusals) == (1, 80, 7, 1)
            assert seen.ttft_ratios == 0.75 * seen.ttft_promised
            (beat,) = keeper.pool.metrics.pulse.beats(now_s + BEAT_S)
            assert (beat.arrivals, beat.overflows) == (1, 1), "the page advises for all workers"
            assert keeper.waiting() == {"default": Front(2, 30, 0.5)}
            child.ended(child)
            assert keeper.waiting() == {}, "what waited in a worker that has ended is gone"
            link.close()

    run(scenario())


def test_workers_show_the_last_minutes_of_all_processes() -> None:
    async def scenario() -> None:
        async with kept() as keeper:
            ear = Ear(keeper.children[0])
            keeper.children = [ear]
            now_s = asyncio.get_running_loop().time()
            keeper.pool.history.prefilled(now_s - 20.0, "default", 80, 1.5, 2.0)
            telling = asyncio.create_task(keeper.tell())
            await until(lambda: bool(ear.beats), "the worker is told")
            (beat,) = ear.beats[-1].beats
            assert beat.ttft == (1.5, 1.5)
            new = ear.begin(ear)[-1]
            assert new == ear.beats[-1], "a restarted worker is told at once"
            telling.cancel()

    run(scenario())
