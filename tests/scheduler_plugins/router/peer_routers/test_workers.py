# SPDX-License-Identifier: Apache-2.0
"""Workers of one router are equal: what one is told, all know, and what all can see is counted once."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router_fakes import FAST, FakeEngine, engine_of, engines, pool_of, run, until
from support.free_ports import free_ports

from scheduler_plugins.router.endpoints.app_keys import METRICS
from scheduler_plugins.router.engines import slow_probes
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.observed import SharedHistory
from scheduler_plugins.router.engines.pool import LEAVE_LOOK_S
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers import load_exchange
from scheduler_plugins.router.peer_routers.counts import new_table
from scheduler_plugins.router.peer_routers.load_exchange import ALONE_S, InFlight, PeerRouters
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig


@pytest.fixture(autouse=True)
def slow_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a living worker can be silent for longer than a second."""
    monkeypatch.setattr(load_exchange, "FORGOTTEN_S", 10.0)


def config_of(fakes: Sequence[FakeEngine], **more: Any) -> RouterConfig:
    sides = {"prefill": (fakes[0].url,), "decode": tuple(fake.url for fake in fakes[1:])}
    return RouterConfig(**sides, **FAST, **more)


def worker(
    config: RouterConfig, folder: Path, number: int, table: mmap.mmap, router_id: str = "r"
) -> RouterServer:
    return RouterServer(config, place=WorkerPlace(router_id, folder, number, 2, table))


@asynccontextmanager
async def two(
    config: RouterConfig, folder: Path, table: mmap.mmap | None = None
) -> AsyncIterator[tuple[RouterServer, RouterServer]]:
    table = table or new_table(2)
    servers = worker(config, folder, 0, table), worker(config, folder, 1, table)
    await asyncio.gather(*(one.__aenter__() for one in servers))
    try:
        yield servers
    finally:
        for one in servers:
            await one.close()


