# SPDX-License-Identifier: Apache-2.0
"""Between processes of one user on one machine: each maps the other's slab.

The consumer listens on a Unix socket in the abstract namespace, which ends where the network
namespace ends: a producer elsewhere fails to connect, and the next transport is tried. Over the
socket the producer hands over its sending slab, for reading, and the consumer its landing slab to a
producer it expects. A written chunk is copied by the producer, which then tells; a chunk to read is
not copied at all, the consumer looks at it where it is. Of leased pages it asks the kernel for a copy
(`pull`). The kernel vouches for the peer's user; the token that names an expected producer has come
over the control channel.
"""

import itertools
import logging
import secrets
import select
import socket
from collections.abc import Hashable
from typing import NamedTuple

import msgspec
import numpy as np

from pd_connector.errors import TransportError
from pd_connector.memory.pieces import Pieces, copy_memory, read_memory
from pd_connector.memory.pins import Pins
from pd_connector.memory.shared_cache import SharedCache
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Landed, Link, Transport, Written, check_fits
from pd_connector.transport.shm.lobby import (
    TOKEN_BYTES,
    Lobby,
    call,
    give,
    peer_process,
)
from pd_connector.transport.shm.peers import (
    NOTE,
    ConsumerPeer,
    ProducerPeer,
    ShmAddress,
    read_address,
)

logger = logging.getLogger("pd_connector.transport.shm.transport")

_MAXNOTE_BYTES = 4096
_MAXNOTES = 1024  # taken from one producer at a time


class _Read(NamedTuple):
    source: int
    send_slot: int
    nbytes: int
    slot: int
    header: bytes


