# SPDX-License-Identifier: Apache-2.0
"""An engine that has a host name is reached as long as it is there, whatever its name server does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from router_fakes import FAST, FakeEngine, run, until

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines import lookup
from scheduler_plugins.router.engines.lookup import Names
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig

Answers = Callable[[], Awaitable[list[Any]]]


def told(*hosts: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80)) for host in hosts]


class NameServer:
    """Answers every name as a test says, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: list[Any] | Exception = told("10.0.0.1")
        self.serves = asyncio.Event()
        self.serves.set()
        self.asked = 0
        monkeypatch.setattr(lookup, "KNOWN_S", 0.0)
        monkeypatch.setattr(lookup, "PATIENCE_S", 0.05)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.getaddrinfo)

    async def getaddrinfo(self, *args: Any, **named: Any) -> list[Any]:
        self.asked += 1
        if not isinstance(args[0], str) or args[0][0].isdecimal():
            return told("127.0.0.1")  # the address that a router listens on
        await self.serves.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return [(*rest, (address[0], args[1])) for *rest, address in self.answer]


def test_a_name_server_that_is_away_takes_no_engine_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        server, names = NameServer(monkeypatch), Names()
        assert await names.addresses("engine", 80) == told("10.0.0.1")
        server.answer = socket.gaierror(socket.EAI_AGAIN, "try again")
        for _ in range(3):
            assert await names.addresses("engine", 80) == told("10.0.0.1")
        with pytest.raises(socket.gaierror):
            await names.addresses("never-known", 80)
        server.answer = told("10.0.0.2")
        (one,) = await names.resolve("engine", 80, socket.AF_INET)
        assert (one["host"], one["port"]) == ("10.0.0.2", 80), "the name's engine has moved"
        server.answer = socket.gaierror(socket.EAI_NONAME, "no such name")
        with pytest.raises(socket.gaierror):
            await names.addresses("engine", 80)

    run(scenario())
    away, again = (text for text in caplog.messages if "looked up" in text)
    assert "its last addresses stay" in away
    assert "again" in again


def test_a_name_server_that_hangs_delays_hardly_and_holds_one_thread_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        server, names = NameServer(monkeypatch), Names()
        await names.addresses("engine", 80)
        server.serves.clear()
        server.asked = 0
        many = await asyncio.gather(*(names.addresses("engine", 80) for _ in range(50)))
        assert many == [told("10.0.0.1")] * 50
        assert server.asked == 1
        unknown = asyncio.create_task(names.addresses("unknown", 80))
        server.answer = told("10.0.0.3")
        server.serves.set()
        assert await unknown == told("10.0.0.3")
        await until(lambda: not names._asking, "the lookups have ended")
        assert await names.addresses("10.0.0.9", 80), "an address is not asked for"
        assert server.asked == 2

    run(scenario())


def test_requests_and_health_checks_go_on_while_no_name_can_be_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        server = NameServer(monkeypatch)
        server.answer = told("127.0.0.1")
        urls = [f"http://{fake.name}.test:{fake.port}" for fake in fakes]
        config = RouterConfig(prefill=(urls[0],), decode=(urls[1],), **FAST)
        async with RouterServer(config) as router, aiohttp.ClientSession() as client:

            async def asked() -> int:
                url = f"http://127.0.0.1:{router.port}/v1/completions"
                async with client.post(url, json={"model": "m", "prompt": "a"}) as response:
                    return response.status

            assert await asked() == 200
            server.answer = socket.gaierror(socket.EAI_AGAIN, "try again")
            checks = fakes[1].health_checks
            await until(lambda: fakes[1].health_checks > checks + 3, "health checks go on")
            assert await asked() == 200
            assert len(router.app[SHARED].pool.all_up()) == 2
        for fake in fakes:
            await fake.die()

    run(scenario())
