# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: HTTP/1.1 with httptools, which hands bytes on in the callback that received them.

aiohttp's client wakes a task for each piece of an answer, and takes as long for a request as the rest of the router. Engines are
watched with it all the same: that is seldom, and needs nothing fast.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools
from aiohappyeyeballs import AddrInfoType

from scheduler_plugins.router.engines.answer import Answer, BrokenAnswerError

MOST_HEADER_BYTES = 64 << 10
"""Of an answer."""
_JOINED_BYTES = 64 << 10
"""Longest request that is copied into one piece with its headers."""
_RESOLVED_S = 10.0
"""So long a name's addresses are used again."""
_STAGGER_S = 0.25
"""Of several addresses, the next one is tried when the one before has not answered for so long (RFC 8305)."""


class NotConnectedError(ConnectionError):
    """No connection could be made: the engine has not seen the request."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused
        """The machine answered that nobody listens there."""


class _Origin(NamedTuple):
    """What connections are told apart by."""

    host: str
    port: int
    encrypted: bool


class EngineConnections:
    """Sends requests to engines. A connection is used again while it has been idle for `reuse_s` at most."""

    def __init__(
        self, connect_timeout_s: float, reuse_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connect to nobody yet.

        Args:
            tls: whom to believe behind an `https` URL; None: whom the system trusts.
        """
        self._connect_timeout_s = connect_timeout_s
        self._reuse_s = reuse_s
        self._tls = tls
        self._idle: dict[_Origin, list[_Connection]] = {}  # idle longest first
        self._open: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._resolved: dict[tuple[str, int], tuple[float, list[AddrInfoType]]] = {}

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        """Send a request. Returns its answer, of which status and headers have come; whoever gets it must close it.

        Raises:
            NotConnectedError: no connection within `connect_timeout_s`; nothing was sent.
            BrokenAnswerError: the connection broke, or what came is no HTTP.
            ValueError: a header cannot be sent.
        """
        parts = urlsplit(url)
        encrypted = parts.scheme == "https"
        assert parts.hostname is not None
        origin = _Origin(parts.hostname, parts.port or (443 if encrypted else 80), encrypted)
        head = _head(method, parts.path or "/", parts.netloc, headers, body)
        connection = self._again(origin) or await self._connected(origin)
        answer = connection.send(head, body or b"")
        try:
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        return answer

    async def close(self) -> None:
        """Close all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # their transports close their sockets

    def released(self, connection: _Connection) -> None:
        """An answer is whole, and its connection may be used again."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._reuse_s, self._sweep)

    def lost(self, connection: _Connection) -> None:
        """A connection is closed."""
        self._open.discard(connection)

    def _again(self, origin: _Origin) -> _Connection | None:
        """A connection that was used before; None if there is none."""
        idle = self._idle.get(origin)
        since = asyncio.get_running_loop().time() - self._reuse_s
        while idle:
            connection = idle.pop()
            if connection.idle_since >= since and not connection.closing:
                return connection
            connection.abort()
        return None

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        loop = asyncio.get_running_loop()
        since = loop.time() - self._reuse_s
        for origin, idle in list(self._idle.items()):
            kept = [one for one in idle if one.idle_since > since and not one.closing]
            for one in idle:
                if one not in kept:
                    one.abort()
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        self._sweeper = loop.call_later(self._reuse_s, self._sweep) if self._idle else None

    async def _connected(self, origin: _Origin) -> _Connection:
        """A new connection. Raises NotConnectedError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = await self._addresses(origin.host, origin.port)
                sock = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=_STAGGER_S, interleave=1
                )
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tls = self._context() if origin.encrypted else None
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, origin),
                    sock=sock,
                    ssl=tls,
                    server_hostname=origin.host if tls else None,
                )
        except TimeoutError:
            raise NotConnectedError("timed out") from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            reason = "refused" if refused else error.strerror or str(error)
            raise NotConnectedError(reason, refused=refused) from error
        self._open.add(connection)
        return connection

    async def _addresses(self, host: str, port: int) -> list[AddrInfoType]:
        """Where a name leads. Raises OSError."""
        loop = asyncio.get_running_loop()
        until, found = self._resolved.get((host, port), (0.0, []))
        if loop.time() >= until:
            found = _numeric(host, port)
            found = found or [*await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            self._resolved[host, port] = loop.time() + _RESOLVED_S, found
        return found

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, owner: EngineConnections, origin: _Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._parts: list[bytes] = []
        self._header_bytes = 0
        self._whole = self._stays = self._paused = False

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> Answer:
        """Send a request, of which `answer` is told from now on."""
        assert self._transport is not None
        self._answer = answer = Answer(self)
        self._header_bytes, self._whole = 0, False
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return answer

    def pause(self) -> None:
        if not self._paused and not self.closing:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closing:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # From the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody asked
            self.abort()
            return
        wrong = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            wrong = str(error.__context__ or error)
        except httptools.HttpParserUpgrade:
            wrong = "it switched to another protocol"
        except httptools.HttpParserError as error:
            wrong = f"no HTTP: {error}"
        if parts := self._parts:
            # All events that came together are handed on together.
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            answer.arrived(body)
        if self._whole:
            self._answered(self._stays and not wrong)
        elif wrong:
            self._fail(wrong)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)
        if self._answer is None:
            return
        if error is None and self._ends_with_connection:
            self._answered(False)
        else:
            self._fail(str(error or "closed by the engine"))

    # From the parser.

    def on_message_begin(self) -> None:
        if self._whole:
            raise BrokenAnswerError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MOST_HEADER_BYTES:
            raise BrokenAnswerError(f"headers of more than {MOST_HEADER_BYTES:,} bytes")
        assert self._answer is not None
        self._answer.headers.add(
            name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
        )

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._answer.headers.clear()  # the answer proper is yet to come
        else:
            self._answer.begin(status)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        # To be asked here: the parser forgets it.
        self._stays = self._parser.should_keep_alive()
        self._whole = self._parser.get_status_code() >= 200

    @property
    def _ends_with_connection(self) -> bool:
        """Whether the answer has no end but that of the connection."""
        answer = self._answer
        return bool(
            answer is not None
            and answer.status
            and "Content-Length" not in answer.headers
            and "Transfer-Encoding" not in answer.headers
        )

    def _answered(self, again: bool) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        self.resume()
        if again and not self.closing:
            self._owner.released(self)
        else:
            self.abort()
        answer.end()

    def _fail(self, why: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.fail(BrokenAnswerError(why))
        self.abort()


def _numeric(host: str, port: int) -> list[AddrInfoType]:
    """The address that `host` is already; empty if it is a name. Asks nobody."""
    try:
        flags = socket.AI_NUMERICHOST
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
    except socket.gaierror:
        return []


def _head(
    method: str, path: str, host: str, headers: Mapping[str, str], body: bytes | None
) -> bytes:
    """A request up to its body. Raises ValueError: a header would end early."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    text = "\r\n".join(lines)
    ends = len(lines) - 1
    if text.count("\r") != ends or text.count("\n") != ends or "\0" in text:
        raise ValueError("a header has a line break or a NUL in it")
    return f"{text}\r\n\r\n".encode("utf-8", "surrogateescape")
