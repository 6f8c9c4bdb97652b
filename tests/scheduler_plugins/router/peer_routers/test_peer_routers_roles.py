# SPDX-License-Identifier: Apache-2.0
"""Routers of the same engines agree on roles: one decides, and all are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import pytest
from router_fakes import FAST, FakeEngine, engine_of, engines, pool_of, run, until
from support.free_ports import free_ports

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.role_state import Version
from scheduler_plugins.router.peer_routers import load_exchange as load_exchange
from scheduler_plugins.router.peer_routers.advertised_roles import (
    MOST_NUMBER,
    AdvertisedRole,
    AdvertisedRoles,
)
from scheduler_plugins.router.peer_routers.load_exchange import InFlight
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.recent_history import BEAT_S
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig


@pytest.fixture(autouse=True)
def slow_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a living fellow can be silent for longer than a second."""
    monkeypatch.setattr(load_exchange, "FORGOTTEN_S", 5.0)


def addresses(count: int) -> list[str]:
    """Addresses whose ports are free."""
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]


def server(fakes: Sequence[FakeEngine], at: str, *others: str) -> RouterServer:
    sides = {"prefill": (fakes[0].url,), "decode": tuple(fake.url for fake in fakes[1:])}
    return RouterServer(RouterConfig(**sides, **FAST, exchange=at, fellows=others))


def test_a_role_given_at_one_router_holds_at_all_with_its_pin_and_each_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        a, b = addresses(2)
        async with engines() as fakes, server(fakes, a, b) as one, server(fakes, b, a) as two:
            pool_of(one).set_role(engine_of(one, fakes[1]), Role.PREFILL, pinned=True)
            theirs = engine_of(two, fakes[1])
            await until(lambda: theirs.role is Role.PREFILL, "the other router is told")
            assert theirs.role_state.pinned
            said = f"is prefill and no longer decode: router {pool_of(one).name} says so"
            assert [f"{theirs.url} {said}" in text for text in caplog.messages].count(True) == 1
            pool_of(two).release(theirs)
            await until(
                lambda: not engine_of(one, fakes[1]).role_state.pinned, "and of its release"
            )
            assert engine_of(one, fakes[1]).role is Role.PREFILL

    run(scenario())


def test_a_router_that_starts_anew_learns_the_roles_of_its_fellows() -> None:
    async def scenario() -> None:
        a, b = addresses(2)
        async with engines() as fakes, server(fakes, a, b) as one:
            pool_of(one).set_role(engine_of(one, fakes[1]), Role.PREFILL, pinned=False)
            async with server(fakes, b, a) as anew:
                theirs = engine_of(anew, fakes[1])
                await until(lambda: theirs.role is Role.PREFILL, "it is told")
            assert engine_of(one, fakes[1]).role is Role.PREFILL

    run(scenario())


def test_one_router_leads_and_one_that_hears_nobody_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        a, b = addresses(2)
        async with engines() as fakes:
            async with server(fakes, a, b) as one:
                await asyncio.sleep(0.3)
                assert not pool_of(one).leads, "its fellow may be deciding elsewhere"
                async with server(fakes, b, a) as two:
                    pools = [pool_of(one), pool_of(two)]
                    smallest = min(pools, key=lambda pool: pool.name)
                    await until(lambda: smallest.leads, "the smallest name leads")
                    await asyncio.sleep(0.2)
                    assert [pool for pool in pools if pool.leads] == [smallest]
                monkeypatch.setattr(load_exchange, "FORGOTTEN_S", 0.2)
                await until(lambda: not pool_of(one).leads, "it hears nobody")
            async with RouterServer(
                RouterConfig(prefill=(fakes[0].url,), decode=(fakes[1].url,), **FAST)
            ) as alone:
                assert pool_of(alone).leads, "it has no fellows"

    run(scenario())


