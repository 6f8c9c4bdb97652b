# SPDX-License-Identifier: Apache-2.0
"""Clients that hold what they do not use: connections, and memory for bodies."""

import asyncio
import gzip
import json
import logging
import socket
import zlib
from collections.abc import Callable

import pytest
from router_fakes import World, hang, run, until

from scheduler_plugins.router.client import connections
from scheduler_plugins.router.endpoints import admin
from scheduler_plugins.router.endpoints.admin import MOST_CONNECTIONS
from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, BODIES, CONNECTIONS
from scheduler_plugins.router.prompt import body
from scheduler_plugins.router.prompt.pieces import PIECE_BYTES
from scheduler_plugins.router.server import AdminServer
from scheduler_plugins.router.settings.config import RouterConfig

HALF_OPEN = 600


async def half_open(
    world: World, count: int, begin: bytes = b"POST /v1/comp", port: int = 0
) -> list[socket.socket]:
    """Connections whose request never comes. `port`: another one than that of clients."""
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        await loop.sock_connect(one, ("127.0.0.1", port or world.port))
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


@pytest.mark.parametrize(
    "sent",
    [
        *(one.replace(b"POST /v1/completions", b"POST /engines") for one in MALFORMED),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /engines HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_nobody_without_the_token_fills_the_log_by_the_admin_port(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with World(admin_port=0) as world:
            (client,) = await half_open(world, 1, sent, world.server.admin_port)
            assert (await loop.sock_recv(client, 1000)).split(b" ")[1] in (b"400", b"401")
            await until(lambda: len(admin_of(world).connections) == 0, "the connection is closed")
            client.close()

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert not [one for one in caplog.records if one.name == "aiohttp.server"]


def admin_of(world: World) -> AdminServer:
    assert world.server._admin is not None
    return world.server._admin


def test_half_open_connections_to_the_admin_port_keep_out_neither_clients_nor_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 3600)

    async def scenario() -> None:
        async with World(admin_port=0) as world:
            port = world.server.admin_port
            opened = await half_open(world, 3 * MOST_CONNECTIONS, b"G", port)
            assert all([await closed(one) for one in opened[: 2 * MOST_CONNECTIONS]])
            assert len(admin_of(world).connections) == MOST_CONNECTIONS
            assert (await world.complete()).status == 200
            token = {"Authorization": f"Bearer {world.app[ADMIN_AUTH].token}"}
            url = f"http://127.0.0.1:{port}/engines"
            async with world.client.get(url, headers=token) as told:
                assert told.status == 200
            for one in opened:
                one.close()

    run(scenario())


def test_connections_to_the_admin_port_that_never_send_a_request_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 1.5)

    async def scenario() -> None:
        async with World(admin_port=0) as world:
            opened = await half_open(
                world, 20, b"GET /engines HTTP/1.1\r\nX-A: ", world.server.admin_port
            )
            await until(lambda: len(admin_of(world).connections) == 0, "they are closed")
            assert all([await closed(one) for one in opened])
            for one in opened:
                one.close()

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "length", "status", "said"),
    [
        (b"{", 1000, 400, "was not sent within 0.5 s"),
        (b"x" * (2 << 20), 2 << 20, 413, "larger than 1048576 bytes"),
        (b"[" * 100_000, 100_000, 400, ""),
    ],
)
def test_the_operators_bodies_have_a_bound_and_a_time(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, length: int, status: int, said: str
) -> None:
    monkeypatch.setattr(admin, "BODY_S", 0.5)

    async def scenario() -> None:
        async with World(admin_port=0) as world:
            token = f"Authorization: Bearer {world.app[ADMIN_AUTH].token}\r\n"
            head = f"POST /engines HTTP/1.1\r\nHost: localhost\r\n{token}Content-Length: {length}"
            reader, writer = await asyncio.open_connection("127.0.0.1", world.server.admin_port)
            writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + sent)
            answer = await reader.readuntil(b"}}")
            assert int(answer.split(b" ")[1]) == status
            assert said.encode() in answer
            writer.close()

    run(scenario())


@pytest.mark.parametrize("begin", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX-A: "])
def test_connections_that_never_send_a_request_are_closed(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 1.5)

    async def scenario() -> None:
        async with World() as world:
            opened = await half_open(world, HALF_OPEN, begin)
            connections = world.app[CONNECTIONS]
            assert (await world.complete()).status == 200
            await until(lambda: len(connections) <= 1, "the half-open ones are closed")
            assert all([await closed(one) for one in opened])
            for one in opened:
                one.close()

    run(scenario())


def test_without_the_timeout_they_would_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 3600)

    async def scenario() -> None:
        async with World() as world:
            opened = await half_open(world, 20)
            connections = world.app[CONNECTIONS]
            await until(lambda: len(connections) >= 20, "all connections are open")
            await asyncio.sleep(2.0)
            assert len(connections) >= 20
            for one in opened:
                one.close()

    run(scenario())


def test_a_new_client_takes_the_place_of_the_connection_that_is_idle_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 3600)

    async def scenario() -> None:
        async with World(connections=40) as world:
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


