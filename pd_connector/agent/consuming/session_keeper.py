# SPDX-License-Identifier: Apache-2.0
"""Keeps a consumer's sessions with producers: dials, handles their messages, sends heartbeats, ends them."""

import logging
from collections.abc import Callable, Sequence

from pd_connector.agent.confined import confined
from pd_connector.agent.consuming.dialler import Dialler
from pd_connector.agent.consuming.open_session import OpenSession
from pd_connector.agent.consuming.open_sessions import MOST_SESSIONS, OpenSessions
from pd_connector.agent.consuming.outage import OutageWatch, named_for_what_it_is
from pd_connector.agent.consuming.receive_pipeline import ReceivePipeline
from pd_connector.agent.handshake import RefusedError
from pd_connector.agent.resources import RankResources
from pd_connector.control.liveness import UNANSWERED
from pd_connector.errors import Cause, MalformedMessageError, TransportError
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Action
from pd_connector.protocol.consuming.peer_backoff import PeerBackoff
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

logger = logging.getLogger("pd_connector.agent.consuming.session_keeper")

_SESSIONS_PER_HEARTBEAT = 16
"""With more sessions than this, the time between heartbeats is longer than `heartbeat_s`."""
_LATEST = 2 / 3
"""Longest time between heartbeats, as a part of producers' patience. The rest is a reserve for busy machines."""
_SOONEST_S = 0.05
"""Shortest time between heartbeats, in seconds, whatever a producer asks."""


