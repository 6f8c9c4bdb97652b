# SPDX-License-Identifier: Apache-2.0
"""The port at which other routers hear this one, with a limit of connections. ZeroMQ has none: strangers' half-open
connections would take all descriptors of the router."""

from __future__ import annotations

import asyncio
import secrets
from typing import cast
from urllib.parse import urlsplit

MOST_CONNECTIONS = 512
"""Twice `MOST_FELLOWS`: a router that comes again may still have its old connection."""
HANDSHAKE_BYTES = 1024
"""ZeroMQ sends fewer bytes before a connection is made (greeting, and the handshake of CURVE)."""


class ExchangePort:
    """Passes connections on to ZeroMQ's own socket at `inner`, byte for byte.

    If there are `MOST_CONNECTIONS` and another one comes, the oldest one that has not been sent a message is closed. If
    all have been, the new one is.
    """

    def __init__(self) -> None:
        self._name = f"pd-router-{secrets.token_hex(16)}"
        self._server: asyncio.Server | None = None
        self._open: dict[_End, asyncio.Task[None]] = {}  # oldest first; the ends of other routers

    @property
    def inner(self) -> str:
        """The endpoint that ZeroMQ binds: a name without a file."""
        return f"ipc://@{self._name}"

    def __len__(self) -> int:
        return len(self._open)

    async def listen(self, address: str) -> None:
        """Listen at `tcp://host:port`. Raises OSError."""
        parts = urlsplit(address)
        host = None if parts.hostname == "*" else parts.hostname
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self), host, parts.port or 0)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for end in list(self._open):
            end.abort()

    def opened(self, end: _End) -> None:
        """A connection of another router, or of a stranger, has come."""
        if len(self._open) >= MOST_CONNECTIONS:
            oldest = next((one for one in self._open if one.sent_bytes <= HANDSHAKE_BYTES), end)
            oldest.abort()
            self._open.pop(oldest, None)
            if oldest is end:
                return
        self._open[end] = asyncio.create_task(self._connect(end), name="another router")

    def lost(self, end: _End) -> None:
        """A connection has ended."""
        if (task := self._open.pop(end, None)) is not None:
            task.cancel()

    async def _connect(self, end: _End) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(
                lambda: _End(self, end), f"\0{self._name}"
            )
        except OSError:
            end.abort()


class _End(asyncio.Protocol):
    """One end of a connection: another router's, or with `outer` ZeroMQ's."""

    def __init__(self, port: ExchangePort, outer: _End | None = None) -> None:
        self.sent_bytes = 0
        """Bytes that have been written here."""
        self._port, self._other = port, outer
        self._is_inner = outer is not None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        if self._other is None:
            self._transport.pause_reading()  # until ZeroMQ's end is there
            self._port.opened(self)
        else:
            self._other.meet(self)

    def meet(self, inner: _End) -> None:
        """ZeroMQ's end is there."""
        self._other = inner
        if self._transport is None or self._transport.is_closing():
            inner.abort()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)

    def write(self, data: bytes) -> None:
        """Send what has come at the other end."""
        if self._transport is not None and not self._transport.is_closing():
            self.sent_bytes += len(data)
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._read(False)

    def resume_writing(self) -> None:
        self._read(True)

    def _read(self, goes_on: bool) -> None:
        """Have the other end read on, or not."""
        transport = self._other._transport if self._other is not None else None
        if transport is not None and not transport.is_closing():
            (transport.resume_reading if goes_on else transport.pause_reading)()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_inner:
            self._port.lost(self)
        if self._other is not None:
            self._other.abort()

    def abort(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()
