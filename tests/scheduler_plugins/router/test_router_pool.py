# SPDX-License-Identifier: Apache-2.0
"""KV pools of hosts, as the router follows them: a prompt goes where it can be loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, run, until
from stored_prompts import prompt, sent, stored, stored_known

from pd_connector.pool.keys import chain
from scheduler_plugins.admission.pool_report import PoolEvent, PoolReport
from scheduler_plugins.router.engines import slow_probes as looks

MODEL = b"m" * 32
PROMPTS = 8
A, B = "a" * 32, "b" * 32
LEAST_DELAY = {"policy": "least_delay"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "STORE_LOOK_S", 0.05)
    monkeypatch.setattr("scheduler_plugins.router.tokens.prompt_tokens.RETRY_S", 0.1)


def keys(seed: int, salt: str = "", model: bytes = MODEL) -> list[bytes]:
    return chain(model, prompt(seed), salt=salt)


class Store:
    """The journal of a host's store, told by its engines."""

    def __init__(self, store: str, *engines: FakeEngine, model: bytes = MODEL) -> None:
        self.store, self.model = store, model
        self.events: list[PoolEvent] = []
        self.first = 1
        self.page_events = 3
        self.speeds: dict[str, float] = {}
        for engine in engines:
            engine.pool = self.answer

    def has(self, found: list[bytes], tier: str = "memory") -> None:
        self.events += [
            PoolEvent(self.first + len(self.events) + n, key.hex(), tier)
            for n, key in enumerate(found)
        ]

    def begin_anew(self, found: list[bytes]) -> None:
        self.first, self.events = self.first + 10_000, []
        self.has(found)

    def report(self, after: str | None) -> PoolReport:
        facts: dict[str, Any] = {
            "store": self.store,
            "model": self.model.hex(),
            "chunk_tokens": 128,
            "chunk_bytes": 1 << 20,
            "bytes_per_s": self.speeds,
        }
        if after is None:
            return PoolReport(**facts)
        known = int(after) - self.first + 1
        whole = not 0 < known <= len(self.events)
        rest = self.events[0 if whole else known :]
        page = tuple(rest[: self.page_events])
        following = page[-1].number if page else self.first + len(self.events) - 1
        more = len(rest) > len(page)
        return PoolReport(**facts, events=page, next=following, whole=whole, more=more)

    def answer(self, after: str | None) -> web.Response:
        return web.Response(body=self.report(after).encode())


async def known(world: World, chunks: int, store: str = A) -> None:
    await stored_known(world, chunks, store)


def test_a_stored_prompt_goes_to_an_engine_of_its_host_although_no_engine_has_it_cached() -> None:
    async def scenario() -> None:
        world = World(prefill=3, **LEAST_DELAY)
        store = Store(A, world.p[1])
        async with world:
            for seed in range(PROMPTS):
                store.has(keys(seed))
            await known(world, 7 * PROMPTS)
            assert {await sent(world, seed) for seed in range(PROMPTS)} == {"p1"}
            assert await world.metric("pool_requests_total", pool=f"pool {A[:12]}") == PROMPTS
            others = {await sent(world, seed) for seed in range(100, 100 + 4 * PROMPTS)}
            assert others == {"p0", "p1", "p2"}, "what is not stored may go anywhere"
            assert await world.metric("pool_requests_total") == PROMPTS

    run(scenario())


def test_a_stored_prompt_counts_for_engines_that_answer_alone() -> None:
    async def scenario() -> None:
        world = World(prefill=1, decode=3, **LEAST_DELAY)
        store = Store(A, world.d[1])
        async with world:
            for seed in range(PROMPTS):
                store.has(keys(seed))
            await known(world, 7 * PROMPTS)
            for seed in range(PROMPTS):
                assert (await world.complete(prompt=prompt(seed), n=2)).status == 200
                await world.idle()
            assert len(world.d[1].bodies) == PROMPTS
            assert await world.metric("pool_requests_total", pool=f"pool {A[:12]}") == PROMPTS

    run(scenario())


def test_a_prompt_goes_to_the_host_that_has_it_and_of_two_to_the_one_that_has_more() -> None:
    async def scenario() -> None:
        world = World(prefill=3, **LEAST_DELAY)
        here, there = Store(A, world.p[0]), Store(B, world.p[1])
        async with world:
            for seed in range(PROMPTS):
                here.has(keys(seed))
                there.has(keys(100 + seed))
                here.has(keys(200 + seed)[:2])
                there.has(keys(200 + seed))
            await known(world, 9 * PROMPTS)
            await known(world, 14 * PROMPTS, B)
            assert {await sent(world, seed) for seed in range(PROMPTS)} == {"p0"}
            assert {await sent(world, 100 + seed) for seed in range(PROMPTS)} == {"p1"}
            assert {await sent(world, 200 + seed) for seed in range(PROMPTS)} == {"p1"}

    run(scenario())


