# SPDX-License-Identifier: Apache-2.0
"""The tcp transport as the agent calls it. The work is done by the other modules of this package."""

import functools
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Hashable
from typing import Self

from pd_connector.errors import TransportError
from pd_connector.hosts import port_range
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Landed, Link, Transport, TransportParts, Written
from pd_connector.transport.tcp.address import (
    IDENTITY_BYTES,
    SECRET_BYTES,
    TcpAddress,
    read_address,
)
from pd_connector.transport.tcp.cipher import fast_aes
from pd_connector.transport.tcp.connection import Common, Pace
from pd_connector.transport.tcp.consumer import ConsumerPeer
from pd_connector.transport.tcp.frames import (
    MAX_HEADER_BYTES,
    RECORD_BYTES,
    ChunkHead,
    DialFrame,
)
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.listening import Listening
from pd_connector.transport.tcp.producer import ProducerPeer
from pd_connector.transport.tcp.segments import Segments
from pd_connector.transport.tcp.sending import ChunkWrite, SealedWrite
from pd_connector.transport.tcp.watch import Owner, Watch

logger = logging.getLogger("pd_connector.transport.tcp")

_TICK_S = 0.05
"""How often deadlines are looked at, at most."""
_MAX_SLOT = (1 << 32) - 1


class TcpTransport(Transport):
    """See the package.

    Args:
        landing: memory that chunks land in, which no peer can write by itself.
        sending: memory that chunks are sent from, which no peer can write either.
        host: name or address to listen on; peers get its numeric address.
        permits: whether a host may be dialled (`Config.permits`).
        shared: secret of all engines, from which keys are derived; empty for plaintext.
        pace: heartbeats of connections.

    Raises:
        TransportError: the host cannot be listened on.
    """

    name = "tcp2"
    label = "tcp"
    one_sided = False
    private_slots = True
    prepares = True

    def __init__(
        self,
        landing: Slab,
        sending: Slab,
        host: str,
        permits: Callable[[str], bool],
        shared: bytes = b"",
        pace: Pace = Pace(1.0, 5.0),  # noqa: B008
        ports: range = range(1),
    ) -> None:
        self.sends_from = sending
        self.verifies = bool(shared)
        self._shared = shared
        self._permits = permits
        self._landing = Landing(landing)
        self._numbers = itertools.count(1)  # of writes, links and sources
        self._consumers: dict[bytes, ConsumerPeer] = {}  # by identity
        self._producers: dict[bytes, ProducerPeer] = {}
        self._links: dict[int, ConsumerPeer] = {}
        self._sources: dict[int, ProducerPeer] = {}
        self._written: list[Written] = []
        self._landed: list[Landed] = []
        self._next_tick = 0.0
        self._watch = Watch()
        self._common = Common(self._watch, Segments(), pace)
        try:
            self._listening = Listening(host, ports, self._watch, pace, self._introduce)
        except OSError as error:
            self._watch.close()
            raise TransportError(
                f"tcp transport cannot listen on {host!r}: {error}; set `host` to a name or address of "
                "this machine, and `data_port` to ports that are free (config keys host, data_port)"
            ) from error
        self.port = self._listening.port
        self._address = TcpAddress(
            self._listening.host,
            self._listening.port,
            secrets.token_bytes(IDENTITY_BYTES),
            secrets.token_bytes(SECRET_BYTES),
            landing.slots,
            landing.slot_bytes,
            fast_aes(),
            RECORD_BYTES,
            True,
        )
        self._listening.open(shared, self._address)

    @classmethod
    def make(cls, parts: TransportParts) -> Self:
        config, keys, buffers = parts.config, parts.keys, parts.buffers
        # A dead connection is found, and its transfers fail, before its session counts as lost.
        silence_s = max(config.session_timeout_s / 2, 2 * config.heartbeat_s)
        return cls(
            buffers.private_landing,
            buffers.private_sending,
            config.host,
            config.permits,
            shared=keys.server_secret + keys.client_secret if keys else b"",
            pace=Pace(config.heartbeat_s, silence_s),
            ports=port_range(config.data_port),
        )

    def address(self) -> bytes:
        return self._address.encode()

    def connect(self, consumer: bytes) -> Link:
        address = read_address(consumer)
        peer = self._consumers.get(address.identity)
        if peer is None:
            ends = address, self._address, self._shared
            peer = ConsumerPeer(*ends, self._common, self._written.append)
            self._consumers[address.identity] = peer
        elif peer.address != address:
            raise TransportError("tcp transport: two consumers have one identity")
        link = next(self._numbers)
        peer.connect(link)
        self._links[link] = peer
        self._listening.connected(address.identity, time.monotonic())
        return link

    def disconnect(self, link: Link) -> None:
        assert isinstance(link, int)
        consumer = self._links.pop(link, None)
        if consumer is None:
            return
        consumer.disconnect(link)
        if not consumer.links:
            consumer.close()
            del self._consumers[consumer.address.identity]

    def expect(self, producer: bytes) -> Hashable:
        address = read_address(producer)
        if not self._permits(address.host):
            raise TransportError(
                f"tcp transport: {address.host!r} is not loopback and no key is set"
            )
        peer = self._producers.get(address.identity)
        if peer is None:
            ends = address, self._address, self._shared
            peer = ProducerPeer(*ends, self._common, self._landing, self._landed.append)
            self._producers[address.identity] = peer
        elif peer.address.secret != address.secret:
            raise TransportError("tcp transport: two producers have one identity")
        source = next(self._numbers)
        self._sources[source] = peer
        peer.expect(source, time.monotonic())
        return source

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, int)
        producer = self._sources.pop(source, None)
        if producer is None:
            return
        producer.sources.discard(source)
        if not producer.sources:
            producer.close()
            del self._producers[producer.address.identity]

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        head = self._head(link, header, payload.nbytes, slot)
        return self._write(link, ChunkWrite(head, payload))

    def prepare(
        self, link: Link, header: bytes, pieces: Pieces, slot: int, into: memoryview
    ) -> Callable[[], int] | None:
        assert isinstance(link, int)
        head = self._head(link, header, pieces.nbytes, slot)
        sealed = self._links[link].seal(link, head, pieces, into)
        return None if sealed is None else functools.partial(self._write, link, sealed)

    def _head(self, link: Link, header: bytes, nbytes: int, slot: int) -> ChunkHead:
        if link not in self._links:
            raise TransportError("tcp transport: no such consumer (any more)")
        if len(header) > MAX_HEADER_BYTES or not 0 <= slot <= _MAX_SLOT:
            raise TransportError(
                f"tcp transport: a header of {len(header)} bytes, slot {slot}: a header has "
                f"{MAX_HEADER_BYTES} bytes at most"
            )
        return ChunkHead(next(self._numbers), nbytes, slot, header)

    def _write(self, link: Link, chunk: ChunkWrite | SealedWrite) -> int:
        assert isinstance(link, int)
        self._links[link].write(link, chunk, time.monotonic())
        return chunk.head.token

    def poll(self) -> tuple[list[Written], list[Landed]]:
        now = time.monotonic()
        self._landing.destinations = self.destinations
        self._landing.recycle()
        if self._landing.starved:
            self._landing.starved = False
            for producer in list(self._producers.values()):
                self._attempt(producer, producer.resume, now)
        for owner in self._watch.ready():
            self._attempt(owner, owner.ready, now)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._listening.tick(now)
            for peer in self._peers:
                self._attempt(peer, peer.tick, now)
        written, landed = self._written[:], self._landed[:]
        self._written.clear()  # consumers and producers hold on to these lists
        self._landed.clear()
        return written, landed

    def _attempt(
        self, owner: Owner | ConsumerPeer, work: Callable[[float], None], now: float
    ) -> None:
        """An error of one connection ends that connection, and nothing else."""
        try:
            work(now)
        except Exception as error:
            logger.exception("tcp connection failed")
            owner.give_up(f"an unexpected error: {error!r}", now)

    @property
    def pollables(self) -> list[object]:
        return [self._watch.fileno()]

    @property
    def restless(self) -> bool:
        return self._landing.starved

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._listening.close()
        self._watch.close()
        for table in (self._consumers, self._producers, self._links, self._sources):
            table.clear()

    @property
    def _peers(self) -> list[ConsumerPeer | ProducerPeer]:
        return [*self._consumers.values(), *self._producers.values()]

    def _introduce(self, sock: socket.socket, dial: DialFrame, now: float) -> bool:
        """A dialler has proven that it knows our secret."""
        consumer = self._consumers.get(dial.dialler)
        if consumer is None:
            return False
        consumer.dialled(sock, dial, now)
        return True
