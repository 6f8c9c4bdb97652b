# SPDX-License-Identifier: Apache-2.0
"""A transport that hands everything on, but for chunks that a fault is to hit."""

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from pd_connector.errors import TransportError
from pd_connector.memory.destination import Destination
from pd_connector.memory.pieces import Pieces
from pd_connector.protocol.header import ChunkHeader, decode_header, encode_header
from pd_connector.tools.bench.chaos.faults import Fault
from pd_connector.tools.bench.chaos.wrapping import WrappingTransport
from pd_connector.transport.base import Landed, Transport, Written

DELAY_S = 0.02
"""How long a delayed chunk waits. One that is reordered waits for the next chunk, or as long."""


class Tampering:
    """What is to be hit, shared by the transports of an agent. Armed by one thread, used by another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._share = 0.0
        self._left = 0
        self.injected = 0

    def arm(self, fault: Fault, count: int, share: float) -> None:
        """Hit this part of the chunks that come from now on, and so many at most."""
        with self._lock:
            self._fault, self._left, self._share = fault, count, share

    def disarm(self) -> int:
        """Hit nothing any more; returns how many have been hit since the last call."""
        with self._lock:
            injected, self.injected, self._left = self.injected, 0, 0
            return injected

    def draw(self) -> Fault | None:
        """What happens to the chunk that has come now; None for nothing."""
        with self._lock:
            if not self._left or self._random.random() >= self._share:
                return None
            self._left -= 1
            self.injected += 1
            return self._fault

    def take_back(self) -> None:
        """What was drawn could not be done."""
        with self._lock:
            self.injected -= 1

    def number(self, below: int) -> int:
        return self._random.randrange(below)


class _Late(NamedTuple):
    due: float
    landed: Landed
    reordered: bool  # it waits for a chunk that overtakes it


class TamperingTransport(WrappingTransport):
    """Wraps `inner`, with its name and manners. Chunks are hit where they arrive."""

    def __init__(self, inner: Transport, tampering: Tampering) -> None:
        super().__init__(inner)
        self._tampering = tampering
        self._later: deque[_Late] = deque()

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        found = self.inner.pull(source, theirs, ours)
        match self._tampering.draw():
            case None:
                return found
            case Fault.DELAY:
                time.sleep(DELAY_S)
                return found
            case Fault.DUPLICATE:
                return self.inner.pull(source, theirs, ours)
            case Fault.DROP | Fault.TRUNCATE:
                raise TransportError("injected: not all of it could be copied")
            case _:  # a byte of what lies in our pages now is not what was sent
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
                self._tampering.take_back()
            landed.append(late.landed)
        return written, landed

    @property
    def restless(self) -> bool:
        return bool(self._later) or self.inner.restless

    def close(self) -> None:
        self._later.clear()
        self.inner.close()

    def _hit(self, landed: Landed) -> list[Landed]:
        """What arrives in place of this chunk."""
        payload = landed.payload
        assert not isinstance(payload, Destination)  # it passes through slots where it is wrapped
        match self._tampering.draw():
            case None:
                return [landed]
            case Fault.DROP:
                return []
            case (Fault.DELAY | Fault.REORDER) as fault:
                if not self.inner.one_sided:  # its memory is the transport's from the next poll on
                    landed = landed._replace(payload=memoryview(bytes(payload)))
                due = time.monotonic() + DELAY_S
                self._later.append(_Late(due, landed, fault is Fault.REORDER))
                return []
            case Fault.DUPLICATE:
                return [landed, landed]
            case Fault.TRUNCATE:
                half = payload[: len(payload) // 2]
                return [landed._replace(payload=half, verified=False)]
            case Fault.CORRUPT:
                copy = bytearray(bytes(payload))
                if copy:
                    copy[self._tampering.number(len(copy))] ^= 1 << self._tampering.number(8)
                return [landed._replace(payload=memoryview(copy), verified=False)]
            case _:
                return [self._mislabelled(landed)]

    def _mislabelled(self, landed: Landed) -> Landed:
        """With a header, or a slot, that says something else."""
        header = decode_header(landed.header)
        lies: list[ChunkHeader] = [
            msgspec.structs.replace(header, epoch=header.epoch ^ 1),
            msgspec.structs.replace(header, transfer=header.transfer + "x"),
            msgspec.structs.replace(header, sequence=header.sequence + 1),
            msgspec.structs.replace(header, identity=header.identity[::-1]),
            msgspec.structs.replace(header, first_token=header.first_token + 1),
            msgspec.structs.replace(header, stop_layer=header.stop_layer + 1),
            msgspec.structs.replace(header, nbytes=header.nbytes * 2 + 1),
            msgspec.structs.replace(header, route=header.route + 1),
        ]
        choice = self._tampering.number(len(lies) + 2)
        if choice == len(lies):
            return landed._replace(slot=landed.slot + 1)
        if choice > len(lies):
            return landed._replace(header=landed.header[: len(landed.header) // 2])
        return landed._replace(header=encode_header(lies[choice]))


def damage(pieces: Pieces, place: int) -> None:
    """Invert a bit of the byte at this place of the pieces, in this process's memory."""
    number, offset = divmod(place, pieces.piece_bytes)
    address = int(pieces.addresses[number]) + offset
    byte = ctypes.cast(address, ctypes.POINTER(ctypes.c_ubyte))
    byte[0] ^= 1
