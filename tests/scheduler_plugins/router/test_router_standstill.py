# SPDX-License-Identifier: Apache-2.0
"""A router that stood still (stopped, on a paused machine, without a processor) reads what has come before it gives anything up.

After a standstill all timers are due, and loops run them before they read sockets.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from router_fakes import FAST, FakeEngine, World, once, run, slow, stream, until
from support.free_ports import free_ports

from scheduler_plugins.router.client import connections
from scheduler_plugins.router.endpoints.app_keys import CONNECTIONS, SHARED
from scheduler_plugins.router.engines import sessions
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.lookup import Names
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.loop import AsyncioLoop, new_loop
from scheduler_plugins.router.peer_routers import load_exchange as load_exchange
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig

LIMIT_S = 1.0
STILL_S = 2.5 * LIMIT_S

BODY = b'{"model": "m", "prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY


def stand_still() -> None:
    """The whole process stands still, as after SIGSTOP and SIGCONT."""
    time.sleep(STILL_S)


@pytest.fixture(params=[AsyncioLoop, new_loop], ids=["asyncio", "installed"])
def loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """asyncio's loop, and the one that a router takes here."""
    made: Callable[[], asyncio.AbstractEventLoop] = request.param
    return made


Loop = Callable[[], asyncio.AbstractEventLoop]


async def connected(world: World) -> socket.socket:
    """A client's connection that the router has accepted."""
    client = socket.socket()
    client.setblocking(False)
    before = len(world.app[CONNECTIONS])
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", world.port))
    await until(lambda: len(world.app[CONNECTIONS]) > before, "the router has accepted it")
    return client


async def received(client: socket.socket) -> bytes:
    parts = []
    while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
        parts.append(part)
    client.close()
    return b"".join(parts)


