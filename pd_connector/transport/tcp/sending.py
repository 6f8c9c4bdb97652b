# SPDX-License-Identifier: Apache-2.0
"""From a send slot to the socket."""

import socket
from collections import deque
from typing import NamedTuple

from pd_connector.memory.pieces import Pieces
from pd_connector.transport.tcp.frames import (
    BARE,
    CHUNK,
    DATA,
    PREFIX_BYTES,
    TAG_BYTES,
    ChunkHead,
    prefix,
)
from pd_connector.transport.tcp.sealing import Sealer
from pd_connector.transport.tcp.segments import Segments

BUDGET_BYTES = 4 << 20
"""Sent or received at a time on one connection: the agent has others, and messages to answer."""


class ChunkWrite(NamedTuple):
    """One write. The payload is read until it has been sent. Only its encrypted form is ever
    copied."""

    head: ChunkHead
    payload: memoryview


class SealedWrite(NamedTuple):
    """One write whose records are sealed already. They must be sent in this order, and all of them: each
    has its number."""

    head: ChunkHead
    frames: list[memoryview]


class Sending:
    """The sending half of a connection.

    It holds only one sealed segment, while a chunk is sealed as it is sent. Waiting chunks stay
    where they are.

    Args:
        sealer: seals every record; None where they have no tags.
        record_bytes: the largest sealed body that the peer opens.
    """

    def __init__(
        self, sock: socket.socket, sealer: Sealer | None, segments: Segments, record_bytes: int
    ) -> None:
        self._sock = sock
        self._sealer = sealer
        self._segments = segments
        self._record_bytes = record_bytes
        self._records: deque[tuple[int, bytes]] = deque()
        self._chunks: deque[ChunkWrite | SealedWrite] = deque()
        self._rest: memoryview | None = None  # of the chunk under way, not sealed yet
        self._frames: list[memoryview] = []  # ready for the socket
        self._segment = memoryview(b"")
        self._begun: int | None = None  # the token of the chunk that is being sent

    @property
    def busy(self) -> bool:
        """Whether there is something to send."""
        return bool(self._frames or self._records or self._chunks or self._rest is not None)

    @property
    def can_seal(self) -> bool:
        """Whether a chunk can be sealed now: all waiting records are sealed already, so this
        chunk's records get the next numbers."""
        if self._sealer is None or not self._sealer.in_parts:
            return False
        waits = self._records or self._rest is not None
        return not waits and all(isinstance(chunk, SealedWrite) for chunk in self._chunks)

    def say(self, kind: int, body: bytes = b"") -> None:
        """Queue a small record, before all chunks that have not begun, except for sealed chunks."""
        self._records.append((kind, body))

    def queue(self, chunk: ChunkWrite | SealedWrite) -> None:
        self._chunks.append(chunk)

    def seal(self, head: ChunkHead, pieces: Pieces, into: memoryview) -> SealedWrite:
        """Seal a chunk that lies in pieces, to be queued next; call it only if `can_seal`.

        Args:
            into: memory for its sealed bytes, unchanged until they have been sent.
        """
        assert self._sealer is not None
        frames: list[memoryview] = []
        before = self._record(CHUNK, head.encode())
        for start in range(0, head.nbytes, self._record_bytes):
            stop = min(start + self._record_bytes, head.nbytes)
            mark = prefix(DATA, stop - start)
            body = into[start:stop]
            tag = self._sealer.seal_parts(mark, pieces.buffers(start, stop), body)
            frames += [memoryview(before + mark), body]
            before = tag
        return SealedWrite(head, [*frames, memoryview(before)])

    def withdraw(self, token: int) -> bool:
        """Forget a chunk that has neither begun nor been sealed; returns whether there was such a
        chunk."""
        for chunk in self._chunks:
            if chunk.head.token == token and isinstance(chunk, ChunkWrite):
                self._chunks.remove(chunk)
                return True
        return False

    def sent(self, token: int) -> bool:
        """Whether nothing of this chunk is to be sent any more."""
        waits = any(chunk.head.token == token for chunk in self._chunks)
        return not waits and (token != self._begun or not (self._frames or self._rest))

    def pump(self) -> int:
        """Send as much as the socket takes, within the budget; returns the number of bytes. Raises
        OSError."""
        pumped = 0
        while pumped < BUDGET_BYTES and (self._frames or self._fill()):
            try:
                sent = self._sock.sendmsg(self._frames)
            except (BlockingIOError, InterruptedError):
                break
            pumped += sent
            self._drop(sent)
        return pumped

    def _fill(self) -> bool:
        """Prepare the next frames; returns whether there are any."""
        if self._rest is None:
            self._give_back_segment()
            is_sealed = bool(self._chunks) and isinstance(self._chunks[0], SealedWrite)
            if self._records and not is_sealed:
                self._frames = [memoryview(self._record(*self._records.popleft()))]
                return True
            if not self._chunks:
                return False
            chunk = self._chunks.popleft()
            self._begun = chunk.head.token
            if isinstance(chunk, SealedWrite):
                self._frames = chunk.frames
                return True
            self._frames = [memoryview(self._record(CHUNK, chunk.head.encode()))]
            self._rest = chunk.payload.cast("B")
        if self._rest:
            self._frames += self._data(self._rest)
        else:
            self._rest = None
        return True

    def _data(self, rest: memoryview) -> list[memoryview]:
        """The next part of the payload as a record; the whole payload if it can pass unsealed."""
        if self._sealer is None or self._sealer.in_clear:
            self._rest = None
            return [memoryview(prefix(BARE if self._sealer else DATA, len(rest))), rest]
        if not self._segment:
            self._segment = self._segments.take()
        part, self._rest = rest[: self._record_bytes], rest[self._record_bytes :] or None
        head = prefix(DATA, len(part))
        self._segment[:PREFIX_BYTES] = head
        stop = PREFIX_BYTES + len(part) + TAG_BYTES
        self._sealer.seal(head, part, self._segment[PREFIX_BYTES:stop])
        return [self._segment[:stop]]

    def _give_back_segment(self) -> None:
        if self._segment:
            self._segments.give_back(self._segment)
            self._segment = memoryview(b"")

    def _record(self, kind: int, body: bytes) -> bytes:
        if self._sealer is None:
            return prefix(kind, len(body)) + body
        return self._sealer.record(kind, body)

    def _drop(self, nbytes: int) -> None:
        """This many bytes of the frames have been sent."""
        while self._frames and nbytes >= len(self._frames[0]):
            nbytes -= len(self._frames.pop(0))
        if nbytes:
            self._frames[0] = self._frames[0][nbytes:]
