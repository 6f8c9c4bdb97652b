# SPDX-License-Identifier: Apache-2.0
"""Between processes of one user on one machine: the producer copies into the landing slab itself.

The consumer listens on a Unix socket in the abstract namespace, which ends where the network
namespace ends: a producer elsewhere fails to connect, and the next transport is tried. Over the
socket the consumer hands the slab's memory to a producer it expects, and the producer tells what
it has copied. The kernel vouches for the peer's user; the token that names an expected producer
has come over the control channel.
"""

import array
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from pd_connector.errors import TransportError
from pd_connector.slab import SLAB_SEALS, Slab
from pd_connector.transport.base import Landed, Route, Transport, Written

_NOTE = struct.Struct("<IQ")  # slot, bytes; the header follows
_TOKEN_BYTES = 16
_MAX_NOTE_BYTES = 4096
_MAX_NOTES = 1024  # taken from one producer at a time
_MAX_STRANGERS = 64
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class _Address(msgspec.Struct, frozen=True, array_like=True):
    listener: str
    token: bytes
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


@dataclass(slots=True)
class _Producer:
    """A producer that may write here, once for every session that expects it."""

    expected: int = 0
    links: list[socket.socket] = field(default_factory=list)


@dataclass(slots=True)
class _Consumer:
    """A consumer this producer writes to; without `window` until its memory has arrived."""

    link: socket.socket
    slots: int
    slot_bytes: int
    window: mmap.mmap | None = None
    waiting: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    notes: deque[bytes] = field(default_factory=deque)  # that the socket had no room for


