# SPDX-License-Identifier: Apache-2.0
"""Requests to engines over connections that are used again."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohappyeyeballs

from scheduler_plugins.router.engines.answer import Answer
from scheduler_plugins.router.engines.connection import Connection, Origin, Parts
from scheduler_plugins.router.engines.lookup import Names

_STAGGER_S = 0.25
"""If an address has not answered after this time, the next address is tried as well (RFC 8305)."""


class NotConnectedError(ConnectionError):
    """No connection could be made: the engine has not seen the request."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused
        """Whether the machine refused the connection: no process listens on the port."""


class EngineConnections:
    """Sends requests to engines. A connection can be used again if it has been idle for at most `reuse_s`."""

    def __init__(
        self, connect_timeout_s: float, reuse_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """Open no connection yet.

        Args:
            tls: trusted certificates for `https` URLs; None: the system's.
        """
        self.connect_timeout_s = connect_timeout_s
        self._reuse_s = reuse_s
        self._tls = tls
        self._idle: dict[Origin, list[Connection]] = {}  # idle longest first
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._names = Names()

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Parts | None
    ) -> Answer:
        """Send a request. Returns its answer once status and headers have come. The caller must close the answer, and
        must not change the parts of the body before.

        Raises:
            NotConnectedError: no connection within `connect_timeout_s`; nothing was sent.
            BrokenAnswerError: the connection broke, or the bytes are not HTTP.
            ValueError: a header cannot be sent.
        """
        parts = urlsplit(url)
        encrypted = parts.scheme == "https"
        assert parts.hostname is not None
        origin = Origin(parts.hostname, parts.port or (443 if encrypted else 80), encrypted)
        head = _head(method, parts.path or "/", parts.netloc, headers, body)
        connection = self._again(origin) or await self._connected(origin)
        answer = connection.send(head, body or ())
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
        await self._names.close()
        await asyncio.sleep(0)  # their transports close their sockets

    def released(self, connection: Connection) -> None:
        """An answer is complete, and its connection can be used again."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._reuse_s, self._sweep)

    def lost(self, connection: Connection) -> None:
        """A connection is closed."""
        self._open.discard(connection)

    def _again(self, origin: Origin) -> Connection | None:
        """An idle connection; None if there is none."""
        idle = self._idle.get(origin)
        since = asyncio.get_running_loop().time() - self._reuse_s
        while idle:
            connection = idle.pop()
            if connection.idle_since >= since and not connection.closing:
                return connection
            connection.abort()
        return None

    def _sweep(self) -> None:
        """Close connections that have been idle for too long."""
        loop = asyncio.get_running_loop()
        since = loop.time() - self._reuse_s
        for origin, idle in list(self._idle.items()):
            kept = [
                connection
                for connection in idle
                if connection.idle_since > since and not connection.closing
            ]
            for connection in idle:
                if connection not in kept:
                    connection.abort()
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        self._sweeper = loop.call_later(self._reuse_s, self._sweep) if self._idle else None

    async def _connected(self, origin: Origin) -> Connection:
        """A new connection. Raises NotConnectedError."""
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                addresses = await self._names.addresses(origin.host, origin.port)
                sock = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=_STAGGER_S, interleave=1
                )
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tls = self._context() if origin.encrypted else None
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self, origin),
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

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _head(
    method: str, path: str, host: str, headers: Mapping[str, str], body: Parts | None
) -> bytes:
    """The request line and headers. Raises ValueError if a header has a line break or a NUL in it."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {sum(map(len, body))}")
    text = "\r\n".join(lines)
    ends = len(lines) - 1
    if text.count("\r") != ends or text.count("\n") != ends or "\0" in text:
        raise ValueError("a header has a line break or a NUL in it")
    return f"{text}\r\n\r\n".encode("utf-8", "surrogateescape")