class ShmTransport(Transport):
    """See the module.

    Args:
        landing: slab that peers write into; must be shared (`Slab(..., shared=True)`).
        sending: slab that peers may read from, if it is shared.
        pins: take the producers' slabs, out of which chunks are copied to a GPU.
        cache: what peers may look at, if any.
    """

    name = "shm"
    one_sided = True
    copies = True
    readable = True

    def __init__(
        self,
        landing: Slab,
        sending: Slab,
        pins: Pins | None = None,
        cache: SharedCache | None = None,
    ) -> None:
        self._landing = landing
        self._sending = sending
        self._cache = cache
        self._pins = pins or Pins()
        self._lobby = Lobby()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._shown = np.frombuffer(self._token, np.uint8)  # its memory, which a peer may look at
        self._numbers = itertools.count(1)  # of writes and sources
        self._written: list[Written] = []
        self._consumers: dict[int, ConsumerPeer] = {}
        self._producers: dict[bytes, ProducerPeer] = {}  # expected, maybe connected
        self._sources: dict[int, bytes] = {}  # source: its producer's token
        self._reads: list[_Read] = []

    def address(self) -> bytes:
        landing, sending = self._landing, self._sending
        return msgspec.msgpack.encode(
            ShmAddress(
                self._lobby.name,
                self._token,
                landing.slots,
                landing.slot_bytes,
                sending.slots if sending.handle >= 0 else 0,
                sending.slot_bytes,
                self._shown.ctypes.data,
                self._cache.spans if self._cache else (),
            )
        )

    def connect(self, consumer: bytes) -> Link:
        address = read_address(consumer)
        try:
            link = call(address.listener, self._token, self._handles)
        except (OSError, ValueError) as error:
            raise TransportError(f"shm: consumer is not on this machine ({error})") from error
        self._consumers[link.fileno()] = ConsumerPeer(link, address.slots, address.slot_bytes)
        return link.fileno()

    def disconnect(self, route: Link) -> None:
        assert isinstance(route, int)
        consumer = self._consumers.pop(route, None)
        if consumer is not None:
            consumer.link.close()  # its window goes when the last view of it goes

    def expect(self, producer: bytes) -> Hashable:
        address = read_address(producer)
        source = next(self._numbers)
        self._sources[source] = address.token
        self._producers.setdefault(address.token, ProducerPeer(address)).sources.add(source)
        self._admit()
        return source

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, int)
        producer = self._producers.get(self._sources.pop(source, b""))
        if producer is None:
            return
        self._reads = [read for read in self._reads if read.source != source]
        producer.sources.discard(source)
        if not producer.sources:
            self._remove(producer)

    def write(self, route: Link, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(route, int)
        consumer = self._consumers.get(route)
        if consumer is None:
            raise TransportError("shm: no such consumer (any more)")
        check_fits("the consumer", slot, len(payload), consumer.slots, consumer.slot_bytes)
        token = next(self._numbers)
        problem = ""
        if consumer.window is None:
            consumer.waiting.append((header, bytes(payload), slot))
        else:
            problem = consumer.copy(header, payload, slot)
        self._written.append(Written(token, not problem, problem))
        return token

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        assert isinstance(source, int)
        producer = self._producer_of(source)
        if producer is None:
            raise TransportError("shm: no such producer (any more)")
        address = producer.address
        check_fits("the producer", send_slot, nbytes, address.send_slots, address.send_slot_bytes)
        check_fits("this engine", slot, nbytes, self._landing.slots, self._landing.slot_bytes)
        self._reads.append(_Read(source, send_slot, nbytes, slot, header))

    def direct(self, source: Hashable) -> bool:
        """Where the producer has shared its cache; or the kernel lets this process read the producer's
        memory, which some forbid (containers, `kernel.yama.ptrace_scope`). What is looked at is the
        token that the producer told."""
        producer = self._producer_of(source)
        if producer is None or not producer.links:
            return False
        if producer.cache is not None:
            return True
        if not producer.address.token_address:
            return False
        if producer.pid is None:
            producer.pid = self._probed(producer)
        return producer.pid > 0

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        producer = self._producer_of(source)
        # Once it has hung up, its number may be another process'.
        if producer is None or not producer.links:
            raise TransportError("shm: no such producer (any more)")
        try:
            if producer.cache is not None:
                return copy_memory(producer.cache.find(theirs), ours)
            if not producer.pid:
                raise TransportError("shm: the producer's memory cannot be read")
            return read_memory(producer.pid, theirs, ours)
        except (OSError, ValueError) as error:
            raise TransportError(f"shm: {error}") from None

    def silenced(self, source: Hashable) -> bool:
        """A producer that has closed its link, or whose process has ended, copies no more."""
        producer = self._producer_of(source)
        if producer is None or not producer.links:
            return True
        poller = select.poll()
        for link in producer.links:
            poller.register(link, select.POLLIN)
        hung_up = sum(bool(events & select.POLLHUP) for _, events in poller.poll(0))
        return hung_up == len(producer.links)

    def poll(self) -> tuple[list[Written], list[Landed]]:
        self._admit()
        for consumer in list(self._consumers.values()):
            if consumer.window is None:
                consumer.open_window()
            consumer.tell()
        landed: list[Landed] = []
        for producer in self._producers.values():
            for link in list(producer.links):
                landed += self._take_notes(producer, link)
        landed += self._end_reads()
        written, self._written = self._written, []
        return written, landed

    @property
    def pollables(self) -> list[object]:
        waiting = [c.link for c in self._consumers.values() if c.window is None]
        links = [link for producer in self._producers.values() for link in producer.links]
        return [*self._lobby.pollables, *(link.fileno() for link in (*waiting, *links))]

    @property
    def restless(self) -> bool:
        ending = (self._producers[self._sources[read.source]] for read in self._reads)
        return any(producer.links or producer.problem for producer in ending) or any(
            consumer.notes for consumer in self._consumers.values()
        )

    def close(self) -> None:
        for route in list(self._consumers):
            self.disconnect(route)
        for source in list(self._sources):
            self.dismiss(source)
        self._lobby.close()

    def _producer_of(self, source: Hashable) -> ProducerPeer | None:
        assert isinstance(source, int)
        return self._producers.get(self._sources.get(source, b""))

    @property
    def _handles(self) -> list[int]:
        """Of what peers may read, in the order in which they take it."""
        handles = [self._sending.handle, self._cache.handle if self._cache else -1]
        return list(itertools.takewhile(lambda handle: handle >= 0, handles))

    def _admit(self) -> None:
        """Exchange memory with the expected producers that have called."""
        for guest in self._lobby.admit(self._producers):
            producer = self._producers[guest.token]
            try:
                give(guest.link, b"\0", [self._landing.handle])
            except OSError:
                guest.leave()
                continue
            producer.links.append(guest.link)
            producer.take(guest.descriptors)
            if producer.window is not None:
                self._pins.add(producer.window, "slots of a producer", read_only=True)

    @staticmethod
    def _probed(producer: ProducerPeer) -> int:
        """The producer's process, if its memory can be read, else 0."""
        pid = peer_process(producer.links[0])
        seen = np.empty(TOKEN_BYTES, np.uint8)
        there = np.array([producer.address.token_address], np.uint64)
        here = np.array([seen.ctypes.data], np.uint64)
        try:
            read_memory(pid, Pieces(there, TOKEN_BYTES), Pieces(here, TOKEN_BYTES))
        except OSError as error:
            logger.info("pages of a producer are not read where they lie: %s", error)
            return 0
        return pid if seen.tobytes() == producer.address.token else 0

    def _remove(self, producer: ProducerPeer) -> None:
        del self._producers[producer.address.token]
        for link in producer.links:
            link.close()

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

    def _take_notes(self, producer: ProducerPeer, link: socket.socket) -> list[Landed]:
        landed: list[Landed] = []
        for _ in range(_MAXNOTES):
            try:
                note = link.recv(_MAXNOTE_BYTES)
            except BlockingIOError:
                return landed
            except OSError:
                note = b""
            if not note:
                link.close()
                producer.links.remove(link)
                if not producer.links:
                    producer.window = producer.cache = None
                    producer.problem = "shm: the producer has hung up"
                return landed
            if len(note) < NOTE.size:
                continue
            slot, nbytes = NOTE.unpack_from(note)
            if slot < self._landing.slots and nbytes <= self._landing.slot_bytes:
                header = note[NOTE.size :]
                landed.append(Landed(header, slot, self._landing.slot(slot, nbytes)))
        return landed