def test_an_engine_that_an_operator_adds_or_removes_or_drains_at_one_worker_changes_at_both(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with engines(4) as fakes, two(config_of(fakes[:3]), tmp_path) as (one, other):
            own = pool_of(one)
            own.edit(replace(own.config, decode=(*own.config.decode, fakes[3].url)))
            urls = {engine.url for engine in own.engines}
            assert fakes[3].url in urls
            await until(
                lambda: {engine.url for engine in pool_of(other).engines} == urls, "it joins"
            )
            pool_of(other).drain(engine_of(other, fakes[3]), True)
            await until(lambda: engine_of(one, fakes[3]).draining, "it drains")
            pool_of(one).drain(engine_of(one, fakes[3]), False)
            await until(lambda: not engine_of(other, fakes[3]).draining, "it serves again")
            left = replace(own.config, decode=(fakes[1].url, fakes[3].url))
            pool_of(other).edit(left)
            await until(lambda: fakes[2].url not in {e.url for e in own.engines}, "it leaves")

    run(scenario())


@pytest.mark.parametrize("at", [0, 1])
def test_a_role_that_the_settings_give_is_counted_once(at: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as both:
            await until(lambda: sum(one.app[METRICS].first_worker for one in both) == 1, "one does")
            pool, seen = pool_of(both[at]), engine_of(both[1 - at], fakes[2])
            urls = [fake.url for fake in fakes]
            moved = replace(pool.config, prefill=(urls[0], urls[2]), decode=(urls[1],))
            pool.edit(moved)
            await until(lambda: seen.role is Role.PREFILL, "both know")
            await until(lambda: pool_of(both[1 - at]).listed == pool.listed, "the list as well")
            counts = [
                one.app[METRICS].role_moves.labels("decode", "prefill", "settings") for one in both
            ]
            assert sum(one.collect()[0].samples[0].value for one in counts) == 1

    run(scenario())


def test_the_worker_that_started_first_leads_and_goes_on_when_others_start_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        names = list[str]()
        async with engines() as fakes:
            for number in (0, 1, 0, 1):
                async with worker(config_of(fakes), tmp_path, number, new_table(2)) as one:
                    names.append(pool_of(one).name)
        assert names == sorted(names)

    run(scenario())


def test_a_drained_engine_that_is_removed_and_added_again_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as (one, other):
            own, before = pool_of(one), pool_of(one).config
            own.drain(engine_of(one, fakes[2]), True)
            await until(lambda: engine_of(other, fakes[2]).draining, "it drains")
            own.edit(replace(before, decode=(fakes[1].url,)))
            await until(lambda: len(pool_of(other).engines) == 2, "it leaves")
            own.edit(replace(own.config, decode=before.decode))
            await until(lambda: len(pool_of(other).engines) == 3, "it comes back")
            assert not engine_of(one, fakes[2]).draining
            assert not engine_of(other, fakes[2]).draining

    run(scenario())


def test_an_engine_stays_on_the_list_while_any_worker_has_requests_open_to_it(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as (one, other):
            leaving = engine_of(other, fakes[2])
            leaving.load.opened(1)
            pool_of(one).edit(replace(pool_of(one).config, decode=(fakes[1].url,)))
            await until(lambda: pool_of(other).leaves(leaving), "it is to leave")
            await asyncio.sleep(4 * LEAVE_LOOK_S)
            assert engine_of(one, fakes[2]).draining
            leaving.load.opened(-1)
            for pool in (pool_of(one), pool_of(other)):
                await until(lambda pool=pool: len(pool.engines) == 2, "it has left")

    run(scenario())


def test_a_worker_that_starts_again_serves_with_the_list_that_the_others_have(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as (one, other):
            pool_of(one).drain(engine_of(one, fakes[1]), True)
            pool_of(one).set_role(engine_of(one, fakes[2]), Role.BOTH, pinned=True)
            await until(lambda: engine_of(other, fakes[1]).draining, "all know")
            await other.close()
            async with worker(config_of(fakes), tmp_path, 1, new_table(2)) as again:
                assert engine_of(again, fakes[1]).draining, "before its first request"
                assert engine_of(again, fakes[2]).role is Role.BOTH

    run(scenario())


def test_the_list_of_another_router_does_not_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engines() as fakes:
            config = config_of(fakes)
            async with (
                worker(config, tmp_path, 0, new_table(2), "here") as one,
                worker(config, tmp_path, 1, new_table(2), "elsewhere") as other,
            ):
                pool_of(one).drain(engine_of(one, fakes[1]), True)
                pool_of(one).set_role(engine_of(one, fakes[2]), Role.BOTH, pinned=True)
                seen = engine_of(other, fakes[2])
                await until(lambda: seen.role is Role.BOTH, "its roles count")
                assert not engine_of(other, fakes[1]).draining
                assert not pool_of(other).listed.number

    run(scenario())


def test_a_prompt_that_one_worker_has_sent_is_expected_to_be_cached_by_both(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as (one, other):
            prompt = PromptKeys([bytes([n] * 16) for n in range(1, 6)])

            def cached(at: RouterServer) -> int:
                found = pool_of(at).prefixes.match(prompt, [engine_of(at, fakes[0])], 16, 0.0)
                return found[0]

            assert cached(one) == cached(other) == 0
            pool_of(one).prefilled(engine_of(one, fakes[0]), prompt)
            assert cached(one) > 0
            await until(lambda: cached(other) == cached(one), "the other worker knows")

    run(scenario())


def test_one_worker_counts_what_engines_report(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as both:
            metrics = [one.app[METRICS] for one in both]
            await until(
                lambda: [one.first_worker for one in metrics].count(True) == 1, "one counts"
            )
            first = next(one for one in both if one.app[METRICS].first_worker)
            assert pool_of(first).leads
            (second,) = [one for one in both if one is not first]
            assert not pool_of(second).leads
            decided = Decision(1.0, "e", "prefill", "decode", "because", "done")
            pool_of(first).decisions.append(decided)
            await until(lambda: list(pool_of(second).decisions) == [decided], "its page shows it")
            await first.close()
            load_exchange.FORGOTTEN_S = 0.2  # the fixture sets it back
            await until(lambda: second.app[METRICS].first_worker, "another one goes on")

    run(scenario())


def test_what_engines_have_done_before_a_worker_starts_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_probes, "METRICS_LOOK_S", 0.01)
    outcome = 'pd_connector:handoffs_total{cause="handed_over",engine="0",model_name="m"} %d.0'

    def counted(one: RouterServer) -> float:
        labelled = one.app[METRICS].handoffs.labels("handed_over", "")
        return float(labelled.collect()[0].samples[0].value)

    async def scenario() -> None:
        async with engines(2) as fakes:
            fakes[1].metrics = outcome % 1000
            async with two(config_of(fakes), tmp_path) as both:
                known = [engine_of(one, fakes[1]) for one in both]
                await until(
                    lambda: [one.app[METRICS].first_worker for one in both].count(True) == 1,
                    "one counts",
                )
                fakes[1].metrics = outcome % 1003
                await until(
                    lambda: all(e.handoffs.get("handed_over") == 1003 for e in known), "all look"
                )
                assert sum(map(counted, both)) == 3
                for one in both:
                    beats = one.app[METRICS].pulse.beats(time.monotonic() + 60.0)
                    outcomes = sum(beat.outcomes.get("handed_over", 0) for beat in beats)
                    assert outcomes == 3, "the page shows the last minutes"

    run(scenario())


def test_a_router_hears_all_workers_of_another_and_counts_one_router(tmp_path: Path) -> None:
    async def scenario() -> None:
        a, b = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        async with engines() as fakes:
            several = config_of(fakes, exchange=a, fellows=(b,))
            alone = RouterServer(config_of(fakes, exchange=b, fellows=(a,)))
            async with two(several, tmp_path) as (first, second), alone:
                for n, one in enumerate((first, second, alone)):
                    engine_of(one, fakes[1]).load.decode_sent(f"r{n}", 10**n, 5)
                for one in (first, second, alone):
                    seen = engine_of(one, fakes[1])
                    await until(lambda seen=seen: seen.context == 111, "each sees all")
                heard = [one.app[METRICS].fellows for one in (first, second, alone)]
                await until(
                    lambda: [one.collect()[0].samples[0].value for one in heard] == [1, 1, 1],
                    "one other router",
                )
                leads = [pool_of(one).leads for one in (first, second, alone)]
                await until(
                    lambda: [pool_of(one).leads for one in (first, second, alone)].count(True) == 1,
                    f"one of all leads: {leads}",
                )

    run(scenario())


class NoEngines:
    """A pool without engines."""

    def __init__(self) -> None:
        self.engines: list[BackendEngine] = []
        self.name, self.leads, self.history = "m", True, SharedHistory()
        self.unsent_prompts = None


def alone(tmp_path: Path) -> PeerRouters:
    waits = {"default": Front(1, 10, 2.0)}
    place = WorkerPlace("r", tmp_path, 0, 2, new_table(2))
    pool: Any = NoEngines()
    return PeerRouters(pool, Metrics(), place=place, waiting=lambda: waits)


def test_what_waits_at_all_workers_is_one_queue(tmp_path: Path) -> None:
    one = alone(tmp_path)
    told = InFlight("a", 1, {}, router_id="r", front={"default": Front(2, 5, 7.0)})
    assert one.heard(msgspec.msgpack.encode(told), 0.0)
    assert one.waiting() == {"default": Front(3, 15, 7.0)}


def test_a_worker_that_hears_no_other_acts_alone_after_a_while_but_leaves_roles_as_they_are(
    tmp_path: Path,
) -> None:
    one = alone(tmp_path)
    one.show(0.0)
    assert not one._metrics.first_worker
    one.show(ALONE_S + 0.1)
    assert one._metrics.first_worker
    assert not one._pool.leads


def test_another_router_cannot_speak_as_a_worker_of_this_one(tmp_path: Path) -> None:
    one = alone(tmp_path)
    told = InFlight("a", 1, {}, router_id="r", front={"default": Front(2, 5, 7.0)})
    assert not one.heard(msgspec.msgpack.encode(told), 0.0, outside=True)
    assert not one._workers()
    assert one.heard(msgspec.msgpack.encode(told), 0.0), "a worker can"
    elsewhere = InFlight("b", 1, {}, router_id="other")
    assert one.heard(msgspec.msgpack.encode(elsewhere), 0.0, outside=True)


def test_the_exchange_goes_on_after_an_error_that_nobody_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {"heard": 0, "saying": 0}

    def failing_once(name: str) -> None:
        plain = getattr(PeerRouters, name)

        def call(self: PeerRouters, *given: Any, **more: Any) -> Any:
            failures[name] += 1
            if failures[name] == 1:
                raise KeyError("what nobody thought of")
            return plain(self, *given, **more)

        monkeypatch.setattr(PeerRouters, name, call)

    async def scenario() -> None:
        async with engines() as fakes, two(config_of(fakes), tmp_path) as (one, other):
            for name in failures:
                failing_once(name)
            await until(lambda: all(failures.values()), "each failed once")
            pool_of(one).drain(engine_of(one, fakes[1]), True)
            await until(lambda: engine_of(other, fakes[1]).draining, "messages pass as before")
            pool_of(other).drain(engine_of(other, fakes[1]), False)
            await until(lambda: not engine_of(one, fakes[1]).draining, "both ways")

    run(scenario())
    assert caplog.text.count("what nobody thought of") >= 2
