# SPDX-License-Identifier: Apache-2.0
"""From the socket into landing memory."""

import fcntl
import socket
import sys
import termios

from pd_connector.memory.destination import Destination
from pd_connector.transport.tcp.events import Acked, Arrived, Event, Greeted
from pd_connector.transport.tcp.frames import (
    ACK,
    BARE,
    CHUNK,
    DATA,
    GREET,
    MAX_CHUNK_BYTES,
    PING,
    PREFIX_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    ChunkHead,
    FrameError,
    Record,
    read_chunk,
    read_prefix,
    read_token,
)
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.sealing import Opener
from pd_connector.transport.tcp.segments import Segments
from pd_connector.transport.tcp.sending import BUDGET_BYTES

_SMALL_BYTES = 16
"""The largest body that a dialler sends."""
_LOW_WATER_BYTES = RECORD_BYTES + TAG_BYTES + PREFIX_BYTES
"""Bytes that wake the agent's thread within a chunk; fewer do if they complete the chunk. A wake costs the
thread as much as a copy of some hundred KiB."""


class Receiving:
    """The receiving half of a connection.

    Parts of chunks go from the socket into landing memory. Sealed parts go into a segment first, which stays
    in the processor's cache. From there they are opened into landing memory, or into the chunk's `Destination`.

    Args:
        opener: opens every record; None if records have no tags.
        landing: memory that chunks land in; None if this side takes no chunks.
    """

    def __init__(
        self,
        sock: socket.socket,
        opener: Opener | None,
        landing: Landing | None,
        segments: Segments,
    ) -> None:
        self._sock = sock
        self._opener = opener
        self._landing = landing
        self._tag_bytes = TAG_BYTES if opener else 0
        in_clear = opener is not None and opener.in_clear
        self._parts = frozenset((DATA, BARE) if in_clear else (DATA,))
        self._part_tag_bytes = 0 if in_clear else self._tag_bytes  # at least
        self._kinds = frozenset((PING, CHUNK) if landing else (PING, GREET, ACK))
        largest = MAX_CHUNK_BYTES if landing else _SMALL_BYTES
        # One record without a chunk's bytes, and the prefix of the next.
        self._buffer = memoryview(bytearray(2 * PREFIX_BYTES + largest + self._tag_bytes))
        self._segments = segments
        self._segment = memoryview(b"")  # for the chunk under way, if it is sealed
        self._have = 0
        self._record: Record | None = None  # once its prefix has been read
        self._head: ChunkHead | None = None  # of the chunk under way
        self._slot: int | None = None  # where it lands
        self._destination: Destination | None = None  # or where it belongs
        self._landed = 0  # bytes of it, in records that are complete
        self._verified = True  # all of these have tags
        self._body = memoryview(b"")  # memory for what is still to come of this record of a chunk
        self._low_water = 1
        self._queued = 0

    @property
    def paused(self) -> bool:
        """Whether a chunk waits for memory to land in."""
        return self._head is not None and self._slot is None and self._destination is None

    def receive(self) -> tuple[int, list[Event]]:
        """Take bytes that have come, within the budget and up to the end of one chunk. Returns their number and the
        events in them.

        Raises:
            OSError: the connection has ended.
            FrameError: the peer sent what the protocol forbids.
        """
        events: list[Event] = []
        taken = 0
        if self.paused and self._begin(events):
            self._parse_all(events)
        while taken < BUDGET_BYTES and not self.paused:
            if events and isinstance(events[-1], Arrived):
                break
            targets = self._targets()
            try:
                got = self._sock.recvmsg_into(targets)[0]
            except (BlockingIOError, InterruptedError):
                break
            if not got:
                raise ConnectionResetError("the peer has closed the connection")
            taken += got
            self._took(got, events)
            if got < sum(map(len, targets)):  # there was no more
                break
        self._ask()
        return taken, events

    def grows(self) -> bool:
        """Whether bytes of an incomplete record have come since the last call."""
        queued = int.from_bytes(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4)), sys.byteorder)
        before, self._queued = self._queued, queued
        return queued > before

    def close(self) -> None:
        """Give landing memory back."""
        if self._slot is not None and self._landing is not None:
            self._landing.give_back(self._slot)
        self._slot = self._destination = None
        self._body = memoryview(b"")

    def _ask(self) -> None:
        """Set the socket's low-water mark, so that it wakes this side once enough has arrived, not for every packet."""
        requested = max(1, min(self._due(), _LOW_WATER_BYTES))
        if requested != self._low_water and not self.paused:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, requested)
            self._low_water = requested

    def _due(self) -> int:
        """Number of bytes that will certainly come before the end of the chunk under way."""
        if self._head is None:
            return 0
        rest = self._head.nbytes - self._landed
        if self._record is None:
            return PREFIX_BYTES - self._have + rest + self._part_tag_bytes
        after = rest - self._record.nbytes
        tail = PREFIX_BYTES + self._record.tag_bytes - self._have
        return len(self._body) + tail + (after and after + PREFIX_BYTES + self._part_tag_bytes)

    def _targets(self) -> list[memoryview]:
        """Where the next bytes go."""
        stop = PREFIX_BYTES
        if self._record is not None:
            stop += self._record.buffered + PREFIX_BYTES
        tail = self._buffer[self._have : stop]
        return [self._body, tail] if self._body else [tail]

    def _took(self, got: int, events: list[Event]) -> None:
        into_body = min(got, len(self._body))
        self._body = self._body[into_body:]
        self._have += got - into_body
        self._parse_all(events)

    def _parse_all(self, events: list[Event]) -> None:
        while not self.paused and self._parse(events):
            pass

    def _parse(self, events: list[Event]) -> bool:
        """Handle the record at the buffer's beginning, if it is there; returns whether."""
        if self._record is None:
            if self._have < PREFIX_BYTES:
                return False
            self._record = self._read_prefix()
            if self._record.of_chunk:
                self._body = self._room(self._record)[: self._record.nbytes]
        record = self._record
        stop = PREFIX_BYTES + record.buffered
        if self._body or self._have < stop:
            return False
        tail = self._buffer[PREFIX_BYTES:stop]
        if record.of_chunk:
            self._open(record, tail)
        else:
            self._heed(record.kind, self._opened(tail, record.nbytes), events)
        after = self._have - stop
        self._buffer[:after] = self._buffer[stop : self._have]
        self._have, self._record = after, None
        if record.of_chunk:
            self._fill(record.nbytes, events)
        return True

    def _read_prefix(self) -> Record:
        kind, nbytes = read_prefix(self._buffer, self._kinds)
        record = Record(kind, nbytes, 0 if kind == BARE else self._tag_bytes)
        if record.of_chunk:
            assert self._head is not None
            rest = self._head.nbytes - self._landed
            most = min(rest, RECORD_BYTES) if record.tag_bytes else rest
            if nbytes > most:
                raise FrameError(f"{nbytes} bytes of a chunk where at most {most} may come")
            if not record.tag_bytes and self._destination is not None:
                raise FrameError("bytes without a tag, of a chunk without a checksum")
        return record

    def _room(self, record: Record) -> memoryview:
        """Memory for the record of a chunk that begins."""
        if not record.tag_bytes:
            return self._memory()
        if not self._segment:
            self._segment = self._segments.take()
        return self._segment

    def _memory(self) -> memoryview:
        """Landing memory for the rest of the chunk under way."""
        assert self._landing is not None
        assert self._head is not None
        assert self._slot is not None
        return self._landing.memory(self._slot, self._head.nbytes)[self._landed :]

    def _open(self, record: Record, tag: memoryview) -> None:
        """A record of a chunk is complete: open it, if it is sealed."""
        if not record.tag_bytes:
            self._verified = False
            return
        assert self._opener is not None
        nbytes = record.nbytes
        self._segment[nbytes : nbytes + TAG_BYTES] = tag
        head, sealed = self._buffer[:PREFIX_BYTES], self._segment[: nbytes + TAG_BYTES]
        if self._destination is None:
            self._opener.open(head, sealed, self._memory()[:nbytes])
            return
        with self._destination.memory(self._landed, self._landed + nbytes) as parts:
            if parts:
                self._opener.open_parts(head, sealed, parts)
            else:  # it is no longer wanted; but nothing else may have come in its place
                self._opener.open(head, sealed, memoryview(bytearray(nbytes)))

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
            self._kinds = self._parts
            self._begin(events)

    def _begin(self, events: list[Event]) -> bool:
        """Find memory for the chunk that has been announced; returns whether there is some."""
        assert self._landing is not None
        assert self._head is not None
        if self._opener is not None and self._opener.in_parts:
            self._destination = self._landing.destination(self._head)
        if self._destination is None:
            self._slot = self._landing.lend()
            if self._slot is None:
                return False
        self._landed = 0
        self._verified = self._opener is not None
        self._fill(0, events)
        return True

    def _fill(self, nbytes: int, events: list[Event]) -> None:
        """This many more bytes of the chunk are in its memory."""
        assert self._landing is not None
        assert self._head is not None
        self._landed += nbytes
        if self._landed < self._head.nbytes:
            return
        payload: memoryview | Destination
        if self._destination is not None:
            payload = self._destination
        else:
            assert self._slot is not None
            payload = self._landing.memory(self._slot, self._head.nbytes)
            self._landing.landed(self._slot)
        events.append(Arrived(self._head, payload, self._verified))
        self._head = self._slot = self._destination = None
        if self._segment:
            self._segments.give_back(self._segment)
            self._segment = memoryview(b"")
        self._kinds = frozenset((PING, CHUNK))
