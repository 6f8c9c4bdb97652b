# SPDX-License-Identifier: Apache-2.0
"""A consumer's sessions with producers: their connections, deadlines and heartbeats."""

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
"""Most sessions that are being opened at a time. Others are dialled later."""
_MANY_ADDRESSES = 16
"""Transfers with more addresses than this have half of the handshakes together, so that others do not wait."""
_ANSWERS_S = 0.03
"""Seconds after a heartbeat until sessions without an answer are read again. Most have answered by then."""
_DOUBT_S = 0.25
"""Seconds between two checks whether producers' machines acknowledge messages."""
_TRANSFERS_PER_HEARTBEAT = 256
"""Most transfers in one heartbeat, to keep it below `fields.MAX_MESSAGE_BYTES`. More transfers take several heartbeats."""


class OpenSessions:
    """A consumer's sessions, keyed by producer. Used by the agent's thread only.

    One epoll watches all sockets. ZeroMQ's descriptors signal changes, but not messages that are left to read. So a socket
    must be read again after every use (`ready`).
    """

    def __init__(self, config: Config, dialler: Dialler) -> None:
        self._config = config
        self._dialler = dialler
        self._sessions: dict[Source, OpenSession] = {}
        self._handshakes: set[Source] = set()
        # Producers to dial, each with a deadline: for transfers with few addresses, and with many.
        self._queues: tuple[dict[Source, float], dict[Source, float]] = ({}, {})
        self._epoll = select.epoll()
        self._descriptors: dict[
            int, tuple[OpenSession, bool]
        ] = {}  # and whether it is the monitor's
        self._used: dict[
            Source, OpenSession
        ] = {}  # their sockets were used, so they must be read again
        self._compiling: list[OpenSession] = []
        self._deadlines: Deadlines[Source] = Deadlines()
        self._awaiting: list[OpenSession] = []  # heartbeats were sent to them
        self._unanswered = 0  # sessions of `_awaiting` without an answer
        self.answers_due = math.inf
        """When to call `read_answers`."""
        # Messages were sent to them after their last message.
        self._unheard: dict[Source, OpenSession] = {}
        self._next_check = 0.0  # of `unanswered`

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
        """Whether messages wait that the poller does not signal."""
        if self._used:
            by_socket = {used.connection.socket: used for used in self._used.values()}
            readable = [by_socket[socket] for socket in readable_among(by_socket)]
            self._used = {session.source: session for session in readable}
        return bool(self._used)

    @property
    def compiling(self) -> bool:
        """Whether sessions wait for kernels to be compiled."""
        return bool(self._compiling)

    def compiling_sessions(self) -> list[OpenSession]:
        """The sessions that wait for kernels. Some kernels may be compiled by now."""
        self._compiling = [s for s in self._compiling if s.agreed and self.holds(s)]
        return list(self._compiling)

    def agreed(self, session: OpenSession) -> None:
        """The handshake has ended. The session begins when kernels for its routes are compiled."""
        self._compiling.append(session)

    @property
    def patience_s(self) -> float:
        """Seconds for which every producer keeps its session and leases without a heartbeat."""
        return min((session.patience_s for session in self._sessions.values()), default=math.inf)

    def get(self, source: Source) -> OpenSession | None:
        return self._sessions.get(source)

    def holds(self, session: OpenSession) -> bool:
        """Whether this is still the session with its producer."""
        return self._sessions.get(session.source) is session

    def dial(self, source: Source, addresses: int, now: float) -> None:
        """Open a session, if there is none: now, or later if too many sessions are being opened.

        Args:
            addresses: number of producer addresses of the transfer that needs the session.

        Raises RefusedError if the address is not allowed, or cannot be dialled.
        """
        if source in self._sessions:
            return
        many = addresses > _MANY_ADDRESSES
        if not self._has_room(many):
            self._queues[many].setdefault(source, now + self._config.connect_timeout_s)
            return
        connection = self._dialler.dial(source)
        session = OpenSession(source, connection, now + self._config.connect_timeout_s, now)
        self._sessions[source] = self._used[source] = session
        self._handshakes.add(source)
        self._deadlines.set(source, session.deadline)
        for socket in (connection.socket, connection.monitor):
            descriptor = int(socket.getsockopt(zmq.FD))
            self._descriptors[descriptor] = session, socket is connection.monitor
            self._epoll.register(descriptor, select.EPOLLIN)

    def next_queued(self, now: float) -> tuple[Source, int] | None:
        """Take the next producer to dial from the queue. Returns it with its transfer's number of addresses, 0 if it
        has waited too long; None if no producer can be dialled now."""
        for many, queue in enumerate(self._queues):
            if queue:
                source, deadline = next(iter(queue.items()))
                if deadline <= now or self._has_room(bool(many)):
                    del queue[source]
                    return source, 0 if deadline <= now else 1 + many * _MANY_ADDRESSES
        return None

    def _has_room(self, many: bool) -> bool:
        """Whether one more session can be opened now."""
        return len(self._handshakes) < (MOST_HANDSHAKES // 2 if many else MOST_HANDSHAKES)

    def ready(self) -> list[OpenSession]:
        """The sessions that may have messages to read."""
        ready, self._used = self._used, {}
        for descriptor, _ in self._epoll.poll(0):
            session, is_monitor = self._descriptors[descriptor]
            session.has_event |= is_monitor
            ready[session.source] = session
        return list(ready.values())

    def send(self, session: OpenSession, message: messages.Message) -> None:
        session.has_event |= not session.connection.send(messages.encode(message))
        self._used[session.source] = self._unheard[session.source] = session

    def send_heartbeats(
        self,
        transfers_of: Callable[[Source], tuple[str, ...]],
        now: float,
        next_s: float,
        *,
        hurried: bool,
    ) -> None:
        """Send every producer a heartbeat that lists its transfers; also a producer without transfers.

        Args:
            transfers_of: returns a producer's transfers; the same object until they change.
            next_s: seconds until the next call.
            hurried: whether to read answers and other messages at once instead of after `_ANSWERS_S`.
        """
        self._awaiting, self._unanswered = [], 0
        for session in self._sessions.values():
            if session.path is not None:
                self.send_heartbeat(session, transfers_of(session.source), now, next_s)
                if hurried:
                    self._used[session.source] = session
        if not self._awaiting:
            self.answers_due = math.inf

    def send_heartbeat(
        self, session: OpenSession, transfers: tuple[str, ...], now: float, next_s: float
    ) -> None:
        """Send one producer a heartbeat, as `send_heartbeats` does."""
        next_ms = int(1000 * next_s)
        if transfers:
            session.last_wanted = now
        if session.named is not transfers or session.next_ms != next_ms or not session.heartbeats:
            session.named, session.next_ms = transfers, next_ms
            session.heartbeats = _heartbeats(transfers, next_ms)
        for data in session.heartbeats:
            session.connection.send(data)
        self._unheard[session.source] = session
        if not session.awaits_answer:
            session.awaits_answer = True
            session.deadline = now + self._config.session_timeout_s
        self._awaiting.append(session)
        self._unanswered += 1
        self.answers_due = now + _ANSWERS_S

    def read_answers(self, now: float) -> None:
        """Read sessions without an answer again: ZeroMQ's descriptor may not have signalled it. Sessions that have not
        answered are lost at their deadline."""
        if now < self.answers_due:
            return
        for session in self._awaiting:
            if session.awaits_answer and self.holds(session):
                self._used[session.source] = session
                self._deadlines.set(session.source, session.deadline)
        self._awaiting, self.answers_due = [], math.inf

    def unanswered(self, now: float) -> list[OpenSession]:
        """The sessions whose connection does not reach the producer's machine any more."""
        if now < self._next_check or not self._unheard:
            return []
        self._next_check = now + _DOUBT_S
        return [s for s in self._unheard.values() if s.connection.is_unanswered]

    def received(self, session: OpenSession) -> list[bytes]:
        """Take messages that wait; more may follow. Usually a producer sends only its answer to a heartbeat, so one message
        is taken then. `urgent` finds further messages of all sessions together."""
        most = 1 if session.awaits_answer else MAX_BATCH
        messages_ = session.connection.receive(most)
        if len(messages_) >= most:
            self._used[session.source] = session
        return messages_

    def heard(self, session: OpenSession) -> None:
        """Note a message of the producer: it moves the session's deadline, except before `Welcome`."""
        self._unheard.pop(session.source, None)
        if session.path is not None:
            session.deadline = math.inf
            if session.awaits_answer:
                session.awaits_answer = False
                self._unanswered -= 1
                if not self._unanswered:
                    self._awaiting, self.answers_due = [], math.inf
            if self._handshakes and session.source in self._handshakes:
                self._handshakes.discard(session.source)
                self.look_again(session)

    def due(self, now: float) -> list[OpenSession]:
        """The sessions whose timer has passed. Their deadline may have moved meanwhile: the caller must call
        `look_again`."""
        return [self._sessions[source] for source in self._deadlines.due(now)]

    def look_again(self, session: OpenSession) -> None:
        """Set the timer for the session's next deadline: loss without messages, or idle for too long."""
        at = session.deadline
        if session.path is not None:
            idle = session.last_wanted + self._config.idle_timeout_s
            at = min(at, idle)
        self._deadlines.set(session.source, at)

    def lost(self, session: OpenSession) -> tuple[Cause, str] | None:
        """Why the connection has ended, as (cause, detail); None if it has not."""
        if not session.has_event:
            return None
        session.has_event = False
        return session.connection.lost()

    def oldest_idle(self, wants: Callable[[Source], bool]) -> OpenSession | None:
        """The session that has been idle longest, among those that no transfer needs; None if there is none."""
        idle = (s for s in self._sessions.values() if s.path and not wants(s.source))
        return min(idle, key=lambda session: session.last_wanted, default=None)

    def end_session(self, session: OpenSession) -> None:
        """Close the connection. Messages that were sent before are still delivered, if possible."""
        source, connection = session.source, session.connection
        self._sessions.pop(source)
        self._used.pop(source, None)
        self._unheard.pop(source, None)
        self._handshakes.discard(source)
        self._deadlines.discard(source)
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
