# SPDX-License-Identifier: Apache-2.0
"""Far stores, as the router follows them: one index, however many carriers tell of it, and any engine that reaches it may load."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, run, until
from stored_prompts import prompt, sent, stored, stored_known

from pd_connector.pool.keys import chain
from scheduler_plugins.admission.pool_report import PoolEvent, PoolReport
from scheduler_plugins.router.engines import slow_probes
from scheduler_plugins.router.index.stored import far_store

MODEL = b"m" * 32
PROMPTS = 16
A, B = "a" * 32, "b" * 32
FAR, NEW = "f" * 32, "e" * 32
LEAST_DELAY = {"policy": "least_delay"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_probes, "STORE_LOOK_S", 0.05)
    monkeypatch.setattr("scheduler_plugins.router.tokens.prompt_tokens.RETRY_S", 0.1)


def keys(seed: int) -> list[bytes]:
    return chain(MODEL, prompt(seed))


class Host:
    """A host's pool, which is empty, and its carrier's journal."""

    def __init__(self, store: str, *engines: FakeEngine, far: str = FAR) -> None:
        self.store, self.far = store, far
        self.speeds: dict[str, float] = {}
        self.events: list[tuple[bytes, bool]] = []
        self.first = 1000
        for engine in engines:
            engine.pool, engine.far_pool = self.own_page, self.far_page

    def has(self, found: list[bytes], there: bool = True) -> None:
        self.events += [(key, there) for key in found]

    def restart(self) -> None:
        """The carrier dies, and another one begins."""
        self.events, self.first = [], self.first + 10_000

    def report(self, **page: Any) -> web.Response:
        report = PoolReport(
            store=self.store,
            model=MODEL.hex(),
            chunk_tokens=128,
            chunk_bytes=1 << 20,
            bytes_per_s=self.speeds,
            far=self.far,
            **page,
        )
        return web.Response(body=report.encode())

    def own_page(self, after: str | None) -> web.Response:
        return self.report() if after is None else self.report(next=1, whole=after == "0")

    def far_page(self, after: str) -> web.Response:
        if not self.far:
            return self.report()
        known = int(after) - self.first
        whole = not 0 <= known <= len(self.events)
        rest = self.events[0 if whole else known :]
        events = tuple(PoolEvent(1, key.hex(), "far" if there else "") for key, there in rest)
        return self.report(events=events, next=self.first + len(self.events), whole=whole)


def in_far(world: World, far: str = FAR) -> int:
    return stored(world, far_store(far))


async def known(world: World, chunks: int, far: str = FAR) -> None:
    await stored_known(world, chunks, far_store(far))


async def reached(world: World, *engines: FakeEngine) -> None:
    await until(
        lambda: all((at := world.known(one).store) and at.far for one in engines),
        "engines have told their far store",
    )


def test_what_one_host_has_put_any_engine_that_reaches_the_far_store_may_load() -> None:
    async def scenario() -> None:
        world = World(prefill=3, **LEAST_DELAY)
        a, b = Host(A, world.p[0]), Host(B, world.p[1])
        async with world:
            for seed in range(PROMPTS):
                (a if seed % 2 else b).has(keys(seed))
            await known(world, 7 * PROMPTS)
            await reached(world, world.p[0], world.p[1])
            names = {await sent(world, seed) for seed in range(PROMPTS)}
            assert names == {"p0", "p1"}, "not p2, which reaches none"
            metric = await world.metric("pool_requests_total", pool=f"far {FAR[:12]}")
            assert metric == PROMPTS, "each decision says so"
            health = (await world.get("/health")).json["engines"]
            caches = {one["url"]: one["cache"] for one in health}
            cache = caches[world.p[1].url]
            assert (cache["far"], cache["far_chunks"]) == (f"far {FAR[:12]}", 7 * PROMPTS)
            assert "far" not in caches[world.p[2].url]

    run(scenario())


def test_an_engine_whose_loads_from_far_are_slow_is_not_chosen_for_them() -> None:
    async def scenario() -> None:
        world = World(prefill=3, **LEAST_DELAY)
        slow, quick = Host(A, world.p[0]), Host(B, world.p[1])
        slow.speeds, quick.speeds = {"far": 1e3}, {"far": 1e12}
        async with world:
            for seed in range(PROMPTS):
                slow.has(keys(seed))
            await known(world, 7 * PROMPTS)
            await reached(world, world.p[0], world.p[1])
            assert {await sent(world, seed) for seed in range(PROMPTS)} == {"p1"}

    run(scenario())


def test_a_carrier_that_dies_empties_the_index_and_one_that_returns_fills_it() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        host = Host(A, world.p[0])
        async with world:
            host.has(keys(0))
            await known(world, 7)
            host.far = ""
            await known(world, 0)
            await sent(world, 0)
            assert await world.metric("pool_requests_total") == 0
            host.restart()
            host.has(keys(0)[:3])
            host.far = FAR
            await known(world, 3)

    run(scenario())


def test_a_far_store_that_restarts_empties_the_index() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        hosts = [Host(A, world.p[0]), Host(B, world.p[1])]
        async with world:
            hosts[0].has(keys(0))
            hosts[1].has(keys(1))
            await known(world, 14)
            for host in hosts:
                host.restart()
                host.far = NEW
            hosts[1].has(keys(1)[:2])
            await known(world, 0)
            await known(world, 2, NEW)

    run(scenario())


def test_what_other_hosts_told_stays_when_one_carrier_begins_anew_or_ends() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        a, b = Host(A, world.p[0]), Host(B, world.p[1])
        async with world:
            a.has(keys(0))
            b.has(keys(1))
            await known(world, 14)
            a.restart()
            a.has(keys(2))
            await known(world, 21)
            b.has(keys(0), there=False)
            await known(world, 14)
            a.far = ""
            await until(lambda: not _far_of(world, world.p[0]), "a reaches none")
            assert in_far(world) == 14
            assert await sent(world, 1) == "p1"

    run(scenario())


def _far_of(world: World, engine: FakeEngine) -> str:
    place = world.known(engine).store
    return place.far if place else ""
