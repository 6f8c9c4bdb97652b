# SPDX-License-Identifier: Apache-2.0
"""A transport that passes everything on, except chunks that a fault must hit."""

import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from chaos.faults import CHUNK_FAULTS, Fault
from chaos.tampering import Tampering
from chaos.wire import Wires
from chaos.wrapping import WrappingTransport
from pd_connector.errors import TransportError
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.protocol.wire.header import ChunkHeader, decode_header, encode_header
from pd_connector.transport.base import Destinations, Landed, Link, Transport, Written
from pd_connector.transport.tcp.address import LEAST_RECORD_BYTES, read_address
from pd_connector.transport.tcp.transport import TcpTransport

DELAY_S = 0.02
"""Time that a delayed chunk waits. A reordered chunk waits for the next chunk, at most this time."""
_OPENED = frozenset((*CHUNK_FAULTS, Fault.TAKE_BACK)) - {Fault.TRUNCATE, Fault.CORRUPT}
"""The faults for a chunk that has arrived in its pages."""
_BEGINS = frozenset((Fault.TRUNCATE, Fault.LIE_HEADER, Fault.TAKE_BACK))
"""The faults for a chunk that begins to arrive."""
_VERIFIED = frozenset((*CHUNK_FAULTS, Fault.TAKE_BACK)) - {Fault.CORRUPT}
_LANDED = frozenset((*CHUNK_FAULTS, Fault.TAKE_BACK))


class _Late(NamedTuple):
    due: float
    landed: Landed
    reordered: bool  # waits for a chunk that overtakes it


