# SPDX-License-Identifier: Apache-2.0
"""Limits on clients: connections, and the memory of request bodies."""

import asyncio
import logging
import select
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

from aiohttp import web

from scheduler_plugins.router.loop import is_behind
from scheduler_plugins.router.prompt.body import BadRequestError, parsing
from scheduler_plugins.router.prompt.pieces import PIECE_BYTES

logger = logging.getLogger(__name__)

HEADERS_S = 10.0
"""Longest wait for the headers of a new connection's first request. They are a few packets; only a client that wants to
hold connections needs longer."""
UNCOUNTED_BYTES = 64 << 10
"""The first bytes of each body are not counted, so small requests pass while large ones fill the budget. The limit on
connections bounds these bytes."""
_MOST_LOOKS = 64
"""At most this many idle connections are checked to find a connection that can be closed."""
_ENCODINGS = ("gzip", "deflate")
_ANY_HEADER = 32 + zlib.MAX_WBITS
"""zlib's code for a gzip header or a zlib header."""
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)
_SAID = b'{"error": {"message": "too many connections", "type": "service_unavailable", "param": null, "code": 503}}'


class ConnectionLimit:
    """A protocol factory for `loop.create_server` that closes idle connections.

    A connection is *idle* until its request has arrived completely, and again after the answer. If the headers of the
    first request do not come within `HEADERS_S`, the connection is closed. If there are `limit` connections
    and another comes, the connection that has been idle longest is closed. After a standstill of the router it is
    the first of them in which no request may wait. If there is none, the new connection is answered with 503.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._open: dict[asyncio.BaseProtocol, _Connection] = {}
        self._idle: dict[asyncio.BaseProtocol, _Connection] = {}  # longest idle first

    def __len__(self) -> int:
        return len(self._open)

    def wrap(self, make: Callable[[], asyncio.Protocol]) -> "ConnectionLimit":
        """Use aiohttp's protocols, which `make` creates. Returns itself."""
        self._make = make
        return self

    def __call__(self) -> asyncio.Protocol:
        """A protocol for a new connection."""
        assert self._make is not None, "wrap was not called"
        return _Connection(self, self._make())

    def headers_arrived(self, request: web.BaseRequest) -> None:
        """The headers of a request have arrived: stop the header timeout."""
        if connection := self._open.get(request.protocol):
            connection.stop_timer()

    @contextmanager
    def serving(self, request: web.BaseRequest) -> Iterator[None]:
        """The request has arrived completely: its connection is not idle inside this block."""
        connection = self._idle.pop(request.protocol, None)
        try:
            yield
        finally:
            if connection is not None and request.protocol in self._open:
                self._idle[request.protocol] = connection
                connection.heard = False

    def _opened(self, connection: "_Connection") -> bool:
        """Whether a new connection may stay."""
        if len(self._open) >= self.limit:
            behind, longest = is_behind(), islice(self._idle.items(), _MOST_LOOKS)
            oldest = next(
                (key for key, candidate in longest if not (behind and candidate.may_ask())), None
            )
            if oldest is None:
                return False
            logger.debug(
                "%d connections are open: the connection that has been idle longest is closed",
                len(self._open),
            )
            self._idle.pop(oldest).abort()
            self._open.pop(oldest, None)
        self._open[connection.inner] = self._idle[connection.inner] = connection
        return True

    def _lost(self, connection: "_Connection") -> None:
        self._open.pop(connection.inner, None)
        self._idle.pop(connection.inner, None)