def test_a_kept_alive_connection_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        connections, "HEADERS_S", 1.5
    )  # the first ones come in time on a busy machine

    async def scenario() -> None:
        async with World() as world:
            assert (await world.complete()).status == 200
            await asyncio.sleep(2.0)
            assert (await world.complete()).status == 200
            assert len(world.app[CONNECTIONS]) == 1

    run(scenario())


def test_all_bodies_together_have_a_bound() -> None:
    async def scenario() -> None:
        async with World(body_mib=1, bodies_mib=4) as world:
            world.d[0].behave = world.p[0].behave = hang
            large = json.dumps({"prompt": "a" * (900 << 10)}).encode()
            tasks = [asyncio.create_task(world.post("/v1/completions", large)) for _ in range(8)]
            await until(lambda: world.d[0].running == 2, "two bodies fit")
            await until(lambda: sum(task.done() for task in tasks) == 6, "the others do not")
            pending = [task for task in tasks if not task.done()]
            for reply in [task.result() for task in tasks if task.done()]:
                assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert world.app[BODIES].held_bytes <= 4 << 20
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
        async with World(body_mib=1, bodies_mib=2, idle_timeout_s=1.0) as world:
            begin = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000000\r\n\r\n{"
            opened = await half_open(world, 50, begin)
            large = json.dumps({"prompt": "a" * (900 << 10)}).encode()
            assert (await world.post("/v1/completions", large)).status == 200
            for one in opened:
                one.close()

    run(scenario())


MANY_IDS = json.dumps({"prompt": [7] * 300_000}).encode()
"""0.9 MiB as it is sent, and 12 MiB once it is parsed."""


def test_bodies_are_counted_as_they_are_once_they_are_parsed() -> None:
    async def scenario() -> None:
        async with World(body_mib=1, bodies_mib=32) as world:
            world.d[0].behave = world.p[0].behave = hang
            tasks = [asyncio.create_task(world.post("/v1/completions", MANY_IDS)) for _ in range(5)]
            await until(lambda: world.d[0].running == 2, "two of them take 26 MiB")
            await until(lambda: sum(task.done() for task in tasks) == 3, "the others do not fit")
            assert {task.result().status for task in tasks if task.done()} == {503}
            pending = [task for task in tasks if not task.done()]
            assert 24 << 20 < world.app[BODIES].held_bytes <= 32 << 20
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        async with World(body_mib=1, bodies_mib=8) as world:
            reply = await world.post("/v1/completions", MANY_IDS)
            assert reply.status == 413, "it would not fit if it were alone"
            assert "--bodies-mib" in reply.text

    run(scenario())


def test_other_requests_are_served_between_the_pieces_of_a_large_one() -> None:
    async def scenario() -> None:
        async with World() as world:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            steps, decode = [], body.msgspec.json.decode

            def counted(raw: bytes) -> object:
                steps.append((turns, len(raw)))
                return decode(raw)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(body.msgspec.json, "decode", counted)
                counting = asyncio.create_task(count())
                assert (await world.post("/v1/completions", MANY_IDS)).status == 200
                counting.cancel()
            large = [at for at, size in steps if size > 1000]
            assert len(large) == len(set(large)) > 10, "the loop turns before each piece"
            assert max(size for _, size in steps) <= PIECE_BYTES + 2

    run(scenario())


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", lambda b: gzip.compress(b[:9]) + gzip.compress(b[9:]))],
)  # fmt: skip
def test_a_packed_body_is_served(encoding: str, packed: Callable[[bytes], bytes]) -> None:
    async def scenario() -> None:
        async with World() as world:
            sent = packed(MANY_IDS)
            reply = await world.post("/v1/completions", sent, **{"Content-Encoding": encoding})
            assert reply.status == 200
            assert world.d[0].bodies[0]["prompt"] == [7] * 300_000

    run(scenario())


def test_a_small_body_that_becomes_a_large_one_is_unpacked_no_further_than_it_may() -> None:
    """92 KiB took 500 MiB, and 7 KiB the router's only thread for more than a second."""

    async def scenario() -> None:
        async with World(body_mib=4, bodies_mib=16) as world:
            bomb = gzip.compress(b'{"prompt":"' + bytes(32 << 20))
            steps = []
            real = connections.zlib.decompressobj

            class Counted:
                def __init__(self, *given: int) -> None:
                    self._inner = real(*given)

                def decompress(self, data: bytes, most: int = 0) -> bytes:
                    out = self._inner.decompress(data, most)
                    steps.append(len(out))
                    return out

                def __getattr__(self, name: str) -> object:
                    return getattr(self._inner, name)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(connections.zlib, "decompressobj", Counted)
                packed = {"Content-Encoding": "gzip"}
                assert (await world.post("/v1/completions", bomb, **packed)).status == 413
            assert max(steps) <= PIECE_BYTES
            assert sum(steps) <= (4 << 20) + PIECE_BYTES
            for encoding, sent in (("gzip", b"abc"), ("gzip", bomb[:100]), ("br", b"{}")):
                headers = {"Content-Encoding": encoding}
                assert (await world.post("/v1/completions", sent, **headers)).status == 400
            assert world.app[BODIES].held_bytes == 0

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