def test_what_happens_at_one_router_is_in_the_history_of_all() -> None:
    async def scenario() -> None:
        a, b = addresses(2)
        async with engines() as fakes, server(fakes, a, b) as one, server(fakes, b, a) as two:
            loop = asyncio.get_running_loop()

            def seen(router: RouterServer) -> float:
                return pool_of(router).history.over(loop.time(), 600, "default").tokens

            await until(
                lambda: pool_of(one).leads is not pool_of(two).leads, "they hear each other"
            )
            pool_of(one).history.arrived(loop.time(), "default", 1000, 1.0, 1.0)
            pool_of(two).history.arrived(loop.time(), "default", 1, 1.0, 1.0)
            await until(lambda: seen(one) == seen(two) == 1001, "both know both")
            await asyncio.sleep(0.5)
            assert seen(one) == seen(two) == 1001, "nothing is told on, or twice"
            pool_of(two).history.overflowed(loop.time(), "default")

            def overflows(router: RouterServer) -> int:
                beats = pool_of(router).metrics.pulse.beats(loop.time() + BEAT_S)
                return sum(beat.overflows for beat in beats)

            await until(lambda: overflows(two) == 1, "its own")
            await until(lambda: overflows(one) == 1, "the page advises for all routers")

    run(scenario())


def test_the_larger_version_holds_whatever_comes_late() -> None:
    async def scenario() -> None:
        async with (
            engines() as fakes,
            RouterServer(
                RouterConfig(prefill=(fakes[0].url,), decode=(fakes[1].url,), **FAST)
            ) as alone,
        ):
            engine, told = engine_of(alone, fakes[1]), AdvertisedRoles(pool_of(alone))
            told.heard("b", {engine.url: AdvertisedRole(Role.PREFILL, 5, "b")})
            assert engine.role is Role.PREFILL
            for late in (
                AdvertisedRole(Role.DECODE, 4, "z"),
                AdvertisedRole(Role.DECODE, 5, "a"),
                AdvertisedRole(Role.CPU_PREFILL, 9, "z"),
                AdvertisedRole(Role.DECODE, MOST_NUMBER, "z"),
            ):
                told.heard("z", {engine.url: late, "http://unknown:1": late})
                assert (engine.role, engine.role_state.version) == (Role.PREFILL, Version(5, "b"))
            told.heard("c", {engine.url: AdvertisedRole(Role.BOTH, 5, "c")})
            assert engine.role is Role.BOTH, "equal numbers are told apart by the router"

    run(scenario())


def test_a_move_of_a_router_that_dies_ends_and_the_engine_is_asked_for_its_side() -> None:
    async def scenario() -> None:
        async with (
            engines() as fakes,
            RouterServer(
                RouterConfig(prefill=(fakes[0].url,), decode=(fakes[1].url,), **FAST)
            ) as alone,
        ):
            pool, engine = pool_of(alone), engine_of(alone, fakes[1])
            told, looked = AdvertisedRoles(pool), list[BackendEngine]()
            pool.look_again = looked.append  # type: ignore[method-assign]
            told.heard("b", {engine.url: AdvertisedRole(Role.DECODE, 0, "", moving=Role.PREFILL)})
            assert engine.role_state.moving is Role.PREFILL
            assert pool.up(Role.DECODE) == [], "nobody sends it anything meanwhile"
            assert told.telling() == {}, "it is not this router's move"
            told.forget({"c"})
            assert engine.role_state.moving is None
            assert looked == [engine]
            assert pool.up(Role.DECODE) == [engine]

    run(scenario())


def test_a_message_without_roles_is_understood_and_lies_are_not_believed() -> None:
    plain = msgspec.msgpack.encode(["router", 1, {}])
    assert msgspec.msgpack.decode(plain, type=InFlight).roles == {}
    bad = msgspec.msgpack.encode(["router", 1, {}, {"http://e:1": ["king", 1, "b"]}, []])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(bad, type=InFlight)
