# SPDX-License-Identifier: Apache-2.0
"""The consuming half of an agent: sessions with producers, and the chunks that come in."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pd_connector.agent.commands import Drop, Hold
from pd_connector.agent.dialler import Dialler
from pd_connector.agent.handshake import RefusedError
from pd_connector.agent.inbox import Inbox
from pd_connector.agent.integrity import HasIntegrity
from pd_connector.agent.name_queue import Named, NameQueue
from pd_connector.agent.open_sessions import MOST_SESSIONS, OpenSession, OpenSessions
from pd_connector.agent.outage import OutageWatch, named_for_what_it_is
from pd_connector.agent.page_gate import AbandonedError, PageGate, RevokedError
from pd_connector.agent.resources import RankResources
from pd_connector.control.resolver import Resolver
from pd_connector.errors import Cause, MalformedMessageError, TransportError
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol import messages
from pd_connector.protocol.consumer import Consumer
from pd_connector.protocol.header import decode_header
from pd_connector.protocol.incoming import (
    Action,
    Dial,
    Finished,
    Held,
    Load,
    PlaceChunk,
    Stalled,
    Tell,
)
from pd_connector.protocol.peers import Source
from pd_connector.remedies import FAILING_GAUGE
from pd_connector.transport.base import Landed

logger = logging.getLogger("pd_connector.agent.consumer_side")

_SESSIONS_PER_HEARTBEAT = 16
"""With more sessions than this, heartbeats are further apart than `heartbeat_s`."""


class ConsumerSide:
    """Used by the agent's thread only.

    Args:
        shards: what the ranks of this engine hold, this one included.
        gate: passed before pages are written; shut by the engine's thread for requests whose pages
            may not be written.
        report: told the end of every load and watched hold.
    """

    def __init__(
        self,
        resources: RankResources,
        shards: Sequence[Shard],
        gate: PageGate,
        report: Callable[[Finished | Held], None],
    ) -> None:
        config, cache = resources.config, resources.cache
        self._config = config
        self._cache = cache
        self._telemetry = resources.telemetry
        self._gate = gate
        self._report = report
        self._pool = SlotPool(config.slots)
        one_sided = any(transport.one_sided for transport in resources.transports)
        self._consumer = Consumer(
            config,
            cache.geometry,
            self._pool,
            one_sided,
            shards,
            needs_words=bool(resources.identity.needs),
        )
        self._dialler = Dialler(resources)
        self._sessions = OpenSessions(config, self._dialler)
        self._names = NameQueue(Resolver(resources.wake), config.permits, config.connect_timeout_s)
        self._inbox = Inbox(cache, gate, resources.telemetry)
        self._outage = OutageWatch()
        self._next_heartbeat = 0.0

    @property
    def pollables(self) -> list[object]:
        return self._sessions.pollables

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return self._consumer.transfers > 0

    @property
    def urgent(self) -> bool:
        """Whether something is to be done that the poller will not tell of."""
        return self._sessions.urgent

    @property
    def compiling(self) -> bool:
        """Whether sessions wait for kernels to be compiled."""
        return self._sessions.compiling

    @property
    def parts_with_integrity(self) -> list[HasIntegrity]:
        return [self._pool, self._consumer]

    def gauges(self) -> dict[str, float]:
        return {
            "landing_slots": self._pool.held,
            "incoming_transfers": self._consumer.transfers,
            "producer_sessions": len(self._sessions),
            FAILING_GAUGE: float(self._outage.failing),
        }

    def execute(self, command: Hold | Load | Drop, fence: Any, now: float) -> None:
        """Carry out a command, at once or when the addresses of its producers are known. Pages of
        a `Load` are filled after the work that `fence` stands for, which may still write them for
        the request that had them before."""
        self._run(self._names.put(command, fence, now), now)

    def _run(self, ready: Sequence[Named], now: float) -> None:
        for command, fence, cause, detail in ready:
            match command:
                case Load() if cause is not None:
                    self._finished(Finished(command.request, cause, detail), now)
                case Hold() if cause is not None:
                    if command.watch:  # otherwise its `Load` will fail, and is counted then
                        self._act([Held(command.request, cause, detail)], now)
                case Load():
                    self._inbox.begin(command, fence)
                    self._act(self._consumer.load(command, now), now)
                case Hold(request, transfer, peers, watch, engine_id):
                    self._act(
                        self._consumer.hold(request, transfer, peers, watch, now, engine_id), now
                    )
                case Drop(request, why):
                    self._act(self._consumer.drop(request, why, now), now)
                    self._gate.open(request)  # `Agent.submit` has shut it

    def change_model(self, facts: ModelFacts, now: float) -> None:
        """The engine serves other weights: KV that is under way is of no use, and every producer
        must be compared with again."""
        self._dialler.change_model(facts)
        for session in self._sessions:
            self._end(session, Cause.MODEL, "this engine's weights have changed", now)

    def receive(self, now: float) -> None:
        """Handle every message that waits, and every connection that broke."""
        for session in self._sessions.ready():
            with self._ending_on_error(session, now):
                self._receive(session, now)

    def _receive(self, session: OpenSession, now: float) -> None:
        for data in self._sessions.received(session):
            if not self._sessions.holds(session):
                return
            try:
                message = messages.decode_producer_message(data)
            except MalformedMessageError as error:
                self._end(session, Cause.MALFORMED_MESSAGE, str(error), now)
                return
            self._dispatch(session, message, now)
            self._sessions.heard(session, now)
        if self._sessions.holds(session) and (lost := self._sessions.lost(session)):
            self._end(session, *lost, now)

    @contextlib.contextmanager
    def _ending_on_error(self, session: OpenSession, now: float) -> Iterator[None]:
        """An error of one session ends that session, and nothing else."""
        try:
            yield
        except AbandonedError:
            raise
        except Exception:
            logger.exception("session with %s:%d failed", *session.source[:2])
            self._telemetry.count("session_errors")
            if self._sessions.holds(session):
                self._end(session, Cause.INTERNAL, "an unexpected error, see this log", now)

    def landed(self, landed: Landed, now: float) -> None:
        """A chunk has landed; it counts once it fits the plan and its checksum is right."""
        self._arrived(*landed[:4], now, authentic=landed.authentic)

    def _arrived(
        self,
        data: bytes,
        slot: int,
        payload: memoryview | Pieces,
        problem: str,
        now: float,
        *,
        authentic: bool = False,
    ) -> None:
        try:
            header = decode_header(data)
        except MalformedMessageError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("chunk with an unreadable header dropped: %s", str(error))
            self._telemetry.count("stale_chunks", cause=Cause.MALFORMED_MESSAGE)
            self._tell_taken(slot)
            return
        if problem:
            logger.warning("chunk of transfer %s not read: %s", header.transfer, problem)
        actions = self._consumer.landed(
            header, slot, payload, now, problem=problem, authentic=authentic
        )
        if not actions:
            self._telemetry.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER)
        self._act(actions, now)
        self._tell_taken(slot)

    def tick(self, now: float) -> None:
        """End what has been silent for too long; send heartbeats when they are due."""
        self._run(self._names.ready(now), now)
        self._act(self._consumer.tick(now), now)
        while (queued := self._sessions.next_queued(now)) is not None:
            source, addresses = queued
            if addresses and self._consumer.wants(source):
                self._dial(source, addresses, now)
            else:
                self._refused(source, Cause.UNREACHABLE, "too many sessions are being opened", now)
        for session in self._sessions.compiling_sessions():
            with self._ending_on_error(session, now):
                self._establish(session, now)
        for session in self._sessions.due(now):
            with self._ending_on_error(session, now):
                self._look_after(session, now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_interval_s
            for session in self._sessions:
                if session.path is not None:
                    wanted = self._consumer.wanted(session.source)
                    self._sessions.send_heartbeat(session, wanted)

    def _look_after(self, session: OpenSession, now: float) -> None:
        """End a session that is lost or idle."""
        if session.deadline <= now:
            self._end(session, session.timeout_cause, "the producer does not answer", now)
            return
        if self._consumer.wants(session.source):
            session.last_wanted = now
        if session.path is None or session.last_wanted + self._config.idle_timeout_s > now:
            self._sessions.look_again(session, now)
        else:
            self._end(session, Cause.NOT_NEEDED, "nothing was wanted for idle_timeout_s", now)

    @property
    def _heartbeat_interval_s(self) -> float:
        """With many sessions heartbeats are further apart, as far as sessions and leases allow."""
        config = self._config
        stretched = config.heartbeat_s * len(self._sessions) / _SESSIONS_PER_HEARTBEAT
        most = min(config.session_timeout_s, config.lease_s) / 2
        return max(config.heartbeat_s, min(stretched, most))

    def close(self) -> None:
        self._names.close()
        self._sessions.close()

    def _dispatch(
        self, session: OpenSession, message: messages.ProducerMessage, now: float
    ) -> None:
        source = session.source
        match message:
            case messages.Welcome():
                self._welcome(session, message, now)
            case messages.Reject():
                detail = f"{message.detail} (producer's schema {message.oldest}-{message.newest})"
                self._end(session, _cause(message.cause), detail, now)
            case messages.Ready():
                self._act(self._consumer.ready(source, message.transfer), now)
            case messages.Offered() | messages.OfferedPages():
                self._read(session, message, now)
            case messages.Accept():
                self._act(self._consumer.accept(source, message, now), now)
            case messages.Refuse():
                self._act(self._consumer.refuse(source, message, now), now)
            case messages.Cancelled():
                self._act(self._consumer.cancelled(source, message.transfer, now), now)
            case messages.Pulse():
                self._act(self._consumer.pulse(source, message.engine_age_ms / 1000, now), now)

    def _welcome(self, session: OpenSession, welcome: messages.Welcome, now: float) -> None:
        if session.path is not None:
            return self._end(session, Cause.MALFORMED_MESSAGE, "a second welcome", now)
        try:
            session.path, session.agreed = self._dialler.welcomed(session.source, welcome)
        except RefusedError as refused:
            return self._end(session, refused.cause, str(refused), now)
        self._sessions.agreed(session)
        return self._establish(session, now)

    def _establish(self, session: OpenSession, now: float) -> None:
        """Ask for KV once it can be scattered. Until its kernels are compiled, heartbeats keep the
        session alive."""
        agreed = session.agreed
        if agreed is not None and self._cache.prepare(agreed.routes, gathers=False):
            session.agreed = None
            self._act(self._consumer.session_up(session.source, agreed, now), now)

    def _read(
        self,
        session: OpenSession,
        offered: messages.Offered | messages.OfferedPages,
        now: float,
    ) -> None:
        """Fetch a chunk that the producer offers: from its send slot into the landing slot that
        was granted for it, or from its pages straight into ours."""
        source = session.source
        wanted = self._consumer.granted(source, offered.transfer, offered.slot)
        if session.path is None or not wanted or self._inbox.reads(source, offered.slot):
            self._sessions.send(session, messages.Taken(offered.offer))
            return
        try:
            pieces = self._inbox.read(source, session.path, offered)
        except TransportError as error:
            self._end(session, Cause.TRANSPORT, str(error), now)
            return
        if pieces is not None:
            self._arrived(offered.header, offered.slot, pieces, "", now)

    def _tell_taken(self, slot: int) -> None:
        """Tell the producer that an offer has been read, if one went with this landing slot."""
        for source, taken in self._inbox.taken(slot):
            if session := self._sessions.get(source):
                self._sessions.send(session, taken)

    def _dial(self, source: Source, addresses: int, now: float) -> None:
        if len(self._sessions) >= MOST_SESSIONS and self._sessions.get(source) is None:
            self._make_room(now)
        if len(self._sessions) >= MOST_SESSIONS and self._sessions.get(source) is None:
            detail = f"there are {MOST_SESSIONS} sessions with other producers, all in use"
            return self._refused(source, Cause.SESSION_LIMIT, detail, now)
        try:
            self._sessions.dial(source, addresses, now)
        except RefusedError as refused:
            self._refused(source, refused.cause, str(refused), now)
        return None

    def _make_room(self, now: float) -> None:
        """End the session that has been idle longest, if there is one."""
        idle = self._sessions.oldest_idle(self._consumer.wants)
        if idle is not None:
            self._end(idle, Cause.NOT_NEEDED, "its place was needed for another producer", now)

    def _refused(self, source: Source, cause: Cause, detail: str, now: float) -> None:
        """There will be no session with this producer."""
        self._act(self._consumer.session_down(source, cause, detail, now), now)

    def _end(self, session: OpenSession, cause: Cause, detail: str, now: float) -> None:
        source, path = session.source, session.path
        detail = named_for_what_it_is(source.host, cause, detail)
        level = self._outage.level if self._consumer.wants(source) else logging.INFO
        logger.log(level, "session with %s:%d ended (%s): %s", *source[:2], cause, detail)
        self._telemetry.count("lost_sessions", cause=cause)
        silenced = path is None or path.transport.silenced(path.expected)
        if path is not None:
            path.transport.dismiss(path.expected)
        self._inbox.lost(source)
        down = self._consumer.session_down(source, cause, detail, now, silenced=silenced)
        self._act(down, now)
        self._sessions.end(session)  # last, because a `Cancel` may have been sent just now

    def _act(self, actions: Sequence[Action], now: float) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Dial(source, addresses):
                    self._dial(source, addresses, now)
                case Tell(source, message):
                    if session := self._sessions.get(source):
                        self._sessions.send(session, message)
                case PlaceChunk() as place:
                    pending.extend(self._consumer.placed(place, *self._place(place), now))
                case Stalled(source):
                    self._stalled(source, now)
                case Held(request, cause, detail) as held:
                    if cause is not None:
                        self._telemetry.count("failed_transfers", cause=cause)
                        told = "no KV for request %s (%s): %s"
                        logger.log(self._outage.level, told, request, cause, detail)
                        self._outage.failed(cause, detail, now)
                    self._report(held)
                case Finished() as finished:
                    self._finished(finished, now)

    def _stalled(self, source: Source, now: float) -> None:
        """End the session, so that the next transfer gets a new connection: nobody may have told
        that this one is dead. A peer that writes by itself has no such connection."""
        session = self._sessions.get(source)
        if session and session.path and not session.path.transport.one_sided:
            self._end(session, Cause.STALLED, "no chunk within stall_timeout_s", now)

    def _place(self, place: PlaceChunk) -> tuple[Cause | None, str]:
        session = self._sessions.get(place.source)
        assert session is not None
        assert session.path is not None  # it has been granted the slot
        try:
            return self._inbox.place(place, session.path)
        except RevokedError:
            return Cause.ABORTED, "the request was dropped"

    def _finished(self, finished: Finished, now: float) -> None:
        if finished.cause is None:
            self._telemetry.count("received_transfers")
            self._telemetry.observe("transfer_seconds", finished.seconds)
            self._outage.succeeded()
        else:
            self._telemetry.count("failed_transfers", cause=finished.cause)
            if finished.cause is not Cause.ABORTED:
                logger.log(
                    self._outage.level,
                    "KV of request %s did not arrive (%s): %s",
                    finished.request,
                    finished.cause,
                    finished.detail,
                )
            self._outage.failed(finished.cause, finished.detail, now)
        self._inbox.forget(finished.request)
        self._report(finished)


def _cause(name: str) -> Cause:
    return Cause(name) if name in list(Cause) else Cause.UNREACHABLE
