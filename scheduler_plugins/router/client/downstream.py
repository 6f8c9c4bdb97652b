# SPDX-License-Identifier: Apache-2.0
"""The client's side of one request: writes the answer, and ends it."""

import asyncio
from collections.abc import Awaitable
from typing import Never

from aiohttp import HttpVersion11, web

from scheduler_plugins.router.client.answers import error_event

NEVER_WAITS_BYTES = 8 << 10
"""If at most this much is unsent, a write returns at once and needs no timer. Transports make writers wait only above
64 KiB, until 16 KiB are left."""


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


class Downstream:
    """Writes one answer to the client.

    Every method can raise ClientGoneError.
    """

    def __init__(self, request: web.Request, idle_timeout_s: float) -> None:
        """`idle_timeout_s`: longest time without a read by the client."""
        self._request = request
        self._idle_timeout_s = idle_timeout_s
        self._response: web.StreamResponse | None = None
        self._ends = False
        self.ended = False
        """Whether all of an answer has been sent."""
        self._chunked = False

    @property
    def begun(self) -> bool:
        """Whether anything has been sent."""
        return self._response is not None

    async def begin(self, response: web.StreamResponse) -> None:
        """Send the status and the headers. Later calls do nothing."""
        if self._response is None:
            self._response = response
            # HTTP/1.0 has no chunks: the end of the connection ends the body, even if the client (or HAProxy before it)
            # wants to keep the connection.
            if not isinstance(response, web.Response):
                self._chunked = self._request.version >= HttpVersion11
                if self._chunked:
                    response.enable_chunked_encoding()
                else:
                    response.force_close()
            try:
                await response.prepare(self._request)
            except OSError:
                _gone("the client closed its connection")

    async def write(self, data: bytes) -> None:
        """Send a part of the body."""
        await self._within_limit(self._begun.write(data), len(data))

    def write_now(self, data: bytes) -> bool:
        """Send a further part of the body without waiting. Returns False, and sends nothing, if the client reads too
        slowly; then call `write`."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            _gone("the client closed its connection")
        if transport.get_write_buffer_size() + len(data) >= NEVER_WAITS_BYTES:
            return False
        self.push(data)
        return True

    def push(self, data: bytes) -> None:
        """Send a further part of the body, however slowly the client reads."""
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
        """End a stream that cannot go on, with an error event. The connection stays open, because the client's next
        request may already be on its way. A completed answer stays as it is. An answer that is not a stream, or was
        stopped at its end, has no place for an event, so its connection is closed."""
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