def test_the_decision_is_logged_with_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        Store(A, world.p[1]).has(keys(0))
        async with world:
            await known(world, 7)
            with caplog.at_level(logging.DEBUG, "scheduler_plugins.router.request"):
                await sent(world, 0)
            (line,) = [one for one in caplog.messages if "prefills" in one]
            assert f"{world.p[1].url} prefills, 104 tokens are new, the beginning from pool" in line
            health = (await world.get("/health")).json["engines"]
            (cache,) = [one["cache"] for one in health if one["url"] == world.p[1].url]
            assert (cache["pool"], cache["pool_chunks"]) == (f"pool {A[:12]}", 7)

    run(scenario())


@pytest.mark.parametrize(
    "body", [{"cache_salt": "other"}, {"model": "adapter"}, {"model": "m", "suffix": "x"}]
)
def test_what_another_salt_or_adapter_stored_counts_for_nothing(body: dict[str, Any]) -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        store = Store(A, world.p[1])
        async with world:
            store.has(keys(0, salt="mine"))
            await known(world, 7)
            await sent(world, 0, **body)
            assert await world.metric("pool_requests_total") == 0
            await sent(world, 0, cache_salt="mine")
            assert await world.metric("pool_requests_total") == 1

    run(scenario())


def test_engines_of_one_host_are_not_all_asked_for_its_journal_and_one_replaces_another() -> None:
    async def scenario() -> None:
        world = World(prefill=3, **LEAST_DELAY)
        store = Store(A, *world.p)
        async with world:
            store.has(keys(0))
            await known(world, 7)
            await until(
                lambda: all(world.known(one).store for one in world.p), "all have told their store"
            )

            def asked(engine: FakeEngine) -> list[str]:
                return [one for one in engine.pool_asked if one is not None]

            readers = [engine for engine in world.p if asked(engine)]
            assert len(readers) == 1
            await readers[0].die()
            store.has(keys(1))
            await known(world, 14)
            second = next(one for one in world.p if asked(one) and one is not readers[0])
            assert int(asked(second)[0]) == 7, "it goes on where the other ended"

    run(scenario())


def test_a_journal_that_begins_anew_replaces_what_was_known() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        store = Store(A, world.p[1])
        async with world:
            store.has(keys(0))
            store.has(keys(1))
            await known(world, 14)
            store.begin_anew(keys(2)[:5])
            await known(world, 5)
            await sent(world, 0)
            assert await world.metric("pool_requests_total") == 0
            assert await sent(world, 2) == "p1"
            assert await world.metric("pool_requests_total") == 1

    run(scenario())


def test_what_is_evicted_counts_no_longer() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        store = Store(A, world.p[1])
        async with world:
            store.has(keys(0))
            await known(world, 7)
            store.has(keys(0)[1:], tier="")
            await known(world, 1)
            store.has(keys(0)[:1], tier="disk")
            store.has(keys(0)[1:3], tier="disk")
            await known(world, 3)
            assert await sent(world, 0) == "p1"

    run(scenario())


def test_a_store_is_forgotten_with_its_last_engine() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        store = Store(A, world.p[1])
        async with world:
            store.has(keys(0))
            await known(world, 7)
            world.p[1].pool = None
            await until(lambda: not stored(world, A), "its chunks are forgotten")
            assert world.known(world.p[1]).store is None
            await sent(world, 0)
            assert await world.metric("pool_requests_total") == 0

    run(scenario())


def test_an_engine_without_a_pool_is_asked_once_for_each_start() -> None:
    async def scenario() -> None:
        world = World(**LEAST_DELAY)
        async with world:
            checks = world.p[0].health_checks
            await until(lambda: world.p[0].health_checks > checks + 5, "it is checked on")
            assert world.p[0].pool_asked == [None]
            await world.p[0].die()
            await world.down(world.p[0])
            store = Store(A, world.p[0])
            store.has(keys(0))
            await world.p[0].start()
            await known(world, 7)

    run(scenario())


