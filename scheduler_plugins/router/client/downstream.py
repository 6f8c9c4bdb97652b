# SPDX-License-Identifier: Apache-2.0
"""The client's side of one request: what is written to it, and how that ends."""

import asyncio
from collections.abc import Awaitable
from typing import Never

from aiohttp import HttpVersion11, web

from scheduler_plugins.router.client.answers import error_event

NEVER_WAITS_BYTES = 8 << 10
"""With so little unsent, a write returns at once and needs no timer: transports let their users wait above 64 KiB, until 16 KiB are left."""


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


class Downstream:
    """Writes one answer to the client.

    Every method may raise ClientGoneError.
    """

    def __init__(self, request: web.Request, idle_timeout_s: float) -> None:
        """`idle_timeout_s`: longest time in which a client may read nothing."""
        self._request = request
        self._idle_timeout_s = idle_timeout_s
        self._response: web.StreamResponse | None = None
        self._ends = False
        self.ended = False
        """Whether the client has been sent all of an answer."""
        self._chunked = False

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""
        return self._response is not None

    async def begin(self, response: web.StreamResponse) -> None:
        """Send the status and the headers. Later calls do nothing."""
        if self._response is None:
            self._response = response
            # HTTP/1.0 knows no chunks: the connection's end is the body's.
            self._chunked = not isinstance(response, web.Response) and (
                self._request.version >= HttpVersion11
            )
            if self._chunked:
                response.enable_chunked_encoding()
            try:
                await response.prepare(self._request)
            except OSError:
                _gone("the client closed its connection")

    async def write(self, data: bytes) -> None:
        """Send a part of the body."""
        await self._within_limit(self._begun.write(data), len(data))

    def write_now(self, data: bytes) -> bool:
        """Send a part of the body that is not the first, without a task's waiting. Whether it was sent: not if the client reads more slowly
        than this, and `write` has to wait for it."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            _gone("the client closed its connection")
        if transport.get_write_buffer_size() + len(data) >= NEVER_WAITS_BYTES:
            return False
        self.push(data)
        return True

    def push(self, data: bytes) -> None:
        """Send a part of the body that is not the first, however slowly the client reads."""
        transport = self._request.transport
        if transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def finish(self) -> web.StreamResponse:
        """End the body. Returns the response that `begin` was given."""
        self._ends = True
        await self._within_limit(self._begun.write_eof())
        self.ended = True
        return self._begun

    async def interrupt(self, message: str) -> web.StreamResponse:
        """End a stream that cannot go on, by an error event. The connection stays: closing it would take the client's next
        request with it, which may be on its way already. An answer that has ended stays as it is; one that is no stream,
        or was stopped at its end, has no place for an event, so its connection is closed."""
        if self.ended:
            return self._begun
        if self._ends or isinstance(self._begun, web.Response):
            _gone(message)
        await self.write(error_event(message))
        return await self.finish()

    @property
    def _begun(self) -> web.StreamResponse:
        assert self._response is not None, "begin comes first"
        return self._response

    async def _within_limit(self, writing: Awaitable[None], size_bytes: int = 0) -> None:
        transport = self._request.transport
        try:
            if (
                transport is not None
                and transport.get_write_buffer_size() + size_bytes < NEVER_WAITS_BYTES
            ):
                await writing
                return
            async with asyncio.timeout(self._idle_timeout_s):
                await writing
        except TimeoutError:
            _gone(f"the client read nothing for {self._idle_timeout_s:g} s")
        except OSError:
            _gone("the client closed its connection")


def _gone(message: str) -> Never:
    raise ClientGoneError(message) from None
