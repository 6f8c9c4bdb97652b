# SPDX-License-Identifier: Apache-2.0
"""Routers of the same engines tell each other what they have sent."""

from __future__ import annotations

import asyncio
import secrets
from math import inf, nan
from typing import cast

import msgspec
import pytest
from router_fakes import DEADLINE_S, FAST, FakeEngine, run, until
from support.free_ports import free_ports
from support.vanishing import forget

from pd_connector.control import liveness
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.observed import SharedHistory
from scheduler_plugins.router.engines.others import Count
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers import load_exchange as load_exchange
from scheduler_plugins.router.peer_routers.load_exchange import (
    FORGOTTEN_S,
    MOST_REMEMBERED,
    SILENT_S,
    InFlight,
    PeerRouters,
)
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig

URL = "http://engine:1"


class OneEngine:
    """A pool of one engine that no task watches."""

    def __init__(self, engine: BackendEngine) -> None:
        self.engines = [engine]
        self.name = secrets.token_hex(8)
        self.history = SharedHistory()
        self.leads = True
        self.unsent_prompts = None


def router(key: str = "") -> tuple[PeerRouters, BackendEngine]:
    engine = BackendEngine(URL, Role.PREFILL, Metrics())
    made = PeerRouters(cast(EnginePool, OneEngine(engine)), Metrics(), key=key)
    made._counts.follow([engine])
    return made, engine


def test_what_one_router_sends_the_other_sees() -> None:
    (one, its), (other, theirs) = router(), router()
    its.load.prefill_sent("a", 100, 2.0, 10.0)
    its.load.opened(1)
    message = one.saying(11.0)  # this machine's clock says 11, the other's 511
    assert message is not None
    other.heard(message, 511.0)
    other.show(511.0)
    assert (theirs.prefills, theirs.queued_tokens) == (1, 100)
    assert theirs.queued_s(511.0) == pytest.approx(1.0)
    assert theirs.in_flight == 1, "people see all requests"
    assert theirs.load.own_open == 0, "an engine that leaves does not wait for others' requests"
    other.show(511.0 + FORGOTTEN_S + 0.1)
    assert theirs.prefills == 0, "a router that says nothing is gone"


def test_a_prompt_of_ours_begins_when_the_last_one_of_the_other_router_ends() -> None:
    (one, its), (other, theirs) = router(), router()

    def tell(now_s: float) -> None:
        for speaker, listener in ((one, other), (other, one)):
            if message := speaker.saying(now_s):
                listener.heard(message, now_s)
                listener.show(now_s)

    its.load.prefill_sent("a", 1000, 10.0, 100.0)
    tell(100.0)
    theirs.load.prefill_sent("b", 1000, 10.0, 105.0)
    tell(105.0)
    assert theirs.queued_s(105.0) == its.queued_s(105.0) == 15.0
    its.load.prefill_ended("a", 110.0)
    tell(110.0)
    assert theirs.queued_s(112.0) == its.queued_s(112.0) == 8.0


def test_an_engines_own_word_counts_for_all_senders_together() -> None:
    (one, its), (other, theirs) = router(), router()
    its.load.decode_sent("a", 100, 10)
    theirs.load.decode_sent("b", 100, 10)
    message = one.saying(20.0)
    assert message is not None
    other.heard(message, 20.0)
    other.show(20.0)
    theirs.load.reported(0.0, 3, 350, 20.0)
    assert theirs.load.correction.batch == 1, "one sequence is another client's"
    assert (theirs.batch, theirs.context) == (3, 350)


def test_a_router_says_nothing_twice_but_that_it_lives() -> None:
    one, its = router()
    assert one.saying(10.0) is not None
    assert one.saying(10.1) is None
    its.load.decode_sent("a", 5, 5)
    assert one.saying(10.2) is not None
    assert one.saying(11.0) is not None


def test_no_message_is_believed_twice_even_of_a_router_that_has_ended() -> None:
    (one, its), (other, theirs) = router(), router()
    its.load.decode_sent("a", 7, 7)
    for message in (b"", b"short", bytes(400)):
        other.heard(message, 1.0)
    first = one.saying(1.0)
    its.load.decode_sent("b", 7, 7)
    second = one.saying(1.1)
    assert first is not None
    assert second is not None
    for message in (first, second, first):
        other.heard(message, 1.2)
    other.show(1.2)
    assert theirs.context == 14, "an old message does not come back"
    one.heard(second, 1.2)
    one.show(1.2)
    assert its.context == 14, "nobody counts own work twice"
    ended_s = 1.2 + FORGOTTEN_S + 0.1
    other.show(ended_s)
    for message in (first, second):
        other.heard(message, ended_s)
        other.show(ended_s)
        assert theirs.context == 0, "its messages ended with it"


def test_what_is_known_of_routers_that_have_ended_is_bounded() -> None:
    other, _ = router()
    for n in range(MOST_REMEMBERED + 10):
        told = InFlight(f"router {n}", 1, {})
        other.heard(msgspec.msgpack.encode(told), 10.0 * n)
        other.show(10.0 * n)
    assert len(other._numbers) == MOST_REMEMBERED


