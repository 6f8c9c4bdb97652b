# SPDX-License-Identifier: Apache-2.0
"""A streamed answer of an engine: read piece by piece, or passed to a callback without waking a task for each
piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from multidict import CIMultiDict

HELD_BYTES = 256 << 10
"""Most bytes kept for a reader that is slower than the engine. Beyond them the system's socket buffers fill."""

MOST_ANSWER_BYTES = 512 << 20
"""Most bytes of an answer that is held until it is whole. A thousand embeddings take about 100 MiB; an answer without an
end would take all memory."""


class BrokenAnswerError(ConnectionError):
    """The connection broke before the answer was complete, or the bytes are not HTTP."""


class Flow(Protocol):
    """The part of a connection that an answer uses."""

    def pause(self) -> None:
        """Stop reading from the engine for now."""

    def resume(self) -> None:
        """Read again. Does nothing if the connection is not paused."""

    def abort(self) -> None:
        """Close the connection now."""


class Answer:
    """Used on one event loop, by one reader. The connection calls `begin`, `arrived`, `end` and `fail`."""

    def __init__(self, flow: Flow) -> None:
        self.status = 0
        self.headers = CIMultiDict[str]()
        self._flow = flow
        self._begun = self._ended = False
        self._error: BaseException | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def begun(self) -> None:
        """Wait for status and headers. Raises BrokenAnswerError."""
        while not self._begun:
            await self._change()

    async def read(self) -> bytes:
        """The next bytes as they came, empty at the end. Raises BrokenAnswerError."""
        while not self._held:
            if self._ended:
                return b""
            await self._change()
        return self._unheld()

    async def read_all(self) -> bytes:
        """The whole body. Raises BrokenAnswerError, also if the body has more than `MOST_ANSWER_BYTES`."""
        parts, size_bytes = [], 0
        while part := await self.read():
            parts.append(part)
            if (size_bytes := size_bytes + len(part)) > MOST_ANSWER_BYTES:
                raise BrokenAnswerError(f"the answer has more than {MOST_ANSWER_BYTES} bytes")
        return b"".join(parts)

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with all bytes as they come, in the receiving callback, until it returns False. Returns whether
        the answer has ended.

        False from `take` means that it has taken its bytes but can take no more. Then call `pass_to` again, or
        `read`. An exception of `take` ends the answer and is raised here.

        Raises:
            BrokenAnswerError.
        """
        if self._held and not take(self._unheld()):
            return False
        self._take = take
        try:
            while self._handed_on:
                if self._ended and self._error is None:
                    return True
                await self._change()
            return False
        finally:
            self._take = None

    def close(self) -> None:
        """Stop reading for good. If the answer is incomplete, its connection is closed, so the engine aborts the
        request."""
        self._take = None
        if not self._ended:
            self._flow.abort()

    def begin(self, status: int) -> None:
        """The headers have come; they are in `headers`."""
        self.status, self._begun = status, True
        self._wake()

    def arrived(self, data: bytes) -> None:
        """A part of the body."""
        if self._error is not None:
            return
        if self._take is None:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > HELD_BYTES:
                self._flow.pause()
            self._wake()
            return
        try:
            if not self._take(data):
                self._take = None
                self._wake()
        except Exception as error:  # `_fail` keeps the reader's error; the reader raises it
            self.fail(error)

    def end(self) -> None:
        """The answer is complete."""
        self._ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The answer broke off. The bytes that came before can still be read."""
        if not self._ended and self._error is None:
            self._error = error
            self._wake()

    @property
    def _handed_on(self) -> bool:
        """Whether bytes go to the callback of `pass_to`; False once the callback has refused."""
        return self._take is not None

    def _unheld(self) -> bytes:
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        if not self._ended:  # else the connection may already serve another answer
            self._flow.resume()
        return data

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
