# SPDX-License-Identifier: Apache-2.0
"""The shared-memory transport as a consumer.

It takes the chunks that producers have copied into its landing slots, and looks at chunks in producers' send slots.
It copies leased pages out of producers' memory.
"""

import itertools
import logging
import mmap
import os
import select
import socket
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_connector.errors import TransportError
from pd_connector.memory.pieces import Pieces, read_memory
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Landed, check_fits
from pd_connector.transport.keepalive import hang_up
from pd_connector.transport.shm.address import ShmAddress
from pd_connector.transport.shm.descriptors import map_slab, peer_process, send_fds
from pd_connector.transport.shm.producer_half import NOTE
from pd_connector.transport.shm.rendezvous import TOKEN_BYTES, Listener

logger = logging.getLogger("pd_connector.transport.shm.transport")

_MAX_NOTE_BYTES = 4096
_MAX_NOTES = 1024  # taken from one producer at a time
_HANG_UP_S = 0.05
"""Longest time between the end of a process's session and that of its links, on a machine that is not overloaded."""
_MOST_LINKS = 16
"""Connections of one producer. It makes one for each session, and one to a rank is enough."""


@dataclass(slots=True)
class ProducerPeer:
    """A producer that may write here, as long as a source names it.

    Attributes:
        sources: handles that `expect` has given out for it.
        links: sockets from it, one for each time it has connected.
        window: its sending slab as mapped here; None until its descriptor has arrived.
        problem: why the descriptor will not arrive.
        pid: its process id if the kernel lets this process read its memory; 0 if not; None before the first try.
    """

    address: ShmAddress
    sources: set[int] = field(default_factory=set)
    links: list[socket.socket] = field(default_factory=list)
    window: npt.NDArray[np.uint8] | None = None
    problem: str = ""
    pid: int | None = None

    def map_window(self, descriptors: tuple[int, ...]) -> bool:
        """Map the slab whose descriptor came first, and close all descriptors. Returns whether the
        producer has sent the descriptors that it announced. If this process had no free descriptor, the kernel has
        dropped them. The caller then closes the link, and the producer connects again."""
        nbytes = self.address.send_slots * self.address.send_slot_bytes
        mapped = [map_slab(descriptor, nbytes, mmap.ACCESS_READ) for descriptor in descriptors[:1]]
        for unused in descriptors[1:]:
            os.close(unused)
        window = mapped[0] if mapped else None
        if window is not None:
            self.window, self.problem = window, ""
        elif self.window is None:
            self.problem = "shm: the producer has not handed over a slab as it announced"
        return window is not None or not self.address.send_slots

    def hang_up(self, link: socket.socket) -> None:
        """The producer has closed this link."""
        link.close()
        self.links.remove(link)
        if not self.links:
            self.window = None
            self.problem = "shm: the producer has hung up"

    def probe(self) -> int:
        """Try to read the producer's token at the address that it has sent; returns the producer's
        process id if the kernel permits that, else 0."""
        pid = peer_process(self.links[0])
        seen = np.empty(TOKEN_BYTES, np.uint8)
        there = np.array([self.address.token_address], np.uint64)
        here = np.array([seen.ctypes.data], np.uint64)
        try:
            read_memory(pid, Pieces(there, TOKEN_BYTES), Pieces(here, TOKEN_BYTES))
        except OSError as error:
            logger.info("pages of a producer cannot be read in place: %s", error)
            return 0
        return pid if seen.tobytes() == self.address.token else 0


class _Read(NamedTuple):
    source: int
    send_slot: int
    nbytes: int
    slot: int
    header: bytes


