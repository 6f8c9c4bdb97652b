# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP client: answers whole and broken, connections that are used again and that are not."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from scheduler_plugins.router.engines.answer import HELD_BYTES, BrokenAnswerError
from scheduler_plugins.router.engines.connection import MOST_HEADER_BYTES, Connection, Origin
from scheduler_plugins.router.engines.connections import EngineConnections, NotConnectedError

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DEADLINE_S = 60.0


class Server:
    """Answers each request with the next of these bytes; what follows after a `~` as well. `None` closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.connections = 0
        self.ended = asyncio.Event()
        self.heads: list[bytes] = []
        self.url = ""
        self.tasks: list[Any] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                while (answer := self._answers.pop(0)) is not None:
                    writer.write(answer.removesuffix(b"~"))
                    await writer.drain()
                    if not answer.endswith(b"~"):
                        break
                if answer is None:
                    break
        self.ended.set()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def asking(
    *answers: bytes | None, reuse_s: float = 5.0
) -> AsyncIterator[tuple[EngineConnections, Server]]:
    server = Server(*answers)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    connections = EngineConnections(DEADLINE_S, reuse_s)
    try:
        yield connections, server
    finally:
        await connections.close()
        listener.close()
        await asyncio.gather(*server.tasks, return_exceptions=True)  # no socket is left


async def asked(connections: EngineConnections, server: Server) -> bytes:
    answer = await connections.request("POST", server.url + "/x", {"A": "b"}, (b"bo", b"dy"))
    try:
        return await answer.read_all()
    finally:
        answer.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(within())


def sized(body: bytes, more: bytes = b"") -> bytes:
    return OK + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_one_connection_serves_requests_one_after_the_other() -> None:
    async def scenario() -> None:
        chunked = CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        async with asking(chunked, sized(b"second"), sized(b"")) as (connections, server):
            assert await asked(connections, server) == b"abc"
            assert await asked(connections, server) == b"second"
            assert await asked(connections, server) == b""
            assert server.connections == 1
            assert b"\r\nA: b\r\nContent-Length: 4\r\n\r\n" in server.heads[0]
            assert server.heads[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")

    run(scenario())


LARGE = bytes(range(256)) * (48 << 10)  # 12 MiB


async def idle_turns() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def test_a_large_body_waits_in_place_until_the_engine_takes_it() -> None:
    """A transport copies what it cannot send at once, and blocks the loop for that time."""

    async def scenario() -> None:
        begun, taking = asyncio.Event(), asyncio.Event()
        got = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            begun.set()
            await taking.wait()
            got.set_result(await reader.readexactly(len(LARGE) + 2))
            writer.write(sized(b"ok"))
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        connections = EngineConnections(DEADLINE_S, 5.0)
        body = (b"<", memoryview(LARGE), b">")
        asking = asyncio.create_task(connections.request("POST", url, {}, body))
        await begun.wait()
        await idle_turns()
        (connection,) = connections._open
        assert connection._transport is not None
        held = connection._transport.get_write_buffer_size()
        assert 0 < held < 256 << 10
        taking.set()
        answer = await asking
        assert (await got, await answer.read_all()) == (b"<" + LARGE + b">", b"ok")
        answer.close()
        await connections.close()
        listener.close()

    run(scenario())


def test_others_have_a_turn_while_a_large_body_is_sent() -> None:
    async def scenario() -> None:
        connection = Connection(Nobody(), Origin("engine", 80, False))
        taken: list[int] = []

        class Taker:
            """A transport to an engine that takes everything at once."""

            def write(self, data: bytes) -> None:
                taken.append(len(data))

            def is_closing(self) -> bool:
                return False

        connection.connection_made(Taker())  # type: ignore[arg-type]
        connection.send(b"", (LARGE,))
        assert sum(taken) == 1 << 20
        await asyncio.sleep(0)
        assert sum(taken) == 2 << 20
        await idle_turns()
        assert sum(taken) == len(LARGE)

    run(scenario())


class Nobody:
    """Owns connections, and does not care."""

    def released(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


def test_a_connection_whose_engine_answers_before_the_end_of_a_body_is_not_used_again() -> None:
    """The next request would be taken for the rest of the body."""

    async def scenario() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sized(b"no"))
            await writer.drain()
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        connections = EngineConnections(DEADLINE_S, 5.0)
        for _ in range(2):
            body = (memoryview(bytes(64 << 20)),)
            answer = await connections.request("POST", url, {}, body)
            assert await answer.read_all() == b"no"
            answer.close()
            assert not connections._idle
        await connections.close()
        listener.close()

    run(scenario())


@pytest.mark.parametrize(
    ("first", "reuse_s"),
    [
        (sized(b"a"), 0.0),  # idle for too long
        (sized(b"a", b"Connection: close\r\n"), 5.0),
        (
            sized(b"a") + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            5.0,
        ),  # nobody asked for more
        (sized(b"a") + b"nonsense", 5.0),
    ],
)
def test_a_connection_that_cannot_be_trusted_is_not_used_again(
    first: bytes, reuse_s: float
) -> None:
    async def scenario() -> None:
        async with asking(first, sized(b"b"), reuse_s=reuse_s) as (connections, server):
            assert await asked(connections, server) == b"a"
            await asyncio.sleep(0.02)
            assert await asked(connections, server) == b"b"
            assert server.connections == 2

    run(scenario())


def test_an_idle_connection_is_closed() -> None:
    async def scenario() -> None:
        async with asking(sized(b"a"), reuse_s=0.05) as (connections, server):
            await asked(connections, server)
            await server.ended.wait()

    run(scenario())


def test_a_body_may_end_with_its_connection() -> None:
    async def scenario() -> None:
        async with asking(OK + b"\r\nto the end~", None) as (connections, server):
            assert await asked(connections, server) == b"to the end"

    run(scenario())


def test_what_comes_before_the_answer_proper_is_left_out() -> None:
    async def scenario() -> None:
        early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        async with asking(early + sized(b"a")) as (connections, server):
            answer = await connections.request("GET", server.url, {}, None)
            assert answer.status == 200
            assert "Link" not in answer.headers
            assert await answer.read_all() == b"a"
            assert b"Content-Length" not in server.heads[0]

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 9\r\n\r\nshort~",
        CHUNKED + b"2\r\nab\r\n~",
        OK[:9] + b"~",
        b"SSH-2.0-nonsense\r\n~",
        CHUNKED + b"zz\r\n~",
        OK + b"X: " + b"y" * MOST_HEADER_BYTES + b"\r\n\r\n~",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n~",
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(answer: bytes) -> None:
    async def scenario() -> None:
        async with asking(answer, None) as (connections, server):
            with pytest.raises(BrokenAnswerError):
                await asked(connections, server)

    run(scenario())


def test_what_came_before_the_break_can_be_read() -> None:
    async def scenario() -> None:
        async with asking(CHUNKED + b"2\r\nab\r\n1\r\n~", None) as (connections, server):
            answer = await connections.request("GET", server.url, {}, None)
            await asyncio.sleep(0.05)
            assert await answer.read() == b"ab"
            with pytest.raises(BrokenAnswerError):
                await answer.read()

    run(scenario())


def test_an_answer_given_up_ends_its_connection() -> None:
    async def scenario() -> None:
        async with asking(CHUNKED + b"2\r\nab\r\n") as (connections, server):
            answer = await connections.request("GET", server.url, {}, None)
            answer.close()
            await server.ended.wait()

    run(scenario())


def test_parts_are_handed_on_until_they_are_refused() -> None:
    async def scenario() -> None:
        body = b"".join(b"1\r\n%d\r\n" % n for n in range(3))
        rest = b"3\r\nend\r\n0\r\n\r\n"
        async with asking(CHUNKED + body + b"~", rest) as (connections, server):
            answer = await connections.request("GET", server.url, {}, None)
            taken = list[bytes]()

            def take(data: bytes) -> bool:
                taken.append(data)
                return len(taken) > 1

            while not await answer.pass_to(take):
                assert len(taken) == 1
            assert b"".join(taken) == b"012end"
            assert taken[0].startswith(b"012")  # what came together is handed on together

    run(scenario())


def test_a_taker_that_fails_ends_the_answer() -> None:
    async def scenario() -> None:
        async with asking(CHUNKED + b"1\r\na\r\n0\r\n\r\n") as (connections, server):
            answer = await connections.request("GET", server.url, {}, None)

            def take(data: bytes) -> bool:
                raise KeyError("of the taker")

            with pytest.raises(KeyError, match="of the taker"):
                await answer.pass_to(take)
            answer.close()

    run(scenario())


def test_a_slow_reader_makes_the_engine_wait() -> None:
    async def scenario() -> None:
        size = 64 * HELD_BYTES
        async with asking(sized(b"x" * size)) as (connections, server):
            answer = await connections.request("GET", server.url, {}, None)
            await asyncio.sleep(0.2)
            assert answer._held_bytes < 4 * HELD_BYTES
            assert len(await answer.read_all()) == size

    run(scenario())


@pytest.mark.parametrize("value", ["a\r\nB: c", "a\nB: c", "a\rb", "a\0b"])
def test_a_header_cannot_bring_others(value: str) -> None:
    async def scenario() -> None:
        async with asking() as (connections, server):
            with pytest.raises(ValueError, match="line break"):
                await connections.request("GET", server.url, {"A": value}, None)
            assert not server.connections

    run(scenario())


def test_a_port_where_nobody_listens_refuses() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        connections = EngineConnections(DEADLINE_S, 1.0)
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(NotConnectedError) as caught:
                await connections.request("GET", f"http://{host}:{port}", {}, None)
            assert caught.value.refused
        await connections.close()

    run(scenario())


def test_a_name_that_leads_nowhere_is_not_connected() -> None:
    async def scenario() -> None:
        connections = EngineConnections(DEADLINE_S, 1.0)
        with pytest.raises(NotConnectedError) as caught:
            await connections.request("GET", "http://nobody.invalid:80", {}, None)
        assert not caught.value.refused
        await connections.close()

    run(scenario())
