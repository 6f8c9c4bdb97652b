# SPDX-License-Identifier: Apache-2.0
"""The consuming half of an agent: sessions with producers, and the chunks that come in."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pd_connector.agent.commands import Hold
from pd_connector.agent.dialler import Dialler
from pd_connector.agent.handshake import RefusedError
from pd_connector.agent.inbox import Inbox
from pd_connector.agent.open_sessions import OpenSession, OpenSessions
from pd_connector.agent.resources import RankResources
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
    Tell,
)
from pd_connector.protocol.peers import Source
from pd_connector.transport.base import Landed

logger = logging.getLogger("pd_connector.agent.consumer_side")


class ConsumerSide:
    """Used by the agent's thread only.

    Args:
        shards: what the ranks of this engine hold, this one included.
        report: told the end of every load and watched hold.
    """

    def __init__(
        self,
        resources: RankResources,
        shards: Sequence[Shard],
        report: Callable[[Finished | Held], None],
    ) -> None:
        config, cache = resources.config, resources.cache
        self._config = config
        self._cache = cache
        self._telemetry = resources.telemetry
        self._report = report
        self._pool = SlotPool(config.slots)
        one_sided = any(transport.one_sided for transport in resources.transports)
        self._consumer = Consumer(config, cache.geometry, self._pool, one_sided, shards)
        self._dialler = Dialler(resources)
        self._sessions = OpenSessions(config, self._dialler)
        self._inbox = Inbox(cache, resources.telemetry)
        self._next_heartbeat = 0.0

    @property
    def pollables(self) -> list[object]:
        return self._sessions.pollables

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return self._consumer.transfers > 0

    @property
    def compiling(self) -> bool:
        """Whether sessions wait for kernels to be compiled."""
        return self._sessions.compiling

    @property
    def parts_with_integrity(self) -> list[object]:
        return [self._pool, self._consumer]

    def gauges(self) -> dict[str, float]:
        return {
            "landing_slots": self._pool.held,
            "incoming_transfers": self._consumer.transfers,
            "producer_sessions": len(self._sessions),
        }

    def hold(self, hold: Hold, now: float) -> None:
        """A request waits for room or, if watched, for its KV to begin to come."""
        request, transfer, peers, watch = hold
        self._act(self._consumer.hold(request, transfer, peers, watch, now), now)

    def load(self, load: Load, fence: Any, now: float) -> None:
        """Fetch KV. Its pages are filled after the work that `fence` stands for, which may still
        write them for the request that had them before."""
        self._inbox.fence(load, fence)
        self._act(self._consumer.load(load, now), now)

    def drop(self, request: str, cause: Cause, now: float) -> None:
        self._act(self._consumer.drop(request, cause, now), now)

    def change_model(self, facts: ModelFacts, now: float) -> None:
        """The engine serves other weights: KV that is under way is of no use, and every producer
        must be compared with again."""
        self._dialler.change_model(facts)
        for source, _ in list(self._sessions):
            self._end(source, Cause.MODEL, "this engine's weights have changed", now)

    def receive(self, now: float) -> None:
        """Handle every message that waits, and every connection that broke."""
        for source, session in self._sessions:
            for data in session.connection.receive():
                if not self._sessions.holds(source, session):
                    break
                try:
                    message = messages.decode_producer_message(data)
                except MalformedMessageError as error:
                    self._end(source, Cause.MALFORMED_MESSAGE, str(error), now)
                    break
                self._dispatch(source, session, message, now)
                self._sessions.heard(session, now)
            if self._sessions.holds(source, session) and (lost := session.connection.lost()):
                self._end(source, *lost, now)

    def landed(self, landed: Landed, now: float) -> None:
        """A chunk has landed; it counts once it fits the plan and its checksum is right."""
        self._arrived(landed.header, landed.slot, landed.payload, landed.problem, now)

    def _arrived(
        self, data: bytes, slot: int, payload: memoryview | Pieces, problem: str, now: float
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
        actions = self._consumer.landed(header, slot, payload, now, problem=problem)
        if not actions:
            self._telemetry.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER)
        self._act(actions, now)
        self._tell_taken(slot)

    def tick(self, now: float) -> None:
        """End what has been silent for too long; send heartbeats when they are due."""
        for source, session in self._sessions:
            if session.deadline < now:
                self._end(source, session.timeout_cause, "the producer does not answer", now)
            elif session.agreed is not None:
                self._establish(source, session, now)
        self._act(self._consumer.tick(now), now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._config.heartbeat_s
            for source, session in self._sessions:
                if session.path is not None:
                    session.send_heartbeat(self._consumer.wanted(source))

    def close(self) -> None:
        self._sessions.close()

    def _dispatch(
        self, source: Source, session: OpenSession, message: messages.ProducerMessage, now: float
    ) -> None:
        match message:
            case messages.Welcome():
                self._welcome(source, session, message, now)
            case messages.Reject():
                detail = f"{message.detail} (producer's schema {message.oldest}-{message.newest})"
                self._end(source, _cause(message.cause), detail, now)
            case messages.Ready():
                self._act(self._consumer.ready(source, message.transfer), now)
            case messages.Offered() | messages.OfferedPages():
                self._read(source, session, message, now)
            case messages.Accept():
                self._act(self._consumer.accept(source, message, now), now)
            case messages.Refuse():
                self._act(self._consumer.refuse(source, message, now), now)
            case messages.Cancelled():
                self._act(self._consumer.cancelled(source, message.transfer, now), now)
            case messages.Pulse():
                pass

    def _welcome(
        self, source: Source, session: OpenSession, welcome: messages.Welcome, now: float
    ) -> None:
        if session.path is not None:
            return self._end(source, Cause.MALFORMED_MESSAGE, "a second welcome", now)
        try:
            session.path, session.agreed = self._dialler.welcomed(source, welcome)
        except RefusedError as refused:
            return self._end(source, refused.cause, str(refused), now)
        return self._establish(source, session, now)

    def _establish(self, source: Source, session: OpenSession, now: float) -> None:
        """Ask for KV once it can be scattered. Until its kernels are compiled, heartbeats keep the
        session alive."""
        agreed = session.agreed
        if agreed is not None and self._cache.prepare(agreed.routes, gathers=False):
            session.agreed = None
            self._act(self._consumer.session_up(source, agreed, now), now)

    def _read(
        self,
        source: Source,
        session: OpenSession,
        offered: messages.Offered | messages.OfferedPages,
        now: float,
    ) -> None:
        """Fetch a chunk that the producer offers: from its send slot into the landing slot that
        was granted for it, or from its pages straight into ours."""
        wanted = self._consumer.granted(source, offered.transfer, offered.slot)
        if session.path is None or not wanted or self._inbox.reads(source, offered.slot):
            session.send(messages.Taken(offered.offer))
            return
        try:
            pieces = self._inbox.read(source, session.path, offered)
        except TransportError as error:
            self._end(source, Cause.TRANSPORT, str(error), now)
            return
        if pieces is not None:
            self._arrived(offered.header, offered.slot, pieces, "", now)

    def _tell_taken(self, slot: int) -> None:
        """Tell the producer that an offer has been read, if one went with this landing slot."""
        for source, taken in self._inbox.taken(slot):
            if session := self._sessions.get(source):
                session.send(taken)

    def _dial(self, source: Source, now: float) -> None:
        try:
            self._sessions.dial(source, now)
        except RefusedError as refused:
            down = self._consumer.session_down(source, refused.cause, str(refused), now)
            self._act(down, now)

    def _end(self, source: Source, cause: Cause, detail: str, now: float) -> None:
        session = self._sessions.get(source)
        assert session is not None
        level = logging.WARNING if self._consumer.wanted(source) else logging.INFO
        logger.log(level, "session with %s:%d ended (%s): %s", *source[:2], cause, detail)
        self._telemetry.count("lost_sessions", cause=cause)
        path = session.path
        silenced = path is None or path.transport.silenced(path.expected)
        if path is not None:
            path.transport.dismiss(path.expected)
        self._inbox.lost(source)
        down = self._consumer.session_down(source, cause, detail, now, silenced=silenced)
        self._act(down, now)
        self._sessions.end(source)  # last, because a `Cancel` may have been sent just now

    def _act(self, actions: Sequence[Action], now: float) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Dial(source):
                    self._dial(source, now)
                case Tell(source, message):
                    if session := self._sessions.get(source):
                        session.send(message)
                case PlaceChunk() as place:
                    pending.extend(self._consumer.placed(place, *self._place(place), now))
                case Held(request, cause, detail) as held:
                    if cause is not None:
                        self._telemetry.count("failed_transfers", cause=cause)
                        logger.warning("no KV for request %s (%s): %s", request, cause, detail)
                    self._report(held)
                case Finished() as finished:
                    self._finished(finished)

    def _place(self, place: PlaceChunk) -> tuple[Cause | None, str]:
        session = self._sessions.get(place.source)
        assert session is not None
        assert session.path is not None  # it has been granted the slot
        return self._inbox.place(place, session.path)

    def _finished(self, finished: Finished) -> None:
        if finished.cause is None:
            self._telemetry.count("received_transfers")
            self._telemetry.observe("transfer_seconds", finished.seconds)
        else:
            self._telemetry.count("failed_transfers", cause=finished.cause)
            if finished.cause is not Cause.ABORTED:
                logger.warning(
                    "KV of request %s did not arrive (%s): %s",
                    finished.request,
                    finished.cause,
                    finished.detail,
                )
        self._inbox.forget(finished.request)
        self._report(finished)


def _cause(name: str) -> Cause:
    return Cause(name) if name in list(Cause) else Cause.UNREACHABLE