class TamperingTransport(WrappingTransport):
    """Wraps `inner`, with its name and properties. Chunks are hit at arrival, and when their pages are read.

    It counts the paths of chunks. Sent chunks are `sealed` directly from their pages, or `written` after a gather.
    Received chunks are `opened` directly into their pages, `landed` in a slot, or `pulled` from the producer's memory.

    Args:
        wired: whether records, if there are any, pass over a `Wire`.
    """

    def __init__(self, inner: Transport, tampering: Tampering, *, wired: bool = False) -> None:
        super().__init__(inner)
        self._tampering = tampering
        self._has_records = isinstance(inner, TcpTransport)
        self._wires = Wires(tampering) if wired and self._has_records else None
        self._later: deque[_Late] = deque()
        self._lies: dict[tuple[bytes, int], tuple[bytes, int]] = {}

    def address(self) -> bytes:
        found = self.inner.address()
        if not self._has_records:
            return found
        # Chunks are smaller here by the same factor as slots, so they still have several records.
        smaller = msgspec.structs.replace(read_address(found), record_bytes=LEAST_RECORD_BYTES)
        return smaller.encode()

    def expect(self, producer: bytes) -> Hashable:
        if self._wires is None:
            return self.inner.expect(producer)
        return self._wires.expect(producer, self.inner.expect)

    def dismiss(self, source: Hashable) -> None:
        self.inner.dismiss(source)
        if self._wires is not None:
            self._wires.dismiss(source)

    def write(self, link: Link, header: bytes, payload: Payload, slot: int) -> int:
        self._tampering.paths["written"] += 1
        self._interrupted(header, self._tampering.draw({Fault.TAKE_BACK}))
        return self.inner.write(link, header, payload, slot)

    def prepare(
        self, link: Link, header: bytes, pieces: Pieces, slot: int, into: memoryview
    ) -> Callable[[], int] | None:
        fault = self._tampering.draw({Fault.TAKE_BACK})
        read = _InterruptedPieces(*pieces)
        if fault:
            read.at = self._tampering.number(len(pieces.addresses))
            read.interrupt = functools.partial(self._interrupted, header, fault)
        begin = self.inner.prepare(link, header, read, slot, into)
        if read.interrupt is not None:  # it was not read
            self._tampering.undo()
        if begin is None:
            return None
        return functools.partial(self._begin, begin)

    def _begin(self, begin: Callable[[], int]) -> int:
        self._tampering.paths["sealed"] += 1
        return begin()

    @property
    def destinations(self) -> Destinations | None:
        return self.inner.destinations

    @destinations.setter
    def destinations(self, asked: Destinations | None) -> None:
        self.inner.destinations = asked and functools.partial(self._where, asked)

    def _where(
        self, asked: Destinations, header: bytes, slot: int, nbytes: int
    ) -> Destination | None:
        """The place of a chunk that begins to arrive."""
        fault = self._tampering.draw(_BEGINS)
        if fault is Fault.LIE_HEADER:
            told = self._lie(header, slot)
            self._lies[header, slot] = told
            found = asked(*told, nbytes)
            return found and _HitDestination(found, lambda: False, cut=False)
        found = asked(header, slot, nbytes)
        if found is None:  # the chunk can be hit when it has landed
            if fault:
                self._tampering.undo()
            return None
        interrupt = functools.partial(
            self._interrupted, header, fault if fault is Fault.TAKE_BACK else None
        )
        return _HitDestination(found, interrupt, cut=fault is Fault.TRUNCATE)

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        self._tampering.paths["pulled"] += 1
        fault = self._tampering.draw(_LANDED)
        found = self.inner.pull(source, theirs, ours)
        match fault:
            case None:
                return found
            case Fault.DELAY:
                time.sleep(DELAY_S)
                return found
            case Fault.DUPLICATE:
                return self.inner.pull(source, theirs, ours)
            case Fault.DROP | Fault.TRUNCATE:
                raise TransportError("injected: not all of it could be copied")
            case Fault.TAKE_BACK:  # of any load, because the load that reads is not known here
                if not self._tampering.interrupt(""):
                    self._tampering.undo()
                return self.inner.pull(source, theirs, ours)
            case _:  # a byte in our pages now differs from the byte that was sent
                damage(ours, self._tampering.number(ours.nbytes))
                return ours.checksum()

    def poll(self) -> tuple[list[Written], list[Landed]]:
        written, arrived = self.inner.poll()
        landed: list[Landed] = []
        for one in arrived:
            landed += self._hit(one)
        now = time.monotonic()
        overtaken = bool(landed)
        while self._later and (overtaken or self._later[0].due <= now):
            late = self._later.popleft()
            if late.reordered and not overtaken:
                self._tampering.undo()
            landed.append(late.landed)
        return written, landed

    @property
    def restless(self) -> bool:
        return bool(self._later) or self.inner.restless

    def close(self) -> None:
        self._later.clear()
        self.inner.close()
        if self._wires is not None:
            self._wires.close()

    def _hit(self, landed: Landed) -> list[Landed]:
        """The arrivals in place of this chunk."""
        lie = self._lies.pop((landed.header, landed.slot), None)
        if isinstance(landed.payload, _HitDestination):
            self._tampering.paths["opened"] += 1
            landed = landed._replace(payload=landed.payload.inner)
            kinds = _OPENED
        else:
            self._tampering.paths["landed"] += 1
            kinds = _VERIFIED if landed.verified else _LANDED
        if lie:
            return [landed._replace(header=lie[0], slot=lie[1])]
        payload = landed.payload
        match self._tampering.draw(kinds):
            case None:
                return [landed]
            case Fault.DROP:
                return []
            case (Fault.DELAY | Fault.REORDER) as fault:
                # From the next poll on, its memory belongs to the transport again; pages do not.
                if not self.inner.one_sided and not isinstance(payload, Destination):
                    landed = landed._replace(payload=memoryview(bytes(payload)))
                due = time.monotonic() + DELAY_S
                self._later.append(_Late(due, landed, fault is Fault.REORDER))
                return []
            case Fault.DUPLICATE:
                return [landed, landed]
            case Fault.TAKE_BACK as fault:
                self._interrupted(landed.header, fault)
                return [landed]
            case Fault.TRUNCATE:
                assert not isinstance(payload, Destination)
                half = payload[: len(payload) // 2]
                return [landed._replace(payload=half, verified=False)]
            case Fault.CORRUPT:
                assert not isinstance(payload, Destination)
                copy = bytearray(bytes(payload))
                if copy:
                    copy[self._tampering.number(len(copy))] ^= 1 << self._tampering.number(8)
                return [landed._replace(payload=memoryview(copy), verified=False)]
            case _:
                header, slot = self._lie(landed.header, landed.slot)
                return [landed._replace(header=header, slot=slot)]

    def _interrupted(self, header: bytes, fault: Fault | None) -> bool:
        """If this fault was drawn, the engine takes the chunk's pages back now. Returns whether it does."""
        if fault is None:
            return False
        taken = self._tampering.interrupt(decode_header(header).transfer)
        if not taken:
            self._tampering.undo()
        return taken

    def _lie(self, header: bytes, slot: int) -> tuple[bytes, int]:
        """A header or a slot with another content."""
        truth = decode_header(header)
        lies: list[ChunkHeader] = [
            msgspec.structs.replace(truth, epoch=truth.epoch ^ 1),
            msgspec.structs.replace(truth, transfer=truth.transfer + "x"),
            msgspec.structs.replace(truth, sequence=truth.sequence + 1),
            msgspec.structs.replace(truth, identity=truth.identity[::-1]),
            msgspec.structs.replace(truth, first_token=truth.first_token + 1),
            msgspec.structs.replace(truth, stop_layer=truth.stop_layer + 1),
            msgspec.structs.replace(truth, nbytes=truth.nbytes * 2 + 1),
            msgspec.structs.replace(truth, route=truth.route + 1),
        ]
        choice = self._tampering.number(len(lies) + 2)
        if choice == len(lies):
            return header, slot + 1
        if choice > len(lies):
            return header[: len(header) // 2], slot
        return encode_header(lies[choice]), slot


class _InterruptedPieces(Pieces):
    """Pieces whose reader is interrupted before it reads the piece `at`."""

    at = 0
    interrupt: Callable[[], object] | None = None

    def buffers(self, start: int, stop: int) -> Iterator[memoryview]:
        first = start // self.piece_bytes
        for number, found in enumerate(super().buffers(start, stop), first):
            if self.interrupt is not None and number == self.at:
                interrupt, self.interrupt = self.interrupt, None
                interrupt()
            yield found


class _HitDestination(Destination):
    """A chunk's pages.

    Args:
        interrupt: called just before the chunk is written into the pages.
        cut: whether the pages are gone when its last record comes.
    """

    def __init__(self, inner: Destination, interrupt: Callable[[], bool], *, cut: bool) -> None:
        self.inner = inner
        self.nbytes = inner.nbytes
        self._interrupt = interrupt
        self._cut = cut

    @contextmanager
    def memory(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        if self._cut and stop == self.nbytes:
            yield ()
            return
        with self.inner.memory(start, stop) as parts:
            if parts:
                interrupt, self._interrupt = self._interrupt, lambda: False
                interrupt()
            yield parts


def damage(pieces: Pieces, place: int) -> None:
    """Invert a bit of the byte at this place of the pieces, in this process's memory."""
    number, offset = divmod(place, pieces.piece_bytes)
    address = int(pieces.addresses[number]) + offset
    byte = ctypes.cast(address, ctypes.POINTER(ctypes.c_ubyte))
    byte[0] ^= 1
