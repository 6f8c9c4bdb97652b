# SPDX-License-Identifier: Apache-2.0
"""The connection between the keeper and one worker: a socket pair, messages with their length before them."""

from __future__ import annotations

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

from scheduler_plugins.router.workers.messages import FromKeeper, FromWorker

_LENGTH_BYTES = 4
_MOST_UNSENT_BYTES = 64 << 20
TOGETHER_S = 0.02
"""Longest time that a message of `send_soon` waits for others."""

Received = TypeVar("Received", bound=FromKeeper | FromWorker)
_ENCODER = msgspec.msgpack.Encoder()


class LinkClosedError(Exception):
    """The other side has ended."""


class Link(Generic[Received]):
    """One end. `send` never waits."""

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
        """Send a message; one to somebody who has ended is lost, and one who reads nothing is hung up on."""
        self.send_encoded(_ENCODER.encode(message))

    def send_encoded(self, content: bytes) -> None:
        """The same for a message that is sent to several."""
        self._write(_framed(content))

    def send_soon(self, message: FromKeeper | FromWorker) -> None:
        """As `send`, but together with all that come within `TOGETHER_S`, and maybe after what is sent later: so the other
        side need not wake up for each."""
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
    """As `Link.send_encoded` takes it."""
    return _ENCODER.encode(message)


async def link_to_worker(end: socket.socket) -> Link[FromWorker]:
    """The keeper's end of a socket pair."""
    decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
    return Link(*await asyncio.open_unix_connection(sock=end), decoder)


async def link_to_keeper(end: socket.socket) -> Link[FromKeeper]:
    """A worker's end of it."""
    decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)
    return Link(*await asyncio.open_unix_connection(sock=end), decoder)