def test_a_client_whose_headers_came_meanwhile_is_served(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", LIMIT_S)

    async def scenario() -> None:
        async with World() as world:
            client = await connected(world)
            client.send(REQUEST)
            stand_still()
            assert b" 200 OK" in await received(client)

    run(scenario(), loop)


def test_a_client_whose_body_came_meanwhile_is_served(loop: Loop) -> None:
    async def scenario() -> None:
        async with World(idle_timeout_s=LIMIT_S) as world:
            client = await connected(world)
            client.send(REQUEST[:-10])
            await until(
                lambda: world._requests_in_flight() == 1,
                "the router waits for the rest of the body",
            )
            client.send(REQUEST[-10:])
            stand_still()
            assert b" 200 OK" in await received(client)

    run(scenario(), loop)


def test_a_client_that_could_not_be_written_to_is_not_taken_for_gone(loop: Loop) -> None:
    async def much(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(32):
            await response.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % (b"x" * (1 << 20)))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def scenario() -> None:
        async with World(idle_timeout_s=LIMIT_S) as world:
            world.d[0].behave = much
            client = await connected(world)
            body = b'{"model": "m", "prompt": "a", "stream": true}'
            client.send(HEAD % len(body) + body)
            await until(lambda: world.d[0].running == 1, "the stream has begun")
            await asyncio.sleep(0.2)  # the router waits for the client
            stand_still()
            assert (await received(client)).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")

    run(scenario(), loop)


def test_an_idle_connection_with_an_unread_request_is_not_closed_for_another(loop: Loop) -> None:
    async def scenario() -> None:
        async with World(connections=2) as world:
            first, second = await connected(world), await connected(world)
            first.send(REQUEST)
            third = socket.create_connection(("127.0.0.1", world.port))
            third.setblocking(False)
            third.send(REQUEST)
            stand_still()
            assert b" 200 OK" in await received(first)
            assert b" 200 OK" in await received(third)
            assert await received(second) == b"", "nobody waited there"

    run(scenario(), loop)


def test_an_engine_to_which_a_connection_was_being_opened_is_asked(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    monkeypatch.setattr(sessions, "CONNECT_S", LIMIT_S)
    addresses = Names.addresses

    async def scenario() -> None:
        async with World(health_interval_s=60) as world:
            still = [stand_still]

            async def looked_up(self: Names, host: str, port: int) -> Any:
                found = await addresses(self, host, port)
                if still:
                    still.pop()()
                return found

            monkeypatch.setattr(Names, "addresses", looked_up)
            assert (await world.complete()).status == 200
            assert await world.metric("retries_total") == 0

    run(scenario(), loop)


def test_an_engine_whose_health_was_being_checked_stays_up(loop: Loop) -> None:
    async def scenario() -> None:
        async with World(health_timeout_s=LIMIT_S) as world:
            engine, fake = world.known(world.d[0]), world.d[0]
            for _ in range(3):  # two misses in a row would do
                fake.hung, before = True, fake.health_checks
                await until(lambda: fake.health_checks > before, "its health is being asked")  # noqa: B023
                fake.unhang()
                stand_still()
            await until(lambda: fake.health_checks > before + 2, "it was asked again")
            assert (engine.up, engine.starts) == (True, 1)

    run(scenario(), loop)


@pytest.mark.parametrize("begun", [True, False])
def test_an_engine_whose_bytes_came_meanwhile_is_not_taken_for_silent(
    begun: bool, loop: Loop
) -> None:
    """All streams were interrupted at once."""

    async def scenario() -> None:
        async with World(idle_timeout_s=0.5, first_byte_timeout_s=0.5) as world:
            world.d[0].behave = stream(3, gap_s=0.2) if begun else slow(0.2)
            task = asyncio.create_task(world.complete(stream=True))
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            stand_still()
            assert (await task).events[-1] == "[DONE]"
            assert await world.metric("retries_total") == 0

    run(scenario(), loop)


def test_an_engine_that_leaves_keeps_its_time_to_finish(loop: Loop) -> None:
    async def scenario() -> None:
        async with World(decode=2, drain_timeout_s=LIMIT_S) as world:
            go_on = asyncio.Event()
            world.d[0].behave = once(go_on)
            task = asyncio.create_task(world.complete())
            await until(lambda: world.d[0].running == 1, "d0 has the request")
            pool = world.app[SHARED].pool
            assert isinstance(pool, EnginePool)
            engine = world.known(world.d[0])
            pool.remove(engine)
            await until(lambda: engine.draining, "it leaves")
            go_on.set()
            stand_still()
            assert (await task).json["served_by"] == "d0"
            await until(lambda: engine not in pool.engines, "it has left")

    run(scenario(), loop)


def test_another_router_whose_messages_came_meanwhile_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    """Both stand still, and their messages wait in sockets."""
    monkeypatch.setattr(load_exchange, "FORGOTTEN_S", LIMIT_S)
    heard = []
    show = load_exchange.PeerRouters.show

    def shown(self: load_exchange.PeerRouters, *arguments: Any, **named: Any) -> None:
        show(self, *arguments, **named)
        if self._named:
            heard.append(len(self._heard))

    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        sides = {"prefill": (fakes[0].url,), "decode": (fakes[1].url,)}
        address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        tells = RouterConfig(**sides, **FAST, exchange=address)
        hears = RouterConfig(**sides, **FAST, fellows=(address,))
        async with RouterServer(tells) as one, RouterServer(hears):
            load = next(e for e in one.app[SHARED].pool.engines if e.role is Role.DECODE).load
            load.decode_sent("a", 1, 1)
            await until(lambda: 1 in heard, "it is heard")
            monkeypatch.setattr(load_exchange.PeerRouters, "show", shown)
            heard.clear()
            stand_still()
            await until(lambda: len(heard) > 20, "it was looked for")
            assert set(heard) == {1}
        for fake in fakes:
            await fake.end()

    monkeypatch.setattr(load_exchange.PeerRouters, "show", shown)
    run(scenario(), loop)


def test_a_burst_is_served_by_a_router_that_was_stopped_in_it() -> None:
    """Requests whose connections had just been made got no answer, and engines that answer were called down."""

    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        (port,) = free_ports(1)
        command = [*(sys.executable, "-m", "scheduler_plugins.router"), "--port", str(port)]
        command += ["--prefill", fakes[0].url, "--decode", fakes[1].url, "--log-level", "ERROR"]
        router = await asyncio.create_subprocess_exec(*command)
        begun = 0

        async def ask(text: bytes) -> bytes:
            nonlocal begun
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            begun += 1
            writer.write(text)
            said = await reader.read()
            writer.close()
            return said.split(b"\r\n")[0]

        async def listens() -> None:
            health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            while True:
                try:
                    if b" 200 " in await ask(health):
                        return
                except OSError:
                    await asyncio.sleep(0.1)

        try:
            await listens()
            begun = 0
            tasks = [asyncio.create_task(ask(REQUEST)) for _ in range(200)]
            await until(lambda: begun > 100, "the burst has begun")
            router.send_signal(signal.SIGSTOP)
            await asyncio.sleep(connections.HEADERS_S + 1)
            router.send_signal(signal.SIGCONT)
            assert set(await asyncio.gather(*tasks)) == {b"HTTP/1.1 200 OK"}
        finally:
            router.send_signal(signal.SIGCONT)
            router.terminate()
            await router.wait()
            for fake in fakes:
                await fake.end()

    run(scenario())
