# SPDX-License-Identifier: Apache-2.0
"""A producer's view of one consumer: its links, its connection, and the writes to it."""

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_connector.errors import TransportError
from pd_connector.memory.pieces import Pieces
from pd_connector.transport.base import Written, check_fits
from pd_connector.transport.tcp.address import TcpAddress
from pd_connector.transport.tcp.cipher import Handshake
from pd_connector.transport.tcp.connection import BrokenError, Common, Connection
from pd_connector.transport.tcp.events import Acked, Greeted
from pd_connector.transport.tcp.frames import NONCE_BYTES, ChunkHead, DialFrame
from pd_connector.transport.tcp.listening import HANDSHAKE_S
from pd_connector.transport.tcp.sending import ChunkWrite, SealedWrite

logger = logging.getLogger("pd_connector.transport.tcp")

_MAX_CANDIDATES = 4


@dataclass(slots=True)
class _Link:
    """One `connect`. A consumer whose session broke may be connected twice for a while.

    Attributes:
        greeted: the consumer's dial, or a greeting of its own, has arrived: it takes chunks.
        writes: chunks that have not been acknowledged, by token.
    """

    greeted: bool
    writes: dict[int, ChunkWrite | SealedWrite] = field(default_factory=dict)


class ConsumerPeer:
    """A consumer, from the first `connect` to the last `disconnect`.

    References to chunks wait for it, at most twice as many as it has slots. The chunks are not copied.

    Args:
        address: its own.
        listener: ours.
        shared: secret of all engines; empty without a key.
        written: called at the end of every write.
    """

    def __init__(
        self,
        address: TcpAddress,
        listener: TcpAddress,
        shared: bytes,
        common: Common,
        written: Callable[[Written], None],
    ) -> None:
        self.address = address
        self._listener = listener
        self._shared = shared
        self._common = common
        self._written = written
        self._links: dict[int, _Link] = {}
        self._connection: Connection | None = None
        self._early = False  # it has greeted, and no link was there to be opened
        self._candidates: dict[_Candidate, None] = {}

    @property
    def links(self) -> int:
        return len(self._links)

    def connect(self, link: int) -> None:
        # A greeting opens the links that wait for it, or the next one. A greeting that has opened
        # a link opens no later one: its connection may have ended since.
        self._links[link] = _Link(greeted=self._early)
        self._early = False

    def disconnect(self, link: int) -> None:
        """Forget a link. If a chunk of the link has begun, the connection ends: the chunk's payload must not be
        read any more, and the part that was sent cannot be taken back."""
        gone = self._links.pop(link)
        begun = [t for t in gone.writes if not self._withdraw(gone, t)]
        for token in gone.writes:
            self._written(Written(token, False, "tcp write: the consumer was disconnected"))
        if begun or not self._links:
            self._lose("a session with it has ended")

    def seal(
        self, link: int, head: ChunkHead, pieces: Pieces, into: memoryview
    ) -> SealedWrite | None:
        """Encrypt a chunk for the connection that stands, to be written next; None where it has to
        be written as it is. Raises TransportError if the consumer cannot take it."""
        self._check(link, head)
        if not self._links[link].greeted or self._connection is None:
            return None
        sending = self._connection.sending
        return sending.seal(head, pieces, into) if sending.can_seal else None

    def write(self, link: int, chunk: ChunkWrite | SealedWrite, now: float) -> None:
        """Raises TransportError if the consumer cannot take it."""
        self._check(link, chunk.head)
        to = self._links[link]
        to.writes[chunk.head.token] = chunk
        if to.greeted and self._connection is not None:
            self._connection.sending.queue(chunk)
            self._send(now)

    def _check(self, link: int, head: ChunkHead) -> None:
        to = self._links[link]
        limits = self.address.slots, self.address.slot_bytes
        check_fits("tcp transport: the consumer", head.slot, head.nbytes, *limits)
        # An acknowledgement may be overtaken by the slot's next grant, on the control channel.
        if len(to.writes) >= 2 * self.address.slots:
            raise TransportError(
                f"tcp transport: {len(to.writes)} writes wait for a consumer with "
                f"{self.address.slots} slots"
            )

    def dialled(self, sock: socket.socket, dial: DialFrame, now: float) -> None:
        """The consumer has dialled. The connection counts only after a record sealed with its keys: the dial itself can
        be a replay by another program."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = Handshake(self._shared, self.address, self._listener, dial, nonce)
        try:
            sock.send(handshake.answer())  # a new socket has room for it
        except OSError:
            self._common.watch.close_socket(sock)
            return
        candidate = _Candidate(self, now + HANDSHAKE_S)
        seals = handshake.listener_seals() if handshake.sealed else None
        candidate.connection = Connection(
            sock,
            self._common,
            candidate,
            seals,
            None,
            self.address.record_bytes,
            now,
        )
        self._candidates[candidate] = None
        if len(self._candidates) > _MAX_CANDIDATES:
            self.reject(next(iter(self._candidates)))

    def confirmed(self, candidate: "_Candidate", now: float) -> None:
        """The dialler has proven to be live: this connection replaces any earlier connection."""
        assert candidate.connection is not None
        del self._candidates[candidate]
        self._lose("it has dialled again")
        self._connection = candidate.connection

    def reject(self, candidate: "_Candidate") -> None:
        assert candidate.connection is not None
        if self._candidates.pop(candidate, self) is None:
            candidate.connection.close()

    def heard(self, connection: Connection, events: list[object], now: float) -> None:
        """Its connection has brought this."""
        for event in events:
            if connection is not self._connection:
                return
            if isinstance(event, Greeted):
                self._greeted(now)
            elif isinstance(event, Acked):
                self._acked(event.token)

    def lost(self, connection: Connection, why: str) -> None:
        if connection is self._connection:
            self._lose(why)

    def tick(self, now: float) -> None:
        for candidate in [each for each in self._candidates if each.deadline <= now]:
            self.reject(candidate)
        if self._connection is not None:
            try:
                self._connection.tick(now)
            except BrokenError as error:
                self._lose(str(error))

    def give_up(self, why: str, now: float) -> None:
        self._lose(why)

    def close(self) -> None:
        for candidate in list(self._candidates):
            self.reject(candidate)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _greeted(self, now: float) -> None:
        waiting = [link for link in self._links.values() if not link.greeted]
        self._early = not waiting
        assert self._connection is not None
        for link in waiting:
            link.greeted = True
            for chunk in link.writes.values():
                self._connection.sending.queue(chunk)
        self._send(now)

    def _acked(self, token: int) -> None:
        assert self._connection is not None
        if self._connection.sending.sent(token):
            for link in self._links.values():
                if link.writes.pop(token, None) is not None:
                    self._written(Written(token, True, ""))
                    return
        self._lose("it acknowledged what was not written")

    def _send(self, now: float) -> None:
        assert self._connection is not None
        try:
            self._connection.send(now)
        except BrokenError as error:
            self._lose(str(error))

    def _withdraw(self, link: _Link, token: int) -> bool:
        """Whether no byte of this write has been sent, nor will be."""
        if not link.greeted or self._connection is None:
            return True
        return self._connection.sending.withdraw(token)

    def _lose(self, why: str) -> None:
        """The connection ends, and with it what was written over it. Chunks that had not begun end
        too: their transfer has failed with the others."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self._early = False
        failed = 0
        for link in self._links.values():
            if link.greeted:
                link.greeted = False
                failed += len(link.writes)
                for token in link.writes:
                    self._written(Written(token, False, f"tcp write: connection lost: {why}"))
                link.writes.clear()
        if failed:
            logger.warning("tcp connection from %s lost: %s", self.address.host, why)


class _Candidate:
    """Owner of a connection that has not proven to be live yet."""

    def __init__(self, consumer: ConsumerPeer, deadline: float) -> None:
        self._consumer = consumer
        self.deadline = deadline
        self.connection: Connection | None = None
        self._is_confirmed = False

    def ready(self, now: float) -> None:
        assert self.connection is not None
        try:
            events = self.connection.exchange(now)
        except BrokenError as error:
            self.give_up(str(error), now)
            return
        if events and not self._is_confirmed:
            self._is_confirmed = True
            self._consumer.confirmed(self, now)
        self._consumer.heard(self.connection, list(events), now)

    def give_up(self, why: str, now: float) -> None:
        assert self.connection is not None
        self._consumer.reject(self)
        self._consumer.lost(self.connection, why)
