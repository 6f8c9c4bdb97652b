# SPDX-License-Identifier: Apache-2.0
"""Both ends of a stream that the router passes on, in the test's hand: an engine's answer, and the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from aiohttp import web


class AnswerInPieces:
    """An engine's answer (`Exchange`) that comes in these pieces."""

    def __init__(self, pieces: Iterable[bytes], error: BaseException | None = None) -> None:
        """`error`: the engine is given up with it just after its last piece was taken, before the waiting task has
        been woken. None: the answer ends."""
        self.status, self.headers, self.engine = 200, {"Content-Type": "text/event-stream"}, None
        self._pieces = deque(pieces)
        self._error = error

    def complete(self) -> None:
        self._error = None

    async def read(self) -> bytes:
        if not self._pieces and self._error is not None:
            raise self._error
        return self._pieces.popleft() if self._pieces else b""

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        while self._pieces:
            wants_more = take(self._pieces.popleft())
            if not self._pieces and self._error is not None:
                break
            if not wants_more:
                return False
        if self._error is not None:
            raise self._error
        return True


class Client:
    """A client (`Downstream`) that keeps up with its first write or not, with the second, and so on in turn."""

    def __init__(self, keeps_up: Sequence[bool]) -> None:
        self.begun, self.sent = False, b""
        self._keeps_up, self._writes = keeps_up, 0

    async def begin(self, response: web.StreamResponse) -> None:
        self.begun = True

    async def write(self, data: bytes) -> None:
        self.sent += data

    def write_now(self, data: bytes) -> bool:
        self._writes += 1
        if keeps_up := self._keeps_up[self._writes % len(self._keeps_up)]:
            self.sent += data
        return keeps_up

    def push(self, data: bytes) -> None:
        self.sent += data

    async def finish(self) -> None:
        pass


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """The data in pieces of these sizes, in turn."""
    begin, number = 0, 0
    while begin < len(data):
        end = begin + sizes[number % len(sizes)]
        yield data[begin:end]
        begin, number = end, number + 1


async def nobody(engine: object) -> bool:
    """No operator wanted the engine to abort (`aborts`)."""
    return False