USES_A_POOL = """
pd_connector:pool_hits_total{{engine="0"}} 0
pd_connector:pool_saves_total{{cause="saved",engine="0"}} {saves}
"""


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        (None, "start it with --middleware scheduler_plugins.vllm.PoolMiddleware"),
        (401, "/pd/pool answered 401"),
    ],
    ids=["no middleware", "another key"],
)
def test_a_pool_that_an_api_server_does_not_report_is_said(
    answered: int | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.05)

    async def scenario() -> None:
        async with World(**LEAST_DELAY) as world:
            if answered is not None:
                world.p[0].pool = lambda after: web.Response(status=answered)
                await world.p[0].die()
                await world.down(world.p[0])
                await world.p[0].start()
            world.p[0].metrics = USES_A_POOL.format(saves=1)
            known_one = world.known(world.p[0])
            await until(lambda: problem in known_one.about.pool_problem, "it is said")
            health = (await world.get("/health")).json
            (engine,) = [one for one in health["engines"] if one["url"] == known_one.url]
            assert problem in engine["pool_problem"]
            assert health["token_ids"] == f"{known_one.url}: {known_one.about.pool_problem}"

    run(scenario())


def test_an_engine_without_a_pool_has_no_pool_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.05)

    async def scenario() -> None:
        async with World(**LEAST_DELAY) as world:
            world.p[0].metrics = USES_A_POOL.format(saves=0) + "vllm:kv_cache_usage_perc 0.5\n"
            known_one = world.known(world.p[0])
            await until(lambda: known_one.traffic.cache_used == 0.5, "its metrics were read")
            assert known_one.about.pool_problem == ""
            told = (await world.get("/health")).json["token_ids"]
            assert "PoolMiddleware" in told
            assert "has a KV pool" not in told, "a pool that nobody reports may be there"

    run(scenario())


def bad_answers() -> Iterator[tuple[str, bytes]]:
    good = Store(A)
    good.page_events = 100
    good.has(keys(0))
    page = good.report("0").encode()
    yield "nothing", b""
    yield "no JSON", b"{"
    yield "no text", b"\xff\xfe"
    yield "deep", b"[" * 100_000
    yield "a list", b"[]"
    yield "a key of another length", page.replace(keys(0)[0].hex().encode(), b"ab")
    yield "a key of no digits", page.replace(keys(0)[0].hex().encode(), b"zz" * 32)
    yield "a number that is none", page.replace(b'"next":7', b'"next":"x"')
    yield "a number too large", page.replace(b'"next":7', b'"next":' + b"9" * 30)
    yield "a store of no digits", page.replace(A.encode(), b"../../etc")
    yield "no chunk", page.replace(b'"chunk_tokens":128', b'"chunk_tokens":0')
    yield "too many events", page.replace(b'"events":[', b'"events":[' + b'[1,"",""],' * 20_000)
    yield "too long", b" " * (3 << 20)


@pytest.mark.parametrize(
    ("what", "body"), list(bad_answers()), ids=[one for one, _ in bad_answers()]
)
def test_malformed_answers_do_no_harm(what: str, body: bytes) -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        Store(A, world.p[1]).has(keys(0))
        world.p[0].pool = lambda after: web.Response(body=body)
        async with world:
            await known(world, 7)
            assert world.known(world.p[0]).store is None, what
            assert await sent(world, 0) == "p1"
            good, world.p[1].pool = world.p[1].pool, world.p[0].pool
            asked = len(world.p[1].pool_asked)
            await until(lambda: len(world.p[1].pool_asked) > asked + 3, "it is asked on")
            await sent(world, 0)
            world.p[1].pool = good
            await known(world, 7)

    run(scenario())


def test_a_page_that_promises_more_without_end_does_not_stop_the_router() -> None:
    async def scenario() -> None:
        world = World(**LEAST_DELAY)
        event = PoolEvent(5, keys(0)[0].hex(), "memory")
        endless = PoolReport(
            store=A, model=MODEL.hex(), chunk_tokens=128, events=(event,), next=5, more=True
        )
        world.p[0].pool = lambda after: web.Response(body=endless.encode())
        async with world:
            await known(world, 1)
            for seed in range(3):
                await sent(world, seed)

    run(scenario())


def test_chunks_of_another_model_are_never_expected() -> None:
    async def scenario() -> None:
        world = World(prefill=2, **LEAST_DELAY)
        store = Store(A, world.p[1], model=b"o" * 32)
        async with world:
            store.has(keys(0))
            await known(world, 7)
            await sent(world, 0)
            assert await world.metric("pool_requests_total") == 0
            store.has(keys(1, model=b"o" * 32))
            await known(world, 14)
            assert await sent(world, 1) == "p1"

    run(scenario())
