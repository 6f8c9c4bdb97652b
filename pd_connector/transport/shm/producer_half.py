# SPDX-License-Identifier: Apache-2.0
"""The producer's half of the shared-memory transport: it copies chunks into consumers' landing slots."""

import itertools
import mmap
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Link, Written, check_fits
from pd_connector.transport.keepalive import hang_up
from pd_connector.transport.shm.address import ShmAddress
from pd_connector.transport.shm.descriptors import map_slab, recv_fds
from pd_connector.transport.shm.rendezvous import connect

NOTE = struct.Struct("<IQ")
"""What follows a copy: landing slot and bytes of the chunk. The chunk's header comes after it."""

_MOST_WAITING = 8
"""Chunks that are kept for a consumer whose landing slab has not come yet. It is sent before the
consumer asks for anything."""

_Memory = npt.NDArray[np.uint8]


@dataclass(slots=True)
class ConsumerPeer:
    """A consumer that this producer writes to.

    Attributes:
        link: the socket to it.
        slots, slot_bytes: number and size of its landing slots.
        window: its landing slab as mapped here; None until its descriptor has arrived.
        problem: why the descriptor will not arrive.
        waiting: header, payload and slot of chunks that were written before the descriptor arrived.
        notes: notes for which the socket had no room.
    """

    link: socket.socket
    slots: int
    slot_bytes: int
    window: _Memory | None = None
    problem: str = ""
    waiting: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    notes: deque[bytes] = field(default_factory=deque)

    def copy(self, header: bytes, payload: memoryview, slot: int) -> str:
        """Copy a chunk into a landing slot and notify the consumer; returns the error, empty for none."""
        assert self.window is not None
        start = slot * self.slot_bytes
        target = self.window[start : start + len(payload)]
        np.copyto(target, np.frombuffer(payload, np.uint8))  # without the interpreter lock
        self.notes.append(NOTE.pack(slot, len(payload)) + header)
        return self.send_notes()

    def send_notes(self) -> str:
        """Send the notes for which the socket has room; returns what went wrong."""
        try:
            while self.notes:
                self.link.send(self.notes[0])
                self.notes.popleft()
        except BlockingIOError:
            pass  # the consumer reads slowly: `poll` tries again
        except OSError as error:
            self.notes.clear()
            self.problem = f"is gone ({error})"
            return f"shm: the consumer {self.problem}"
        return ""

    def open_window(self) -> None:
        """Map the consumer's slab, if its descriptor has come, and copy what has waited for it."""
        if self.window is not None or self.problem:
            return
        try:
            data, descriptors = recv_fds(self.link, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", ()
        nbytes = self.slots * self.slot_bytes
        for descriptor in descriptors:  # one or none
            self.window = map_slab(descriptor, nbytes, mmap.ACCESS_WRITE)
        if self.window is not None:
            for header, payload, slot in self.waiting:
                self.copy(header, memoryview(payload), slot)
        else:
            self.problem = "has handed over no slab as it announced" if data else "has hung up"
        self.waiting.clear()


class ProducerHalf:
    """See the module.

    Args:
        token: the token by which consumers recognise this transport.
        sending: the slab that consumers may read, if it is shared.
    """

    def __init__(self, token: bytes, sending: Slab) -> None:
        self._token = token
        self._sending = sending
        self._tokens = itertools.count(1)  # of writes
        self._written: list[Written] = []
        self._consumers: dict[int, ConsumerPeer] = {}  # by descriptor of the link

    def connect(self, address: ShmAddress) -> Link:
        """See `Transport.connect`."""
        shared = [self._sending.handle] if self._sending.handle >= 0 else []
        try:
            link = connect(address.listener, self._token, shared)
        except (OSError, ValueError) as error:
            raise TransportError(f"shm: consumer is not on this machine ({error})") from error
        self._consumers[link.fileno()] = ConsumerPeer(link, address.slots, address.slot_bytes)
        return link.fileno()

    def disconnect(self, link: Link) -> None:
        assert isinstance(link, int)
        consumer = self._consumers.pop(link, None)
        if consumer is not None:
            hang_up(consumer.link)  # its window goes when the last view of it goes

    def broken(self, link: Link) -> bool:
        """See `Transport.broken`."""
        assert isinstance(link, int)
        consumer = self._consumers.get(link)
        return consumer is not None and bool(consumer.problem)

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        """See `Transport.write`. The payload has been copied when this returns."""
        assert isinstance(link, int)
        consumer = self._consumers.get(link)
        if consumer is None:
            raise TransportError("shm: no such consumer (any more)")
        check_fits("the consumer", slot, len(payload), consumer.slots, consumer.slot_bytes)
        consumer.open_window()
        if consumer.problem:
            raise TransportError(f"shm: the consumer {consumer.problem}")
        if len(consumer.waiting) >= _MOST_WAITING:
            raise TransportError(f"shm: {_MOST_WAITING} chunks wait for the consumer's slab")
        token = next(self._tokens)
        problem = ""
        if consumer.window is None:
            consumer.waiting.append((header, bytes(payload), slot))
        else:
            problem = consumer.copy(header, payload, slot)
        self._written.append(Written(token, not problem, problem))
        return token

    def poll(self) -> list[Written]:
        """Send what waits; returns the writes that have ended."""
        for consumer in list(self._consumers.values()):
            consumer.open_window()
            consumer.send_notes()
        written, self._written = self._written, []
        return written

    @property
    def pollables(self) -> list[object]:
        waiting = (c for c in self._consumers.values() if c.window is None and not c.problem)
        return [consumer.link.fileno() for consumer in waiting]

    @property
    def restless(self) -> bool:
        return any(consumer.notes for consumer in self._consumers.values())

    def close(self) -> None:
        for link in list(self._consumers):
            self.disconnect(link)