class ShmTransport(Transport):
    """See the module. `landing` must be shared (`Slab(..., shared=True)`)."""

    name = "shm"
    one_sided = True

    def __init__(self, landing: Slab) -> None:
        self._landing = landing
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._tokens = 0
        self._written: list[Written] = []
        self._consumers: dict[int, _Consumer] = {}
        self._strangers: dict[socket.socket, bytes] = {}  # connected, not (yet) expected
        self._producers: dict[bytes, _Producer] = {}  # expected, maybe connected
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._name = f"pd-connector-{secrets.token_hex(12)}"
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(_MAX_STRANGERS)

    def address(self) -> bytes:
        landing = self._landing
        return msgspec.msgpack.encode(
            _Address(self._name, self._token, landing.slots, landing.slot_bytes)
        )

    def connect(self, consumer: bytes) -> Route:
        address = _read_address(consumer)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.setblocking(False)
            link.connect(f"\0{address.listener}")
            link.send(self._token)
        except OSError as error:
            link.close()
            raise TransportError(f"shm: consumer is not on this machine ({error})") from error
        self._consumers[link.fileno()] = _Consumer(link, address.slots, address.slot_bytes)
        return link.fileno()

    def disconnect(self, route: Route) -> None:
        assert isinstance(route, int)
        consumer = self._consumers.pop(route, None)
        if consumer is not None:
            consumer.link.close()  # its window goes when the last view of it goes

    def expect(self, producer: bytes) -> Hashable:
        token = _read_address(producer).token
        self._producers.setdefault(token, _Producer()).expected += 1
        for stranger, presented in list(self._strangers.items()):
            if presented == token:
                del self._strangers[stranger]
                self._admit(stranger, token)
        return token

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, bytes)
        producer = self._producers.get(source)
        if producer is None:
            return
        producer.expected -= 1
        if not producer.expected:
            self._remove(source)

    def write(self, route: Route, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(route, int)
        consumer = self._consumers.get(route)
        if consumer is None:
            raise TransportError("shm: no such consumer (any more)")
        if slot >= consumer.slots or len(payload) > consumer.slot_bytes:
            raise TransportError(
                f"shm: slot {slot} and {len(payload)} bytes; the consumer has {consumer.slots} "
                f"slots of {consumer.slot_bytes} bytes"
            )
        self._tokens += 1
        if consumer.window is None:
            consumer.waiting.append((header, bytes(payload), slot))
            self._written.append(Written(self._tokens, True, ""))
        else:
            problem = self._copy(consumer, header, payload, slot)
            self._written.append(Written(self._tokens, not problem, problem))
        return self._tokens

    def silenced(self, source: Hashable) -> bool:
        """A producer that has closed its link, or whose process has ended, copies no more."""
        assert isinstance(source, bytes)
        producer = self._producers.get(source)
        if producer is None or not producer.links:
            return True
        poller = select.poll()
        for link in producer.links:
            poller.register(link, select.POLLIN)
        hung_up = sum(bool(events & select.POLLHUP) for _, events in poller.poll(0))
        return hung_up == len(producer.links)

    def poll(self) -> tuple[list[Written], list[Landed]]:
        self._welcome_strangers()
        for consumer in list(self._consumers.values()):
            if consumer.window is None:
                self._open_window(consumer)
            self._tell(consumer)
        landed: list[Landed] = []
        for producer in self._producers.values():
            for link in list(producer.links):
                landed += self._take_notes(producer, link)
        written, self._written = self._written, []
        return written, landed

    @property
    def pollables(self) -> list[object]:
        waiting = [c.link for c in self._consumers.values() if c.window is None]
        links = [link for producer in self._producers.values() for link in producer.links]
        return [s.fileno() for s in (self._listener, *waiting, *links, *self._strangers)]

    @property
    def restless(self) -> bool:
        return any(consumer.notes for consumer in self._consumers.values())

    def close(self) -> None:
        for route in list(self._consumers):
            self.disconnect(route)
        for token in list(self._producers):
            self._remove(token)
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()
        self._listener.close()

    def _copy(self, consumer: _Consumer, header: bytes, payload: memoryview, slot: int) -> str:
        assert consumer.window is not None
        start = slot * consumer.slot_bytes
        target = np.frombuffer(consumer.window, np.uint8, len(payload), start)
        np.copyto(target, np.frombuffer(payload, np.uint8))  # without the interpreter lock
        consumer.notes.append(_NOTE.pack(slot, len(payload)) + header)
        return self._tell(consumer)

    def _tell(self, consumer: _Consumer) -> str:
        """Send the notes for which there is room; returns what went wrong."""
        try:
            while consumer.notes:
                consumer.link.send(consumer.notes[0])
                consumer.notes.popleft()
        except BlockingIOError:
            pass  # it reads slowly: `poll` tries again
        except OSError as error:
            consumer.notes.clear()
            return f"shm: the consumer is gone ({error})"
        return ""

    def _open_window(self, consumer: _Consumer) -> None:
        """Take the consumer's memory, if it has come, and copy what has waited for it."""
        try:
            _, ancillary, _, _ = consumer.link.recvmsg(1, socket.CMSG_SPACE(4))
        except OSError:
            return
        received = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(data[:4])
        for descriptor in received:
            consumer.window = _map(descriptor, consumer.slots * consumer.slot_bytes)
            os.close(descriptor)
        if consumer.window is not None:
            for header, payload, slot in consumer.waiting:
                self._copy(consumer, header, memoryview(payload), slot)
        consumer.waiting.clear()

    def _welcome_strangers(self) -> None:
        while True:
            try:
                stranger, _ = self._listener.accept()
            except BlockingIOError:
                break
            stranger.setblocking(False)
            credentials = stranger.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
                stranger.close()
                continue
            self._strangers[stranger] = b""
            if len(self._strangers) > _MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()
        for stranger, presented in list(self._strangers.items()):
            try:
                data = stranger.recv(_TOKEN_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data or presented:  # gone, or it talks out of turn
                del self._strangers[stranger]
                stranger.close()
            elif data in self._producers:
                del self._strangers[stranger]
                self._admit(stranger, data)
            else:
                self._strangers[stranger] = data

    def _admit(self, link: socket.socket, token: bytes) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._landing.handle]))]
        try:
            link.sendmsg([b"\0"], rights)
        except OSError:
            link.close()
            return
        self._producers[token].links.append(link)

    def _remove(self, token: bytes) -> None:
        for link in self._producers.pop(token).links:
            link.close()

    def _take_notes(self, producer: _Producer, link: socket.socket) -> list[Landed]:
        landed: list[Landed] = []
        for _ in range(_MAX_NOTES):
            try:
                note = link.recv(_MAX_NOTE_BYTES)
            except BlockingIOError:
                return landed
            except OSError:
                note = b""
            if not note:
                link.close()
                producer.links.remove(link)
                return landed
            if len(note) < _NOTE.size:
                continue
            slot, nbytes = _NOTE.unpack_from(note)
            if slot < self._landing.slots and nbytes <= self._landing.slot_bytes:
                header = note[_NOTE.size :]
                landed.append(Landed(header, slot, self._landing.slot(slot, nbytes)))
        return landed


def _map(descriptor: int, nbytes: int) -> mmap.mmap | None:
    """Map a consumer's memory, if it is what a `Slab` shares."""
    try:
        # Memory that its owner may shrink would kill this process on a write.
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SLAB_SEALS == SLAB_SEALS
        if sealed and os.fstat(descriptor).st_size == nbytes:
            return mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError, OverflowError):  # not such memory, or more than can be mapped
        pass
    return None


def _read_address(address: bytes) -> _Address:
    try:
        return msgspec.msgpack.decode(address, type=_Address)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"shm address of a peer cannot be read: {error}") from None
