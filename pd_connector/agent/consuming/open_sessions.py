# SPDX-License-Identifier: Apache-2.0
"""A consumer's sessions with producers, from dialling to their end: connections and deadlines."""

import math
import select
from collections.abc import Callable, Iterator

import zmq

from pd_connector.agent.consuming.dialler import Dialler
from pd_connector.agent.consuming.open_session import OpenSession
from pd_connector.config import Config
from pd_connector.control.addresses import readable_among
from pd_connector.control.sockets import MAX_BATCH
from pd_connector.errors import Cause
from pd_connector.protocol.deadlines import Deadlines
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

MOST_SESSIONS = 512
MOST_HANDSHAKES = 64
"""Sessions that are being opened at a time; others are dialled when one of these has ended."""
_MANY_ADDRESSES = 16
"""Transfers with more addresses than this share half of the places, so they do not keep others waiting."""
_ANSWERS_S = 0.03
"""Most answers to a heartbeat have come by then. The sessions without an answer are looked at."""
_DOUBT_S = 0.25
"""Time between two looks at whether the machines of producers acknowledge what was said to them."""
_TRANSFERS_PER_HEARTBEAT = 256
"""Keeps heartbeats below `messages.MAX_MESSAGE_BYTES`; there are several if more are wanted."""


class OpenSessions:
    """All of them, by producer. Used by the agent's thread only.

    Sockets are watched by one epoll. ZeroMQ's descriptors tell of changes, and not of what is left
    to read: after every use of a socket it must be looked at again (`ready`).
    """

    def __init__(self, config: Config, dialler: Dialler) -> None:
        self._config = config
        self._dialler = dialler
        self._sessions: dict[Source, OpenSession] = {}
        self._handshakes: set[Source] = set()
        # Not dialled yet, and by when they must be: for transfers with few addresses, and others.
        self._queues: tuple[dict[Source, float], dict[Source, float]] = ({}, {})
        self._epoll = select.epoll()
        self._descriptors: dict[int, tuple[OpenSession, bool]] = {}  # and whether of its monitor
        self._used: dict[Source, OpenSession] = {}  # since they were last looked at
        self._compiling: list[OpenSession] = []
        self._looks: Deadlines[Source] = Deadlines()
        self._asked: list[OpenSession] = []  # to which heartbeats went out
        self._unanswered = 0  # of them
        self.answers_due = math.inf
        """When to `look_for_answers`."""
        self._doubted: dict[
            Source, OpenSession
        ] = {}  # they have not spoken since they were spoken to
        self._next_doubt = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[OpenSession]:
        """Every session that exists when the iteration begins."""
        return iter(list(self._sessions.values()))

    @property
    def pollables(self) -> list[object]:
        return [self._epoll.fileno()]

    @property
    def urgent(self) -> bool:
        """Whether messages wait that the poller will not tell of."""
        if self._used:
            by_socket = {used.connection.socket: used for used in self._used.values()}
            found = [by_socket[socket] for socket in readable_among(by_socket)]
            self._used = {session.source: session for session in found}
        return bool(self._used)

    @property
    def compiling(self) -> bool:
        """Whether sessions wait for kernels to be compiled."""
        return bool(self._compiling)

    def compiling_sessions(self) -> list[OpenSession]:
        """Sessions that wait for kernels; some may be compiled by now."""
        self._compiling = [s for s in self._compiling if s.agreed and self.holds(s)]
        return list(self._compiling)

    def agreed(self, session: OpenSession) -> None:
        """A session stands once kernels for its routes are compiled."""
        self._compiling.append(session)

    @property
    def patience_s(self) -> float:
        """How long every producer keeps its session and leases without a heartbeat."""
        return min((session.patience_s for session in self._sessions.values()), default=math.inf)

    def get(self, source: Source) -> OpenSession | None:
        return self._sessions.get(source)

    def holds(self, session: OpenSession) -> bool:
        """Whether this is still the session with its producer."""
        return self._sessions.get(session.source) is session

    def dial(self, source: Source, addresses: int, now: float) -> None:
        """Open a session, now or when fewer are being opened; nothing, if there is one.

        Args:
            addresses: of the transfer that wants it.

        Raises RefusedError if the address is not allowed, or cannot be dialled.
        """
        if source in self._sessions:
            return
        many = addresses > _MANY_ADDRESSES
        if not self._place(many):
            self._queues[many].setdefault(source, now + self._config.connect_timeout_s)
            return
        connection = self._dialler.dial(source)
        session = OpenSession(source, connection, now + self._config.connect_timeout_s, now)
        self._sessions[source] = self._used[source] = session
        self._handshakes.add(source)
        self._looks.set(source, session.deadline)
        for socket in (connection.socket, connection.monitor):
            descriptor = int(socket.getsockopt(zmq.FD))
            self._descriptors[descriptor] = session, socket is connection.monitor
            self._epoll.register(descriptor, select.EPOLLIN)

    def next_queued(self, now: float) -> tuple[Source, int] | None:
        """A producer whose turn to be dialled has come, taken from the queue, and for how many
        addresses; None if none can be dialled. A producer that is too late has no addresses."""
        for many, queue in enumerate(self._queues):
            if queue:
                source, deadline = next(iter(queue.items()))
                if deadline <= now or self._place(bool(many)):
                    del queue[source]
                    return source, 0 if deadline <= now else 1 + many * _MANY_ADDRESSES
        return None

    def _place(self, many: bool) -> bool:
        """Whether one more session can be opened now."""
        return len(self._handshakes) < (MOST_HANDSHAKES // 2 if many else MOST_HANDSHAKES)

    def ready(self) -> list[OpenSession]:
        """Sessions that may have something to read."""
        ready, self._used = self._used, {}
        for descriptor, _ in self._epoll.poll(0):
            session, is_monitor = self._descriptors[descriptor]
            session.has_event |= is_monitor
            ready[session.source] = session
        return list(ready.values())

    def send(self, session: OpenSession, message: messages.Message) -> None:
        session.has_event |= not session.connection.send(messages.encode(message))
        self._used[session.source] = self._doubted[session.source] = session

    def send_heartbeats(
        self,
        wanted: Callable[[Source], tuple[str, ...]],
        now: float,
        next_s: float,
        *,
        hurried: bool,
    ) -> None:
        """Speak for what is wanted of each producer, and for the session itself if that is nothing.

        Args:
            wanted: transfers of a producer; the same object until they change.
            next_s: when this will be called again.
            hurried: answers, and what may come with them, cannot wait for `_ANSWERS_S`.
        """
        self._asked, self._unanswered = [], 0
        for session in self._sessions.values():
            if session.path is not None:
                self.send_heartbeat(session, wanted(session.source), now, next_s)
                if hurried:
                    self._used[session.source] = session
        if not self._asked:
            self.answers_due = math.inf

    def send_heartbeat(
        self, session: OpenSession, transfers: tuple[str, ...], now: float, next_s: float
    ) -> None:
        """As `send_heartbeats`, to one producer."""
        next_ms = int(1000 * next_s)
        if transfers:
            session.last_wanted = now
        if session.named is not transfers or session.next_ms != next_ms or not session.heartbeats:
            session.named, session.next_ms = transfers, next_ms
            session.heartbeats = _heartbeats(transfers, next_ms)
        for data in session.heartbeats:
            session.connection.send(data)
        self._doubted[session.source] = session
        if not session.asked:
            session.asked = True
            session.deadline = now + self._config.session_timeout_s
        self._asked.append(session)
        self._unanswered += 1
        self.answers_due = now + _ANSWERS_S

    def look_for_answers(self, now: float) -> None:
        """Look at the sessions that were asked and are not known to have answered, because ZeroMQ's
        descriptor may not have told of an answer. Silent sessions are lost at their deadline."""
        if now < self.answers_due:
            return
        for session in self._asked:
            if session.asked and self.holds(session):
                self._used[session.source] = session
                self._looks.set(session.source, session.deadline)
        self._asked, self.answers_due = [], math.inf

    def unanswered(self, now: float) -> list[OpenSession]:
        """Sessions whose connection does not reach the producer's machine any more."""
        if now < self._next_doubt or not self._doubted:
            return []
        self._next_doubt = now + _DOUBT_S
        return [each for each in self._doubted.values() if each.connection.is_unanswered]

    def received(self, session: OpenSession) -> list[bytes]:
        """Messages that wait; more may follow. A producer that was asked mostly sends its answer and
        nothing else, so it is read once. Whether there is more is looked up for all of them together."""
        most = 1 if session.asked else MAX_BATCH
        messages_ = session.connection.receive(most)
        if len(messages_) >= most:
            self._used[session.source] = session
        return messages_

    def heard(self, session: OpenSession, now: float) -> None:
        """The producer has spoken. Before the session stands only `Welcome` counts."""
        self._doubted.pop(session.source, None)
        if session.path is not None:
            session.deadline = math.inf
            if session.asked:
                session.asked = False
                self._unanswered -= 1
                if not self._unanswered:
                    self._asked, self.answers_due = [], math.inf
            if self._handshakes and session.source in self._handshakes:
                self._handshakes.discard(session.source)
                self.look_again(session)

    def due(self, now: float) -> list[OpenSession]:
        """Sessions to look after: a deadline may have passed. `look_again` must follow."""
        return [self._sessions[source] for source in self._looks.due(now)]

    def look_again(self, session: OpenSession) -> None:
        """Look after this session when it may be lost, or idle for too long."""
        at = session.deadline
        if session.path is not None:
            idle = session.last_wanted + self._config.idle_timeout_s
            at = min(at, idle)
        self._looks.set(session.source, at)

    def lost(self, session: OpenSession) -> tuple[Cause, str] | None:
        """Why the connection has gone; None while it is there."""
        if not session.has_event:
            return None
        session.has_event = False
        return session.connection.lost()

    def oldest_idle(self, wants: Callable[[Source], bool]) -> OpenSession | None:
        """The session that has been idle longest, among those whose producers nothing is wanted of."""
        idle = (s for s in self._sessions.values() if s.path and not wants(s.source))
        return min(idle, key=lambda session: session.last_wanted, default=None)

    def end_session(self, session: OpenSession) -> None:
        """Close the connection; what was sent before is still delivered, if that is possible."""
        source, connection = session.source, session.connection
        self._sessions.pop(source)
        self._used.pop(source, None)
        self._doubted.pop(source, None)
        self._handshakes.discard(source)
        self._looks.discard(source)
        for socket in (connection.socket, connection.monitor):
            descriptor = int(socket.getsockopt(zmq.FD))
            del self._descriptors[descriptor]
            self._epoll.unregister(descriptor)
        connection.close()

    def close(self) -> None:
        for session in self:
            self.end_session(session)
        self._epoll.close()


def _heartbeats(transfers: tuple[str, ...], next_ms: int) -> tuple[bytes, ...]:
    size = _TRANSFERS_PER_HEARTBEAT
    parts = (transfers[first : first + size] for first in range(0, max(1, len(transfers)), size))
    return tuple(messages.encode(messages.Heartbeat(list(part), next_ms)) for part in parts)
