# SPDX-License-Identifier: Apache-2.0
"""From the socket into landing memory."""

import socket
from typing import NamedTuple

from pd_connector.transport.tcp.cipher import Opener
from pd_connector.transport.tcp.frames import (
    ACK,
    CHUNK,
    DATA,
    GREET,
    MAX_CHUNK_BYTES,
    PING,
    PREFIX_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    ChunkHead,
    FrameError,
    read_chunk,
    read_prefix,
    read_token,
)
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.sending import BUDGET_BYTES

_SMALL_BYTES = 16
"""The largest body that a dialler sends."""


class Greeted(NamedTuple):
    """The peer expects to be written to."""


class Acked(NamedTuple):
    """The chunk with this token has landed at the peer."""

    token: int


class Arrived(NamedTuple):
    """A chunk has landed here."""

    head: ChunkHead
    payload: memoryview


Event = Greeted | Acked | Arrived


class Receiving:
    """The receiving half of a connection.

    Args:
        opener: opens every record; None for plaintext.
        landing: where chunks land; None where none are taken.
    """

    def __init__(self, sock: socket.socket, opener: Opener | None, landing: Landing | None) -> None:
        self._sock = sock
        self._opener = opener
        self._landing = landing
        self._tag_bytes = TAG_BYTES if opener else 0
        self._kinds = frozenset((PING, CHUNK) if landing else (PING, GREET, ACK))
        largest = _SMALL_BYTES
        if landing:
            largest = max(MAX_CHUNK_BYTES, SEGMENT_BYTES) if opener else MAX_CHUNK_BYTES
        # One record, and the prefix of the next.
        self._buffer = memoryview(bytearray(2 * PREFIX_BYTES + largest + self._tag_bytes))
        self._have = 0
        self._record: tuple[int, int] | None = None  # kind and body's length, once read
        self._head: ChunkHead | None = None  # of the chunk under way
        self._slot: int | None = None  # where it lands
        self._rest = memoryview(b"")  # of that memory
        self._straight = 0  # bytes that go from the socket into it as they are

    @property
    def paused(self) -> bool:
        """Whether a chunk waits for memory to land in."""
        return self._head is not None and self._slot is None

    def receive(self) -> tuple[int, list[Event]]:
        """Take what has come, within the budget and up to the end of one chunk; returns how many
        bytes and what they say.

        Raises:
            OSError: the connection has ended.
            FrameError: the peer sent what it may not.
        """
        events: list[Event] = []
        taken = 0
        if self.paused and self._begin(events):
            self._parse_all(events)
        while taken < BUDGET_BYTES and not self.paused:
            if events and isinstance(events[-1], Arrived):
                break
            try:
                got = self._sock.recv_into(self._target())
            except (BlockingIOError, InterruptedError):
                break
            if not got:
                raise ConnectionResetError("the peer has closed the connection")
            taken += got
            self._took(got, events)
        return taken, events

    def close(self) -> None:
        """Give landing memory back."""
        if self._slot is not None and self._landing is not None:
            self._landing.give_back(self._slot)
        self._slot = None
        self._rest = memoryview(b"")

    def _target(self) -> memoryview:
        """Where the next bytes go."""
        if self._straight:
            return self._rest[: self._straight]
        stop = PREFIX_BYTES
        if self._record is not None:
            stop += self._record[1] + self._tag_bytes + PREFIX_BYTES
        return self._buffer[self._have : stop]

    def _took(self, got: int, events: list[Event]) -> None:
        if self._straight:
            self._straight -= got
            self._fill(got, events)
        else:
            self._have += got
            self._parse_all(events)

    def _parse_all(self, events: list[Event]) -> None:
        while not self.paused and self._parse(events):
            pass

    def _parse(self, events: list[Event]) -> bool:
        """Handle the record at the buffer's beginning, if it is there; returns whether."""
        if self._record is None:
            if self._have < PREFIX_BYTES:
                return False
            self._record = self._checked(*read_prefix(self._buffer, self._kinds))
            if self._record[0] == DATA and self._opener is None:
                self._straight, self._record, self._have = self._record[1], None, 0
                return False
        kind, nbytes = self._record
        stop = PREFIX_BYTES + nbytes + self._tag_bytes
        if self._have < stop:
            return False
        body = self._buffer[PREFIX_BYTES:stop]
        if kind == DATA:
            assert self._opener is not None
            self._opener.open(self._buffer[:PREFIX_BYTES], body, self._rest[:nbytes])
            self._fill(nbytes, events)
        else:
            self._heed(kind, self._opened(body, nbytes), events)
        after = self._have - stop
        self._buffer[:after] = self._buffer[stop : self._have]
        self._have, self._record = after, None
        return True

    def _checked(self, kind: int, nbytes: int) -> tuple[int, int]:
        if kind == DATA:
            most = min(len(self._rest), SEGMENT_BYTES) if self._opener else len(self._rest)
            if nbytes > most:
                raise FrameError(f"{nbytes} bytes of a chunk where at most {most} may come")
        return kind, nbytes

    def _opened(self, body: memoryview, nbytes: int) -> bytes:
        if self._opener is None:
            return bytes(body)
        plain = bytearray(nbytes)
        self._opener.open(self._buffer[:PREFIX_BYTES], body, memoryview(plain))
        return bytes(plain)

    def _heed(self, kind: int, body: bytes, events: list[Event]) -> None:
        if kind == GREET:
            events.append(Greeted())
        elif kind == ACK:
            events.append(Acked(read_token(body)))
        elif kind == CHUNK:
            head = read_chunk(body)
            assert self._landing is not None
            if head.nbytes > self._landing.slot_bytes:
                raise FrameError(
                    f"a chunk of {head.nbytes} bytes; slots here have {self._landing.slot_bytes}"
                )
            self._head = head
            self._kinds = frozenset((DATA,))
            self._begin(events)

    def _begin(self, events: list[Event]) -> bool:
        """Find memory for the chunk that has been announced; returns whether there is some."""
        assert self._landing is not None
        assert self._head is not None
        self._slot = self._landing.take()
        if self._slot is None:
            return False
        self._rest = self._landing.memory(self._slot, self._head.nbytes)
        self._fill(0, events)
        return True

    def _fill(self, nbytes: int, events: list[Event]) -> None:
        """So much more of the chunk is in its memory."""
        self._rest = self._rest[nbytes:]
        if self._rest:
            return
        assert self._landing is not None
        assert self._head is not None
        assert self._slot is not None
        payload = self._landing.memory(self._slot, self._head.nbytes)
        self._landing.landed(self._slot)
        events.append(Arrived(self._head, payload))
        self._head = self._slot = None
        self._kinds = frozenset((PING, CHUNK))
