# SPDX-License-Identifier: Apache-2.0
"""The network between a consumer and a producer, which flips, cuts, repeats, swaps and loses records of `tcp`.

It knows no key. Like a network, it sees prefixes in clear, sealed bodies, and tags.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import msgspec

from chaos.faults import RECORD_FAULTS, Fault
from chaos.tampering import Tampering
from pd_connector.transport.tcp.address import TcpAddress, read_address
from pd_connector.transport.tcp.frames import (
    ANSWER_BYTES,
    BARE,
    DATA,
    DIAL_BYTES,
    PREFIX_BYTES,
    TAG_BYTES,
)

_PREFIX = struct.Struct("<BxxxI")
_SWAP_S = 0.02
"""Longest time that a record waits for the next record to overtake it."""
_STUCK_S = 5
_STUCK = struct.pack("ll", _STUCK_S, 0)
"""If an end takes nothing for this time, the wire gives it up."""
_RESET = struct.pack("ii", 1, 0)
_FIRST = frozenset((Fault.FLIP_RECORD, Fault.CUT_RECORD))
"""The faults for the first frames of a connection."""
_RECORD = frozenset(RECORD_FAULTS)
_PAYLOAD = frozenset((*RECORD_FAULTS, Fault.CORRUPT))


class _CutError(Exception):
    """The connection ends here."""


class Wires:
    """The wires from a consumer to each of its producers."""

    def __init__(self, tampering: Tampering) -> None:
        self._tampering = tampering
        self._wires: dict[bytes, _Wire] = {}  # by the producer's identity
        self._sources: dict[Hashable, bytes] = {}

    def expect(self, producer: bytes, expect: Callable[[bytes], Hashable]) -> Hashable:
        """Make the consumer expect the producer at the wire's beginning."""
        address = read_address(producer)
        if address.identity not in self._wires:
            self._wires[address.identity] = _Wire(address, self._tampering)
        wire = self._wires[address.identity]
        source = expect(msgspec.structs.replace(address, host=wire.host, port=wire.port).encode())
        self._sources[source] = address.identity
        return source

    def dismiss(self, source: Hashable) -> None:
        identity = self._sources.pop(source, None)
        if identity is not None and identity not in self._sources.values():
            self._wires.pop(identity).close()

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        self._sources.clear()


class _Wire:
    """Forwards each connection in its own threads until the connection ends, or until `close`."""

    host = "127.0.0.1"

    def __init__(self, producer: TcpAddress, tampering: Tampering) -> None:
        self._producer = producer
        self._tampering = tampering
        self._listener = socket.create_server((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: set[socket.socket] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *list(self._ends)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                dialler, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(dialler,), daemon=True).start()

    def _carry(self, dialler: socket.socket) -> None:
        there = self._producer.host, self._producer.port
        with (
            dialler,
            contextlib.suppress(OSError),
            socket.create_connection(there, _STUCK_S) as listener,
        ):
            listener.settimeout(None)
            self._ends |= {dialler, listener}
            ways = _Way(dialler, listener, DIAL_BYTES), _Way(listener, dialler, ANSWER_BYTES)
            back = threading.Thread(target=self._forward, args=(ways[1],), daemon=True)
            back.start()
            self._forward(ways[0])
            back.join()
            self._ends -= {dialler, listener}

    def _forward(self, way: "_Way") -> None:
        way.to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        way.to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _STUCK)
        try:
            first = way.read(way.first_bytes)
            for data in self._passed(way, first, self._tampering.draw(_FIRST)):
                way.to.sendall(data)
            while True:
                head, body = way.record()
                kind = _PREFIX.unpack(head)[0]
                fault = self._tampering.draw(_PAYLOAD if kind in (DATA, BARE) else _RECORD)
                if fault is Fault.CORRUPT:
                    nbytes = _PREFIX.unpack(head)[1]
                    body = self._flipped(body, nbytes)
                for data in self._passed(way, head + body, fault):
                    way.to.sendall(data)
        except (OSError, _CutError):
            pass
        finally:
            for end in (way.origin, way.to):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _passed(self, way: "_Way", data: bytes, fault: Fault | None) -> Iterator[bytes]:
        """The records that pass in place of this record."""
        match fault:
            case Fault.FLIP_RECORD:
                yield self._flipped(data, len(data))
            case Fault.CUT_RECORD:
                yield data[: self._tampering.number(len(data))]
                if self._tampering.number(2):
                    way.to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                raise _CutError
            case Fault.REPLAY_RECORD:
                yield data
                yield data
            case Fault.SWAP_RECORDS:
                if select.select([way.origin], [], [], _SWAP_S)[0]:
                    yield b"".join(way.record())
                else:
                    self._tampering.undo()
                yield data
            case Fault.LOSE_RECORD:
                pass
            case _:
                yield data

    def _flipped(self, data: bytes, nbytes: int) -> bytes:
        """The record with one bit inverted in its first bytes."""
        copy = bytearray(data)
        copy[self._tampering.number(nbytes)] ^= 1 << self._tampering.number(8)
        return bytes(copy)


class _Way(NamedTuple):
    """One direction of a connection."""

    origin: socket.socket
    to: socket.socket
    first_bytes: int  # size of the connection's first frame

    def read(self, nbytes: int) -> bytes:
        """Raises OSError at the connection's end."""
        data = self.origin.recv(nbytes, socket.MSG_WAITALL)
        if len(data) < nbytes:
            raise ConnectionResetError
        return data

    def record(self) -> tuple[bytes, bytes]:
        """The next record's prefix, and the rest of it."""
        head = self.read(PREFIX_BYTES)
        kind, nbytes = _PREFIX.unpack(head)
        return head, self.read(nbytes + (0 if kind == BARE else TAG_BYTES))
