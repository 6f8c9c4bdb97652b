# SPDX-License-Identifier: Apache-2.0
"""Clients that hold what they do not use: connections, and memory for bodies."""

import asyncio
import json
import logging
import socket

import pytest
from router_fakes import World, hang, run, until

from scheduler_plugins.router.endpoints.app_keys import BODIES, CONNECTIONS
from scheduler_plugins.router.settings.config import RouterConfig

HALF_OPEN = 600


async def half_open(
    world: World, count: int, begin: bytes = b"POST /v1/comp"
) -> list[socket.socket]:
    """Connections whose request never comes."""
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        await loop.sock_connect(one, ("127.0.0.1", world.port))
        await loop.sock_sendall(one, begin)
        found.append(one)
    return found


async def closed(connection: socket.socket) -> bool:
    """Whether the router has closed it."""
    try:
        return await asyncio.get_running_loop().sock_recv(connection, 100) == b""
    except ConnectionResetError:
        return True


MALFORMED = (
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
)


@pytest.mark.parametrize("sent", MALFORMED)
def test_what_is_no_http_is_refused_without_a_word_in_the_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was an error with a traceback of up to 40 lines: anybody who reaches the port could fill the disk."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with World() as world:
            (client,) = await half_open(world, 1, sent)
            assert b" 400 " in (await loop.sock_recv(client, 1000)).split(b"\r\n")[0]
            await until(lambda: len(world.app[CONNECTIONS]) == 0, "the connection is closed")
            client.close()

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert not [one for one in caplog.records if one.name == "aiohttp.server"]


@pytest.mark.parametrize("begin", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX-A: "])
def test_connections_that_never_send_a_request_are_closed(begin: bytes) -> None:
    async def scenario() -> None:
        async with World(header_timeout_s=1.5) as world:
            opened = await half_open(world, HALF_OPEN, begin)
            connections = world.app[CONNECTIONS]
            assert (await world.complete()).status == 200
            await until(lambda: len(connections) <= 1, "the half-open ones are closed")
            assert all([await closed(one) for one in opened])
            for one in opened:
                one.close()

    run(scenario())


def test_without_the_timeout_they_would_stay() -> None:
    async def scenario() -> None:
        async with World(header_timeout_s=3600) as world:
            opened = await half_open(world, 20)
            connections = world.app[CONNECTIONS]
            await until(lambda: len(connections) >= 20, "all connections are open")
            await asyncio.sleep(2.0)
            assert len(connections) >= 20
            for one in opened:
                one.close()

    run(scenario())


def test_a_new_client_takes_the_place_of_the_connection_that_is_idle_longest() -> None:
    async def scenario() -> None:
        async with World(connections=40, header_timeout_s=3600) as world:
            opened = await half_open(world, 60)
            assert (await world.complete()).status == 200
            assert len(world.app[CONNECTIONS]) <= 40
            assert all([await closed(one) for one in opened[:20]])
            for one in opened:
                one.close()

    run(scenario())


def test_a_request_under_way_is_never_closed_for_another_and_the_newcomer_is_told() -> None:
    async def scenario() -> None:
        async with World(connections=3) as world:
            world.d[0].behave = world.p[0].behave = hang
            tasks = [asyncio.create_task(world.complete()) for _ in range(3)]
            await until(lambda: world.d[0].running == 3, "three requests run")
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            said = await reader.read()
            assert b" 503 " in said.splitlines()[0]
            assert b"Retry-After: 1" in said
            assert world.d[0].running == 3
            writer.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_a_kept_alive_connection_serves_again() -> None:
    async def scenario() -> None:
        async with World(header_timeout_s=0.2) as world:
            assert (await world.complete()).status == 200
            await asyncio.sleep(0.5)
            assert (await world.complete()).status == 200
            assert len(world.app[CONNECTIONS]) == 1

    run(scenario())


def test_all_bodies_together_have_a_bound() -> None:
    async def scenario() -> None:
        async with World(body_mib=1, bodies_mib=2) as world:
            world.d[0].behave = world.p[0].behave = hang
            large = json.dumps({"prompt": "a" * (900 << 10)}).encode()
            tasks = [asyncio.create_task(world.post("/v1/completions", large)) for _ in range(8)]
            done, pending = await asyncio.wait(tasks, timeout=3.0)
            refused = [task.result() for task in done]
            assert len(pending) == 2, "two bodies fit"
            for reply in refused:
                assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert world.app[BODIES].held_bytes <= 2 << 20
            # Small requests go on meanwhile.
            world.d[0].behave = world.p[0].behave = hang
            small = asyncio.create_task(world.complete())
            await until(lambda: world.d[0].running == 3, "the small request runs")
            for task in (*pending, small):
                task.cancel()
            await asyncio.gather(*pending, small, return_exceptions=True)
            await until(lambda: world.app[BODIES].held_bytes == 0, "the room is given back")

    run(scenario())


def test_a_body_is_counted_as_it_comes_and_not_as_it_is_announced() -> None:
    async def scenario() -> None:
        async with World(body_mib=1, bodies_mib=1, idle_timeout_s=1.0) as world:
            begin = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000000\r\n\r\n{"
            opened = await half_open(world, 50, begin)
            large = json.dumps({"prompt": "a" * (900 << 10)}).encode()
            assert (await world.post("/v1/completions", large)).status == 200
            for one in opened:
                one.close()

    run(scenario())


def test_the_settings_are_checked() -> None:
    urls = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}
    with pytest.raises(ValueError, match=r"bodies_mib 8: must be at least body_mib \(64\)"):
        RouterConfig(**urls, bodies_mib=8)
    with pytest.raises(ValueError, match="connections 0"):
        RouterConfig(**urls, connections=0)


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_limit_of_more_milliseconds_than_any_clock_has_is_no_limit(digits: int) -> None:
    async def scenario() -> None:
        async with World() as world:
            header = {"X-Request-Timeout-Ms": "9" * digits}
            reply = await world.post("/v1/completions", {"model": "m", "prompt": "x"}, **header)
            assert reply.status == 200
            nothing = {"X-Request-Timeout-Ms": "0" * digits}
            reply = await world.post("/v1/completions", {"model": "m", "prompt": "x"}, **nothing)
            assert reply.status == 400

    run(scenario())