class ConsumerHalf:
    """See the module.

    Args:
        landing: the slab that producers write into; its descriptor goes to those that are expected.
        pins: pins the producers' slabs, out of which chunks are copied to a GPU.
    """

    def __init__(self, landing: Slab, pins: Pins) -> None:
        self._landing = landing
        self._pins = pins
        self._listener = Listener()
        self._sources: dict[int, bytes] = {}  # the token of each source's producer
        self._producers: dict[bytes, ProducerPeer] = {}  # expected, by token
        # The producers that have connected. Most producers are on other machines, and
        # `poll` is called often.
        self._connected: dict[bytes, ProducerPeer] = {}
        self._numbers = itertools.count(1)  # of sources
        self._reads: list[_Read] = []

    @property
    def listener_name(self) -> str:
        return self._listener.name

    def expect(self, address: ShmAddress) -> int:
        """See `Transport.expect`."""
        source = next(self._numbers)
        self._sources[source] = address.token
        self._producers.setdefault(address.token, ProducerPeer(address)).sources.add(source)
        self._accept()
        return source

    def dismiss(self, source: Hashable) -> None:
        """See `Transport.dismiss`."""
        assert isinstance(source, int)
        producer = self._producers.get(self._sources.pop(source, b""))
        if producer is None:
            return
        self._reads = [read for read in self._reads if read.source != source]
        producer.sources.discard(source)
        if not producer.sources:
            del self._producers[producer.address.token]
            self._connected.pop(producer.address.token, None)
            for link in producer.links:
                hang_up(link)

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        """See `Transport.read`."""
        assert isinstance(source, int)
        producer = self._producer_of(source)
        if producer is None:
            raise TransportError("shm: no such producer (any more)")
        address = producer.address
        check_fits("the producer", send_slot, nbytes, address.send_slots, address.send_slot_bytes)
        check_fits("this engine", slot, nbytes, self._landing.slots, self._landing.slot_bytes)
        self._reads.append(_Read(source, send_slot, nbytes, slot, header))

    def direct(self, source: Hashable) -> bool:
        """Whether the kernel lets this process read the producer's memory. Tried once."""
        producer = self._producer_of(source)
        if producer is None or not producer.links or not producer.address.token_address:
            return False
        if producer.pid is None:
            producer.pid = producer.probe()
        return producer.pid > 0

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        """See `Transport.pull`."""
        producer = self._producer_of(source)
        # After it has closed its links, its process id may be another process's.
        if producer is None or not producer.links:
            raise TransportError("shm: no such producer (any more)")
        if not producer.pid:
            raise TransportError("shm: the producer's memory cannot be read")
        try:
            return read_memory(producer.pid, theirs, ours)
        except (OSError, ValueError) as error:
            raise TransportError(f"shm: {error}") from None

    def silenced(self, source: Hashable, *, waits: bool) -> bool:
        """Whether the producer has closed its links, or its process has ended: it copies no more then.

        Args:
            waits: its session broke just now. The kernel closes an ended process's sockets one by one, so the links are given a
                moment to follow.
        """
        producer = self._producer_of(source)
        if producer is None or not producer.links:
            return True
        poller = select.poll()
        for link in producer.links:
            poller.register(link, 0)  # hang-ups are always told
        standing, stop_s = len(producer.links), time.monotonic() + _HANG_UP_S * waits
        while standing:
            for descriptor, events in poller.poll(1e3 * max(stop_s - time.monotonic(), 0.0)):
                if events & select.POLLHUP:
                    poller.unregister(descriptor)
                    standing -= 1
            if time.monotonic() >= stop_s:
                break
        return not standing

    def poll(self) -> list[Landed]:
        """Accept producers that have connected; returns the chunks that have arrived."""
        self._accept()
        landed: list[Landed] = []
        for token, producer in list(self._connected.items()):
            for link in list(producer.links):
                landed += self._receive_notes(producer, link)
            if not producer.links:
                del self._connected[token]
        return landed + self._end_reads()

    @property
    def pollables(self) -> list[object]:
        links = (link for producer in self._connected.values() for link in producer.links)
        return [*self._listener.pollables, *(link.fileno() for link in links)]

    @property
    def restless(self) -> bool:
        ending = (self._producers[self._sources[read.source]] for read in self._reads)
        return any(producer.links or producer.problem for producer in ending)

    def close(self) -> None:
        for source in list(self._sources):
            self.dismiss(source)
        self._listener.close()

    def _producer_of(self, source: Hashable) -> ProducerPeer | None:
        assert isinstance(source, int)
        return self._producers.get(self._sources.get(source, b""))

    def _accept(self) -> None:
        """Exchange descriptors with the expected producers that have connected."""
        for connection in self._listener.accept(self._producers):
            producer = self._producers[connection.token]
            if len(producer.links) >= _MOST_LINKS:
                connection.close()
                continue
            if not producer.map_window(connection.descriptors):
                connection.link.close()
                continue
            try:
                send_fds(connection.link, b"\0", [self._landing.handle])
            except OSError:
                connection.link.close()
                continue
            producer.links.append(connection.link)
            self._connected[connection.token] = producer
            if producer.window is not None:
                self._pins.pin(producer.window, "slots of a producer", read_only=True)

    def _end_reads(self) -> list[Landed]:
        landed: list[Landed] = []
        waiting: list[_Read] = []
        for read in self._reads:
            producer = self._producers[self._sources[read.source]]
            if producer.window is not None:
                start = read.send_slot * producer.address.send_slot_bytes
                payload = producer.window.data[start : start + read.nbytes]
                landed.append(Landed(read.header, read.slot, payload))
            elif producer.problem:
                landed.append(Landed(read.header, read.slot, memoryview(b""), producer.problem))
            else:
                waiting.append(read)
        self._reads = waiting
        return landed

    def _receive_notes(self, producer: ProducerPeer, link: socket.socket) -> list[Landed]:
        """The chunks that the producer has copied into landing slots, according to its notes."""
        landed: list[Landed] = []
        for _ in range(_MAX_NOTES):
            try:
                note = link.recv(_MAX_NOTE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                note = b""
            if not note:
                producer.hang_up(link)
                break
            if len(note) < NOTE.size:
                continue
            slot, nbytes = NOTE.unpack_from(note)
            if slot < self._landing.slots and nbytes <= self._landing.slot_bytes:
                payload = self._landing.slot(slot, nbytes)
                landed.append(Landed(note[NOTE.size :], slot, payload))
        return landed
