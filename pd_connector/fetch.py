# SPDX-License-Identifier: Apache-2.0
"""The consuming half of an agent: sessions with producers, and the chunks that come in."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pd_connector import wire
from pd_connector.consumer import Consumer
from pd_connector.dialler import Dialler
from pd_connector.errors import Cause, MalformedMessageError, TransportError
from pd_connector.geometry import Shard
from pd_connector.handshake import RefusedError
from pd_connector.inbox import Inbox, Way
from pd_connector.incoming import (
    Action,
    Dial,
    Finished,
    Held,
    Load,
    Peer,
    Place,
    Session,
    Source,
    Stalled,
    Tell,
)
from pd_connector.memory import Pieces
from pd_connector.session import Connection
from pd_connector.slab import SlotPool
from pd_connector.station import Station
from pd_connector.transport.base import Landed

logger = logging.getLogger("pd_connector.fetch")

_TRANSFERS_PER_HEARTBEAT = 256


@dataclass(slots=True)
class _Session:
    connection: Connection
    deadline: float  # for `Welcome`, then for any message
    way: Way | None = None  # since `Welcome`
    agreed: Session | None = None  # since then, until kernels are compiled for its routes


class Fetcher:
    """Used by the agent's thread only. `ended` is told the end of every load and watched hold.

    `shards` are those of all ranks of this engine.
    """

    def __init__(
        self, station: Station, shards: Sequence[Shard], ended: Callable[[Finished | Held], None]
    ) -> None:
        config, cache = station.config, station.cache
        self._config = config
        self._cache = cache
        self._telemetry = station.telemetry
        self._ended = ended
        self._pool = SlotPool(config.slots)
        one_sided = any(transport.one_sided for transport in station.transports)
        self._consumer = Consumer(config, cache.geometry, self._pool, one_sided, shards)
        self._dialler = Dialler(station)
        self._inbox = Inbox(cache, station.telemetry)
        self._sessions: dict[Source, _Session] = {}
        self._next_heartbeat = 0.0

    @property
    def pollables(self) -> list[object]:
        connections = [session.connection for session in self._sessions.values()]
        return [socket for c in connections for socket in (c.socket, c.monitor)]

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return self._consumer.transfers > 0

    @property
    def preparing(self) -> bool:
        """Whether sessions wait for kernels to be compiled."""
        return any(session.agreed for session in self._sessions.values())

    def gauges(self) -> dict[str, float]:
        return {
            "landing_slots": self._pool.held,
            "incoming_transfers": self._consumer.transfers,
            "producer_sessions": len(self._sessions),
        }

    def hold(
        self, request: str, transfer: str, peers: Sequence[Peer], watch: bool, now: float
    ) -> None:
        self._act(self._consumer.hold(request, transfer, peers, watch, now), now)

    def load(self, load: Load, fence: Any, now: float) -> None:
        """Fetch KV. `fence` orders what may still write its pages, for whoever had them before,
        before a scatter."""
        self._inbox.fence(load, fence)
        self._act(self._consumer.load(load, now), now)

    def drop(self, request: str, cause: Cause, now: float) -> None:
        self._act(self._consumer.drop(request, cause, now), now)

    def receive(self, now: float) -> None:
        """Handle every message that waits, and every connection that broke."""
        for source, session in list(self._sessions.items()):
            for data in session.connection.receive():
                if self._sessions.get(source) is not session:
                    break
                try:
                    message = wire.decode_producer_message(data)
                except MalformedMessageError as error:
                    self._end(source, Cause.MALFORMED_MESSAGE, str(error), now)
                    break
                self._dispatch(source, session, message, now)
                if session.way is not None:  # until then only `Welcome` counts as an answer
                    session.deadline = now + self._config.session_timeout_s
            if self._sessions.get(source) is session and (lost := session.connection.lost()):
                self._end(source, *lost, now)

    def landed(self, landed: Landed, now: float) -> None:
        """A chunk has landed; it is believed once it fits the plan and its checksum."""
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
            header = wire.decode_chunk_header(data)
        except MalformedMessageError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("chunk with an unreadable header dropped: %s", str(error))
            self._telemetry.count("stale_chunks", cause=Cause.MALFORMED_MESSAGE)
            self._taken(slot)
            return
        if problem:
            logger.warning("chunk of transfer %s not read: %s", header.transfer, problem)
        actions = self._consumer.landed(
            header, slot, payload, now, problem=problem, authentic=authentic
        )
        if not actions:
            self._telemetry.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER)
        self._act(actions, now)
        self._taken(slot)

    def tick(self, now: float) -> None:
        """Speak for what is wanted; end what has been silent."""
        for source, session in list(self._sessions.items()):
            if session.deadline < now:
                cause = Cause.UNREACHABLE if session.way is None else Cause.SESSION_LOST
                self._end(source, cause, "the producer does not answer", now)
            elif session.agreed is not None:
                self._stand(source, session, now)
        self._act(self._consumer.tick(now), now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._config.heartbeat_s
            for source, session in self._sessions.items():
                if session.way is not None:
                    for part in _parts(self._consumer.wanted(source)):
                        session.connection.send(wire.encode(wire.Heartbeat(part)))

    def close(self) -> None:
        for session in self._sessions.values():
            session.connection.close()
        self._sessions.clear()

    def _dispatch(
        self, source: Source, session: _Session, message: wire.ProducerMessage, now: float
    ) -> None:
        match message:
            case wire.Welcome():
                self._welcome(source, session, message, now)
            case wire.Reject():
                detail = f"{message.detail} (producer's schema {message.oldest}-{message.newest})"
                self._end(source, _cause(message.cause), detail, now)
            case wire.Ready():
                self._act(self._consumer.ready(source, message.transfer), now)
            case wire.Offered() | wire.OfferedPages():
                self._read(source, session, message, now)
            case wire.Accept():
                self._act(self._consumer.accept(source, message, now), now)
            case wire.Refuse():
                self._act(self._consumer.refuse(source, message, now), now)
            case wire.Cancelled():
                self._act(self._consumer.cancelled(source, message.transfer, now), now)
            case wire.Pulse():
                pass

    def _welcome(
        self, source: Source, session: _Session, welcome: wire.Welcome, now: float
    ) -> None:
        if session.way is not None:
            return self._end(source, Cause.MALFORMED_MESSAGE, "a second welcome", now)
        try:
            session.way, session.agreed = self._dialler.welcomed(source, welcome)
        except RefusedError as refused:
            return self._end(source, refused.cause, str(refused), now)
        return self._stand(source, session, now)

    def _stand(self, source: Source, session: _Session, now: float) -> None:
        """Ask for KV, if it can be scattered when it comes: until then heartbeats keep the session."""
        agreed = session.agreed
        if agreed is not None and self._cache.prepare(agreed.routes, gathers=False):
            session.agreed = None
            self._act(self._consumer.session_up(source, agreed, now), now)

    def _read(
        self,
        source: Source,
        session: _Session,
        offered: wire.Offered | wire.OfferedPages,
        now: float,
    ) -> None:
        """Fetch a chunk that the producer offers, into a slot that was granted for it, or, where
        it lies in pages, straight into ours."""
        wanted = self._consumer.granted(source, offered.transfer, offered.slot)
        if session.way is None or not wanted or self._inbox.reads(source, offered.slot):
            session.connection.send(wire.encode(wire.Taken(offered.offer)))
            return
        try:
            pieces = self._inbox.read(source, session.way, offered)
        except TransportError as error:
            self._end(source, Cause.TRANSPORT, str(error), now)
            return
        if pieces is not None:
            self._arrived(offered.header, offered.slot, pieces, "", now)

    def _taken(self, slot: int) -> None:
        """Tell the producer that an offer has been read, if one went with this landing slot."""
        for source, taken in self._inbox.taken(slot):
            self._sessions[source].connection.send(wire.encode(taken))

    def _dial(self, source: Source, now: float) -> None:
        if source in self._sessions:
            return
        try:
            connection = self._dialler.dial(source)
        except RefusedError as refused:
            down = self._consumer.session_down(source, refused.cause, str(refused), now)
            self._act(down, now)
            return
        self._sessions[source] = _Session(connection, now + self._config.connect_timeout_s)

    def _end(self, source: Source, cause: Cause, detail: str, now: float) -> None:
        session = self._sessions[source]
        level = logging.WARNING if self._consumer.wanted(source) else logging.INFO
        logger.log(level, "session with %s:%d ended (%s): %s", *source[:2], cause, detail)
        self._telemetry.count("lost_sessions", cause=cause)
        silenced = session.way is None or session.way.transport.silenced(session.way.expected)
        if session.way is not None:
            session.way.transport.dismiss(session.way.expected)
        self._inbox.lost(source)
        down = self._consumer.session_down(source, cause, detail, now, silenced=silenced)
        self._act(down, now)
        del self._sessions[source]  # a last word may have been said
        session.connection.close()

    def _act(self, actions: Sequence[Action], now: float) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Dial(source):
                    self._dial(source, now)
                case Tell(source, message):
                    if source in self._sessions:
                        self._sessions[source].connection.send(wire.encode(message))
                case Place() as place:
                    pending.extend(self._consumer.placed(place, *self._place(place), now))
                case Stalled(source):
                    self._stalled(source, now)
                case Held(request, cause, detail) as held:
                    if cause is not None:
                        self._telemetry.count("failed_transfers", cause=cause)
                        logger.warning("no KV for request %s (%s): %s", request, cause, detail)
                    self._ended(held)
                case Finished() as finished:
                    self._report(finished)

    def _stalled(self, source: Source, now: float) -> None:
        """End the session, so that the next transfer gets a new connection: the one under this one
        may be dead without anybody having said so. A peer that writes by itself has none."""
        session = self._sessions.get(source)
        if session and session.way and not session.way.transport.one_sided:
            self._end(source, Cause.STALLED, "no chunk within stall_timeout_s", now)

    def _place(self, place: Place) -> tuple[Cause | None, str]:
        way = self._sessions[place.source].way
        assert way is not None  # it has been granted the slot
        return self._inbox.place(place, way)

    def _report(self, finished: Finished) -> None:
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
        self._ended(finished)


def _parts(transfers: list[str]) -> list[list[str]]:
    """Cut what is wanted into heartbeats that stay below `wire.MAX_MESSAGE_BYTES`."""
    size = _TRANSFERS_PER_HEARTBEAT
    return [transfers[i : i + size] for i in range(0, max(1, len(transfers)), size)]


def _cause(name: str) -> Cause:
    return Cause(name) if name in list(Cause) else Cause.UNREACHABLE
