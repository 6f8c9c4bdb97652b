# SPDX-License-Identifier: Apache-2.0
"""One connection to an engine: HTTP/1.1 with httptools, which passes bytes on in the callback that received them.

aiohttp's client wakes a task for each piece of an answer, and takes 0.1 ms for a request. The router uses aiohttp
only to watch engines, because those requests are rare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import httptools

from scheduler_plugins.router.engines.answer import Answer, BrokenAnswerError

MOST_HEADER_BYTES = 64 << 10
"""Most bytes of an answer's headers."""
_JOINED_BYTES = 64 << 10
"""Longest body that is copied into one piece with its headers. Longer bodies are written in pieces of this length, as
the engine takes them: a transport copies what it cannot send at once."""
_TURN_BYTES = 1 << 20
"""Bytes that are written before others have a turn."""

Parts = Sequence[bytes | memoryview]
"""A body. Its bytes are not copied."""


class Origin(NamedTuple):
    """Host, port and scheme: a connection serves one origin."""

    host: str
    port: int
    encrypted: bool


class Owner(Protocol):
    """The owner of connections. It hears when a connection is free or lost."""

    def released(self, connection: Connection) -> None:
        """An answer is complete, and its connection can be used again."""

    def lost(self, connection: Connection) -> None:
        """The connection is closed."""


class Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, owner: Owner, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._parts: list[bytes] = []
        self._header_bytes = 0
        self._whole = self._stays = self._paused = False
        self._unsent: Iterator[bytes | memoryview] | None = None
        self._full = False  # the engine does not take what was written

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, head: bytes, body: Parts) -> Answer:
        """Send a request. Returns its answer, which fills as bytes come."""
        assert self._transport is not None
        self._answer = answer = Answer(self)
        self._header_bytes, self._whole = 0, False
        if sum(map(len, body)) <= _JOINED_BYTES:
            self._transport.write(b"".join((head, *body)))
        else:
            self._transport.write(head)
            self._unsent = _pieces(body)
            self._write()
        return answer

    def _write(self) -> None:
        """Write on, until the engine does not take more, or others have a turn."""
        written = 0
        while self._unsent is not None and self._takes():
            assert self._transport is not None
            piece = next(self._unsent, None)
            if piece is None:
                self._unsent = None
                return
            self._transport.write(piece)
            written += len(piece)
            if written >= _TURN_BYTES:
                asyncio.get_running_loop().call_soon(self._write)
                return

    def _takes(self) -> bool:
        return not (self._full or self.closing)

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

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._write()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # no request is open
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
            # Pieces that came in one read are passed on as one.
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            answer.arrived(body)
        if self._whole:
            self._answered(self._stays and not wrong)
        elif wrong:
            self._fail(wrong)

    def connection_lost(self, error: Exception | None) -> None:
        self._unsent = None
        self._owner.lost(self)
        if self._answer is None:
            return
        if error is None and self._ends_with_connection:
            self._answered(False)
        else:
            self._fail(str(error or "closed by the engine"))

    # Called by the parser.

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
            self._answer.headers.clear()  # an interim answer (1xx); the final answer follows
        else:
            self._answer.begin(status)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        # Ask now: the parser forgets it after this callback.
        self._stays = self._parser.should_keep_alive()
        self._whole = self._parser.get_status_code() >= 200

    @property
    def _ends_with_connection(self) -> bool:
        """Whether only the end of the connection ends the answer."""
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
        if again and not self.closing and self._unsent is None:
            self._owner.released(self)
        else:
            self.abort()
        answer.end()

    def _fail(self, why: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.fail(BrokenAnswerError(why))
        self.abort()


def _pieces(body: Parts) -> Iterator[bytes | memoryview]:
    for part in body:
        view = memoryview(part)
        for place in range(0, len(view), _JOINED_BYTES):
            yield view[place : place + _JOINED_BYTES]