def test_an_engine_that_another_router_uses_for_another_side_is_the_same_engine() -> None:
    """A side is what a router uses it for; what it is busy with is busy for all."""
    (one, its), (other, theirs) = router(), router()
    theirs.role = Role.BOTH
    its.load.decode_sent("a", 7, 5)
    message = one.saying(1.0)
    assert message is not None
    other.heard(message, 1.0)
    other.show(1.0)
    assert (theirs.batch, theirs.context) == (1, 7)


def test_a_fellow_that_lies_about_its_counts_is_not_believed() -> None:
    (one, its), (other, theirs) = router(), router()
    for lie in (inf, -1.0, nan, 1e308):
        its.load.decode_sent("a", 5, 5)
        message = one.saying(1.0)
        assert message is not None
        other.heard(message, 1.0)
        name = its.url
        for liar in ("liar", "another"):  # their sum must be a number, too
            told = InFlight(liar, 1, {name: [lie] * len(Count)})
            other.heard(msgspec.msgpack.encode(told), 1.0)
        other.show(1.0)
        assert (theirs.context, theirs.open_requests) == (5, 1), lie
        one, its = router()
        other, theirs = router()


def test_a_router_that_was_named_and_is_not_heard_is_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (one, _), (other, _) = router(), router()
    for now_s in (100.0, 100.0 + SILENT_S - 1):
        one.count(1, now_s)
    assert not caplog.records
    for now_s in (100.0 + SILENT_S, 100.0 + 2 * SILENT_S):
        one.count(1, now_s)
    (line,) = caplog.messages
    assert "0 of 1 other routers" in line
    assert "PD_ROUTER_KEY" in line
    message = other.saying(200.0)
    assert message is not None
    one.heard(message, 200.0)
    with caplog.at_level("INFO"):
        one.count(1, 200.0)
    assert caplog.messages[1:] == ["all 1 other routers send messages again"]
    assert one._metrics.fellows.collect()[0].samples[0].value == 1


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


SECRET, ANOTHER = (
    "a secret that all routers of a test share",
    "a secret that other routers of a test share",
)


@pytest.mark.parametrize("key", ["", SECRET])
def test_two_routers_over_the_network(key: str) -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        sides = {"prefill": (fakes[0].url,), "decode": (fakes[1].url,)}
        address = free_address()
        tells = RouterConfig(**sides, **FAST, exchange=address, router_key=key)
        hears = RouterConfig(**sides, **FAST, fellows=(address,), router_key=key)
        async with RouterServer(tells) as one, RouterServer(hears) as other:
            own, seen = (
                next(e for e in s.app[SHARED].pool.engines if e.role is Role.DECODE)
                for s in (one, other)
            )
            own.load.decode_sent("a", 123, 5)
            await until(lambda: seen.context == 123, "the other router sees it")
            own.load.decode_ended("a")
            await until(lambda: seen.context == 0, "and that it has ended")
        for fake in fakes:
            await fake.die()

    run(scenario())


def test_a_router_whose_connection_was_forgotten_on_the_way_is_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A subscriber sends nothing that could be missed, so the system has to ask."""
    for name in ("IDLE_S", "INTERVAL_S", "PROBES"):
        monkeypatch.setattr(liveness, name, 1)

    async def scenario() -> None:
        own = free_address()
        (one, engine), (other, seen) = router(), router()
        engine.load.decode_sent("a", 7, 7)
        tasks = [
            asyncio.create_task(one.run(own, ())),
            asyncio.create_task(other.run("", (own,))),
        ]
        await until(lambda: seen.context == 7, "the fellow is heard")
        assert forget(int(own.rpartition(":")[2])) == 2
        await until(lambda: not other._heard, "it is silent")
        await until(lambda: bool(other._heard), "it is heard again")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


@pytest.mark.parametrize("strangers", ["", ANOTHER])
def test_a_stranger_neither_hears_routers_with_a_secret_nor_is_heard_by_them(
    strangers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of what fellows say is of no use either: each connection has keys of its own."""
    # On a busy machine a fellow can be silent for longer than a second.
    monkeypatch.setattr(load_exchange, "FORGOTTEN_S", DEADLINE_S)

    async def scenario() -> None:
        theirs, own = free_address(), free_address()
        (one, engine), (other, seen), (stranger, its) = router(SECRET), router(SECRET), router()
        spy, spied = router(strangers)
        liar, lied = router(strangers)
        engine.load.decode_sent("a", 7, 7)
        lied.load.decode_sent("a", 1000, 5)
        tasks = [
            asyncio.create_task(one.run(own, ())),
            asyncio.create_task(spy.run("", (own,))),
            asyncio.create_task(liar.run(theirs, ())),
            asyncio.create_task(other.run("", (own, theirs))),
        ]
        await until(lambda: seen.context == 7, "the fellow is heard")
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert (seen.context, spied.context) == (7, 0)
        if not strangers:  # they hear each other
            tasks.append(asyncio.create_task(stranger.run("", (theirs,))))
            await until(lambda: its.context == 1000, "the liar does speak")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())