class _Connection(asyncio.Protocol):
    """Passes every call on to aiohttp's protocol of the same connection."""

    def __init__(self, limit: ConnectionLimit, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self._limit = limit
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._admitted = False
        self.heard = False
        """Whether bytes have come since the last request was served."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._admitted = self._limit._opened(self)
        if not self._admitted:
            self._transport.write(_BUSY % (len(_SAID), _SAID))
            self._transport.close()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HEADERS_S, self.abort)
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            self.heard = True
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._admitted else None

    def pause_writing(self) -> None:
        if self._admitted:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self._admitted:
            self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.stop_timer()
        self._limit._lost(self)
        if self._admitted:
            self.inner.connection_lost(error)

    def abort(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def may_ask(self) -> bool:
        """Whether a request may be there that is not being served yet: some bytes have come, or wait unread."""
        if self.heard:
            return True
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
        return any(events == select.POLLIN for _, events in poll.poll(0))

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BodyTooLargeError(Exception):
    """A body exceeds the limit for one body. The message names the limit."""


class NoRoomError(Exception):
    """All bodies together have reached their limit."""


class BodyBudget:
    """Counts the memory of all request bodies that the router holds.

    A body is held until its request has ended, because a retry may send it to another engine.
    """

    def __init__(self, most_bytes: int, most_bytes_each: int) -> None:
        self.held_bytes = 0
        self._most_bytes = most_bytes
        self._most_bytes_each = most_bytes_each

    @contextmanager
    def reserve(self) -> Iterator["Reservation"]:
        """Room for one body, released at the end of the block."""
        reservation = Reservation(self, self._most_bytes_each)
        try:
            yield reservation
        finally:
            self.held_bytes -= reservation.counted_bytes

    def take(self, size_bytes: int, own_bytes: int) -> None:
        """Reserve `size_bytes` more for a body that has `own_bytes`.

        Raises:
            NoRoomError: there is no room now.
            BodyTooLargeError: there is no room even for this body alone.
        """
        if own_bytes + size_bytes > self._most_bytes:
            raise BodyTooLargeError(
                f"the parsed request body takes more than {self._most_bytes >> 20} MiB (router option --bodies-mib)"
            )
        if self.held_bytes + size_bytes > self._most_bytes:
            raise NoRoomError
        self.held_bytes += size_bytes


class Reservation:
    """One body's part of the budget: its text, and its size in memory once parsed."""

    def __init__(self, budget: BodyBudget, most_bytes: int) -> None:
        self.counted_bytes = 0
        self._budget = budget
        self._most_bytes = most_bytes
        self._uncounted_bytes = UNCOUNTED_BYTES

    async def body(self, request: web.BaseRequest) -> dict[str, Any]:
        """The body of a request, parsed piece by piece, so other requests are served meanwhile.

        Raises:
            BodyTooLargeError, NoRoomError: the body exceeds a limit; its rest was not read.
            BadRequestError: the body cannot be served.
        """
        steps = parsing(await self._read(request), request.path)
        while True:
            try:
                self._count(next(steps))
            except StopIteration as ended:
                body: dict[str, Any] = ended.value
                return body
            await asyncio.sleep(0)

    async def _read(self, request: web.BaseRequest) -> bytearray:
        limit = f"{self._most_bytes >> 20} MiB (router option --body-mib)"
        too_large = BodyTooLargeError(f"the request body is larger than {limit}")
        if (request.content_length or 0) > self._most_bytes:
            raise too_large
        body = bytearray()  # grows in place: to join parts in the end would hold the loop
        async for part in _plain(request):
            if len(body) + len(part) > self._most_bytes:
                raise too_large
            self._count(len(part))
            body += part
        return body

    def _count(self, size_bytes: int) -> None:
        uncounted = min(size_bytes, self._uncounted_bytes)
        self._uncounted_bytes -= uncounted
        self._budget.take(size_bytes - uncounted, self.counted_bytes)
        self.counted_bytes += size_bytes - uncounted


async def _plain(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """The body as it comes, decoded from its `Content-Encoding`. If there is an encoding, no piece exceeds
    `PIECE_BYTES`."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in (*_ENCODINGS, "identity", ""):
        encodings = ", ".join(_ENCODINGS)
        raise BadRequestError(f"Content-Encoding {encoding[:40]}: must be {encodings} or none")
    inflater = zlib.decompressobj(_ANY_HEADER) if encoding in _ENCODINGS else None
    while part := await request.content.readany():
        if inflater is None:
            yield part
            continue
        while part:
            try:
                if inflater.eof:  # a further gzip member follows
                    inflater = zlib.decompressobj(_ANY_HEADER)
                yield inflater.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                raise BadRequestError(f"the request body is not {encoding}: {error}") from None
            part = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            await asyncio.sleep(0)
    if inflater is not None and not inflater.eof:
        raise BadRequestError(f"the request body is cut: its {encoding} does not end")