class SessionKeeper:
    """Used by the agent's thread only.

    Args:
        sessions: the open sessions. Only this object adds and ends them.
        act: carries out the state machine's actions.
        read: fetches a chunk that a producer left to be read.
    """

    def __init__(
        self,
        resources: RankResources,
        dialler: Dialler,
        sessions: OpenSessions,
        consumer: Consumer,
        receive_pipeline: ReceivePipeline,
        outage: OutageWatch,
        act: Callable[[Sequence[Action], float], None],
        read: Callable[[OpenSession, messages.LeftInSlot | messages.LeftInPages, float], None],
    ) -> None:
        self._config = resources.config
        self._cache = resources.cache
        self._telemetry = resources.telemetry
        self._dialler = dialler
        self._sessions = sessions
        self._consumer = consumer
        self._receive_pipeline = receive_pipeline
        self._outage = outage
        self._act = act
        self._read = read
        self._next_heartbeat = 0.0
        self._peer_backoff = PeerBackoff(resources.config.connect_timeout_s)
        self.only_pulses = False
        """Whether the last `receive` found only answers to heartbeats."""

    def receive(self, now: float) -> None:
        """Handle every message that waits, and every connection that broke."""
        ready = self._sessions.ready()
        self.only_pulses = bool(ready)
        for session in ready:
            self._attempt(self._receive, session, now)

    def _receive(self, session: OpenSession, now: float) -> None:
        for data in self._sessions.received(session):
            try:
                message = messages.decode_producer_message(data)
            except MalformedMessageError as error:
                self.end_session(session, Cause.MALFORMED_MESSAGE, str(error), now)
                return
            if isinstance(message, messages.Pulse):
                # With many sessions nearly all messages are these, of engines that live.
                age_s = message.engine_age_ms / 1000
                if age_s <= self._config.engine_timeout_s:
                    self._sessions.heard(session)
                    continue
                self._act(self._consumer.pulse(session.source, age_s, now), now)
            else:
                self.only_pulses = False
                session.last_wanted = now
                self._dispatch(session, message, now)
            if not self._sessions.holds(session):
                return
            self._sessions.heard(session)
        if session.has_event and (lost := self._sessions.lost(session)):
            self.end_session(session, *lost, now)

    def _dispatch(
        self, session: OpenSession, message: messages.ProducerMessage, now: float
    ) -> None:
        source = session.source
        match message:
            case messages.Welcome():
                self._welcome(session, message, now)
            case messages.Reject():
                theirs = f" (producer's schema {message.oldest}-{message.newest})"
                detail = message.detail + (theirs if message.newest != messages.SCHEMA else "")
                self.end_session(session, _cause(message.cause), detail, now)
            case messages.Ready():
                self._act(self._consumer.ready(source, message.transfer), now)
            case messages.LeftInSlot() | messages.LeftInPages():
                try:
                    self._read(session, message, now)
                except TransportError as error:
                    self.end_session(session, Cause.TRANSPORT, str(error), now)
            case messages.Accept():
                self._act(self._consumer.accept(source, message, now), now)
            case messages.Refuse():
                self._act(self._consumer.refuse(source, message, now), now)
            case messages.Cancelled():
                self._act(self._consumer.cancelled(source, message.transfer, now), now)

    def _welcome(self, session: OpenSession, welcome: messages.Welcome, now: float) -> None:
        if session.path is not None:
            return self.end_session(session, Cause.MALFORMED_MESSAGE, "a second welcome", now)
        try:
            session.path, session.agreed = self._dialler.welcomed(session.source, welcome)
        except RefusedError as refused:
            return self.end_session(session, refused.cause, str(refused), now)
        # An older producer does not say: it is taken to be as patient as this side.
        unsaid_s = min(self._config.session_timeout_s, self._config.lease_s)
        session.patience_s = welcome.lease_ms / 1000 or unsaid_s
        self._next_heartbeat = min(self._next_heartbeat, now + self._heartbeat_interval_s)
        # This producer does not know yet when the next heartbeat comes: send one now.
        next_s, transfers = self._next_heartbeat - now, self._consumer.transfers_of(session.source)
        self._sessions.send_heartbeat(session, transfers, now, max(0.0, next_s))
        self._sessions.agreed(session)
        self._peer_backoff.answered(session.source)
        return self._establish(session, now)

    def _establish(self, session: OpenSession, now: float) -> None:
        """Begin the session when its kernels are compiled. Until then heartbeats keep it alive."""
        agreed = session.agreed
        if agreed is None or not self._cache.prepare(
            (*agreed.routes, *agreed.plain), gathers=False
        ):
            return
        session.agreed = None
        self._act(self._consumer.session_up(session.source, agreed, now), now)

    def tick(self, now: float, *, hurried: bool = False) -> None:
        """Dial queued producers, end silent sessions, and send heartbeats that are due.

        Args:
            hurried: see `OpenSessions.send_heartbeats`.
        """
        while (queued := self._sessions.next_queued(now)) is not None:
            source, addresses = queued
            if addresses and self._consumer.wants(source):
                self.dial(source, addresses, now)
            else:
                self._refused(source, Cause.UNREACHABLE, "too many sessions are being opened", now)
        for session in self._sessions.compiling_sessions():
            self._attempt(self._establish, session, now)
        for session in self._sessions.unanswered(now):
            self.end_session(session, Cause.SESSION_LOST, UNANSWERED, now)
        for session in self._sessions.due(now):
            self._attempt(self._look_after, session, now)
        if now >= self._next_heartbeat:
            next_s = self._heartbeat_interval_s
            self._next_heartbeat = now + next_s
            self._sessions.send_heartbeats(
                self._consumer.transfers_of, now, next_s, hurried=hurried
            )
        self._sessions.read_answers(now)

    @property
    def due(self) -> float:
        """When `tick` must be called at the latest, on its clock."""
        return min(self._next_heartbeat, self._sessions.answers_due)

    def _look_after(self, session: OpenSession, now: float) -> None:
        """End a session that is lost or idle."""
        if session.deadline <= now:
            if session.path is None:
                self._peer_backoff.waited(session.source, now, now)
            self.end_session(session, session.timeout_cause, "the producer does not answer", now)
            return
        if self._consumer.wants(session.source):
            session.last_wanted = now
        if session.path is None or session.last_wanted + self._config.idle_timeout_s > now:
            self._sessions.look_again(session)
        else:
            self.end_session(session, Cause.NOT_NEEDED, "not wanted for idle_timeout_s", now)

    @property
    def _heartbeat_interval_s(self) -> float:
        """Seconds between heartbeats. The interval grows with the number of sessions, but stays short enough to keep
        leases alive."""
        heartbeat_s = self._config.heartbeat_s
        stretched = heartbeat_s * max(1.0, len(self._sessions) / _SESSIONS_PER_HEARTBEAT)
        return min(stretched, max(_SOONEST_S, self._sessions.patience_s * _LATEST))

    def dial(self, source: Source, addresses: int, now: float) -> None:
        """Open a session with this producer, if there is none."""
        if self._sessions.get(source) is not None:
            return None
        if pause := self._peer_backoff.pause(source, now):
            return self._refused(source, Cause.UNREACHABLE, pause, now)
        if len(self._sessions) >= MOST_SESSIONS:
            self._make_room(now)
        if len(self._sessions) >= MOST_SESSIONS:
            detail = f"there are {MOST_SESSIONS} sessions with other producers, all in use"
            return self._refused(source, Cause.SESSION_LIMIT, detail, now)
        try:
            self._sessions.dial(source, addresses, now)
        except RefusedError as refused:
            self._refused(source, refused.cause, str(refused), now)
        return None

    def _refused(self, source: Source, cause: Cause, detail: str, now: float) -> None:
        """There is no session with this producer: its transfers fail."""
        self._act(self._consumer.session_down(source, cause, detail, now), now)

    def _make_room(self, now: float) -> None:
        """End the session that has been idle longest, if there is one."""
        idle = self._sessions.oldest_idle(self._consumer.wants)
        if idle is not None:
            self.end_session(idle, Cause.NOT_NEEDED, "another producer needed its place", now)

    def change_model(self, facts: ModelFacts, now: float) -> None:
        """The engine serves other weights: KV on its way cannot be used, and models must be compared again."""
        self._dialler.change_model(facts)
        for session in self._sessions:
            self.end_session(session, Cause.MODEL, "this engine's weights have changed", now)

    def know_weights(self, facts: ModelFacts) -> None:
        """All bytes of this engine's weights were read: from now on producers are dialled."""
        self._dialler.change_model(facts)

    def stalled(self, source: Source, now: float) -> None:
        """End the session, so that the next transfer gets a new connection: this one may be dead without a sign. One-sided
        transports have no such connection."""
        session = self._sessions.get(source)
        if session and session.path and not session.path.transport.one_sided:
            self.end_session(session, Cause.STALLED, "no chunk within stall_timeout_s", now)

    def end_session(self, session: OpenSession, cause: Cause, detail: str, now: float) -> None:
        """End a session: the transfers of its producer fail with this cause."""
        source, path = session.source, session.path
        detail = named_for_what_it_is(source.host, cause, detail)
        level = self._outage.level if self._consumer.wants(source) else logging.INFO
        logger.log(level, "session with %s:%d ended (%s): %s", *source[:2], cause, detail)
        self._telemetry.count("lost_sessions", cause=cause)
        silenced = (
            path is None
            or path.own
            or path.transport.silenced(path.expected, waits=cause is Cause.SESSION_LOST)
        )
        if path is not None:
            path.transport.dismiss(path.expected)
        self._receive_pipeline.forget_reads(source)
        down = self._consumer.session_down(source, cause, detail, now, silenced=silenced)
        self._act(down, now)
        self._sessions.end_session(session)  # last, because a `Cancel` may have been sent just now

    def _attempt(
        self, work: Callable[[OpenSession, float], None], session: OpenSession, now: float
    ) -> None:
        """An error of one session ends that session, and nothing else."""

        def give_up() -> None:
            if self._sessions.holds(session):
                self.end_session(session, Cause.INTERNAL, "an unexpected error, see this log", now)

        what = "session with {}:{}".format(*session.source[:2])
        with confined(self._telemetry, what, give_up):
            work(session, now)


def _cause(name: str) -> Cause:
    return Cause(name) if name in list(Cause) else Cause.UNREACHABLE
