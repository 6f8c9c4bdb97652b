# SPDX-License-Identifier: Apache-2.0
"""The connection between the keeper and one worker: a socket pair. Each message follows its length."""

from __future__ import annotations

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

from scheduler_plugins.router.workers.messages import FromKeeper, FromWorker

_LENGTH_BYTES = 4
_MOST_UNSENT_BYTES = 64 << 20
TOGETHER_S = 0.02
"""Longest time that a message of `send_soon` waits for further messages."""

Received = TypeVar("Received", bound=FromKeeper | FromWorker)
_ENCODER = msgspec.msgpack.Encoder()


class LinkClosedError(Exception):
    """The process at the other end has ended."""


class Link(Generic[Received]):
    """One end of the connection. `send` never waits."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Received],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._later: list[bytes] = []

    def send(self, message: FromKeeper | FromWorker) -> None:
        """Send a message. If the other process has ended, the message is lost. If that process does not read, it is
        disconnected."""
        self.send_encoded(_ENCODER.encode(message))

    def send_encoded(self, content: bytes) -> None:
        """As `send`, for an encoded message that goes to several workers."""
        self._write(_framed(content))

    def send_soon(self, message: FromKeeper | FromWorker) -> None:
        """As `send`, but together with all messages of the next `TOGETHER_S`, so the other side wakes up less often.
        A later `send` may overtake the message."""
        if not self._later:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._send_later)
        self._later.append(_framed(_ENCODER.encode(message)))

    def _send_later(self) -> None:
        together, self._later = b"".join(self._later), []
        self._write(together)

    def _write(self, framed: bytes) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(framed)
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self._writer.transport.abort()

    async def receive(self) -> Received:
        """The next message. Raises LinkClosedError."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise LinkClosedError from None

    def close(self) -> None:
        self._writer.close()


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def encode(message: FromKeeper) -> bytes:
    """The message in the form that `Link.send_encoded` takes."""
    return _ENCODER.encode(message)


async def link_to_worker(end: socket.socket) -> Link[FromWorker]:
    """The keeper's end of a socket pair."""
    decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
    return Link(*await asyncio.open_unix_connection(sock=end), decoder)


async def link_to_keeper(end: socket.socket) -> Link[FromKeeper]:
    """The worker's end of a socket pair."""
    decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)
    return Link(*await asyncio.open_unix_connection(sock=end), decoder)
