# SPDX-License-Identifier: Apache-2.0
"""The consuming half of an agent: sessions with producers, and the chunks that come in."""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pd_connector import wire
from pd_connector.codec import permitted
from pd_connector.config import Config
from pd_connector.consumer import Consumer
from pd_connector.errors import (
    Cause,
    MalformedMessageError,
    PDConnectorError,
    TransportError,
)
from pd_connector.geometry import Shard
from pd_connector.handshake import Identity, RefusedError, hello, judge_welcome
from pd_connector.incoming import Action, Dial, Finished, Held, Load, Peer, Place, Source, Tell
from pd_connector.integrity import checksum
from pd_connector.memory import Pieces
from pd_connector.pages import PagedCache
from pd_connector.security import CurveKeys
from pd_connector.session import Connection, Context
from pd_connector.slab import SlotPool
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Landed, Transport

logger = logging.getLogger("pd_connector.fetch")

_TRANSFERS_PER_HEARTBEAT = 256


@dataclass(slots=True)
class _Session:
    connection: Connection
    deadline: float  # for `Welcome`, then for any message
    greeted: bool = False
    transport: Transport | None = None
    expected: Hashable = None
    # Offers of the producer that are being read, by the landing slot they go with.
    reading: dict[int, int] = field(default_factory=dict)


class Fetcher:
    """Used by the agent's thread only. `ended` is told the end of every load and watched hold.

    `shards` are those of all ranks of this engine.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        keys: CurveKeys | None,
        identity: Identity,
        cache: PagedCache,
        transports: Sequence[Transport],
        telemetry: Telemetry,
        shards: Sequence[Shard],
        ended: Callable[[Finished | Held], None],
    ) -> None:
        self._context = context
        self._config = config
        self._keys = keys
        self._identity = identity
        self._cache = cache
        self._transports = {transport.name: transport for transport in transports}
        self._telemetry = telemetry
        self._ended = ended
        self._codecs = list(permitted(config.codec, config.codec_max_error))
        self._pool = SlotPool(config.slots)
        one_sided = any(transport.one_sided for transport in transports)
        self._consumer = Consumer(config, cache.geometry, self._pool, one_sided, shards)
        self._sessions: dict[Source, _Session] = {}
        self._next_heartbeat = 0.0
        self._fences: dict[str, tuple[str, Any]] = {}  # by transfer: its request, and the fence

    @property
    def pollables(self) -> list[object]:
        connections = [session.connection for session in self._sessions.values()]
        return [socket for c in connections for socket in (c.socket, c.monitor)]

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return self._consumer.transfers > 0

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
        if fence is not None:
            self._fences[load.transfer] = load.request, fence
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
                if session.greeted:  # until then only `Welcome` counts as an answer
                    session.deadline = now + self._config.session_timeout_s
            if self._sessions.get(source) is session and (lost := session.connection.lost()):
                self._end(source, *lost, now)

    def landed(self, landed: Landed, now: float) -> None:
        """A chunk has landed; it is believed once it fits the plan and its checksum."""
        self._arrived(landed.header, landed.slot, landed.payload, landed.problem, now)

    def _arrived(
        self, data: bytes, slot: int, payload: memoryview | Pieces, problem: str, now: float
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
        actions = self._consumer.landed(header, slot, payload, now, problem=problem)
        if not actions:
            self._telemetry.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER)
        self._act(actions, now)
        self._taken(slot)

    def tick(self, now: float) -> None:
        """Speak for what is wanted; end what has been silent."""
        for source, session in list(self._sessions.items()):
            if session.deadline < now:
                cause = Cause.SESSION_LOST if session.greeted else Cause.UNREACHABLE
                self._end(source, cause, "the producer does not answer", now)
        self._act(self._consumer.tick(now), now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._config.heartbeat_s
            for source, session in self._sessions.items():
                if session.greeted:
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
        transport = self._transports.get(welcome.transport)
        try:
            paths = judge_welcome(welcome, source.engine_id, self._cache.geometry, self._codecs)
        except RefusedError as refused:
            return self._end(source, refused.cause, str(refused), now)
        if session.greeted or transport is None:
            detail = f"welcome to transport {welcome.transport!r}, or a second one"
            return self._end(source, Cause.MALFORMED_MESSAGE, detail, now)
        try:
            session.expected = transport.expect(welcome.transport_address)
        except TransportError as error:
            return self._end(source, Cause.TRANSPORT, str(error), now)
        session.transport = transport
        session.greeted = True
        direct = (
            welcome.read
            and welcome.direct
            and self._cache.on_host
            and transport.direct(session.expected)
        )
        logger.info(
            "session with %s:%d: transport %s, %s, codecs %s",
            *source[:2],
            transport.name,
            "read from pages" if direct else "read" if welcome.read else "written",
            ",".join(sorted({path.codec for path in paths})) or "none",
        )
        slot_bytes = welcome.slot_bytes
        up = self._consumer.session_up(
            source, welcome.epoch, paths, slot_bytes, now, read=welcome.read, direct=direct
        )
        return self._act(up, now)

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
        if session.transport is None or not wanted or offered.slot in session.reading:
            session.connection.send(wire.encode(wire.Taken(offered.offer)))
            return
        session.reading[offered.slot] = offered.offer
        if isinstance(offered, wire.OfferedPages):
            addresses = np.frombuffer(offered.addresses[: len(offered.addresses) // 8 * 8], "<u8")
            pieces = Pieces(addresses, offered.piece_bytes)
            self._arrived(offered.header, offered.slot, pieces, "", now)
            return
        try:
            session.transport.read(
                session.expected, offered.send_slot, offered.nbytes, offered.slot, offered.header
            )
        except TransportError as error:
            self._end(source, Cause.TRANSPORT, str(error), now)

    def _taken(self, slot: int) -> None:
        """Tell the producer that an offer has been read, if one went with this landing slot."""
        for session in self._sessions.values():
            if slot in session.reading:
                taken = wire.Taken(session.reading.pop(slot))
                session.connection.send(wire.encode(taken))

    def _dial(self, source: Source, now: float) -> None:
        if source in self._sessions:
            return None
        if not self._config.permits(source.host):
            detail = (
                f"producer at {source.host!r}, and no key is set: only loopback is dialled then. "
                "Set PD_CONNECTOR_KEY to one secret on every engine"
            )
            return self._act(
                self._consumer.session_down(source, Cause.INSECURE_ADDRESS, detail, now), now
            )
        try:
            connection = Connection(self._context, source.host, source.port, self._keys)
        except PDConnectorError as error:
            actions = self._consumer.session_down(source, Cause.UNREACHABLE, str(error), now)
            return self._act(actions, now)
        greeting = hello(
            self._identity,
            source.engine_id,
            self._cache.geometry,
            self._codecs,
            list(self._transports.values()),
        )
        connection.send(wire.encode(greeting))
        deadline = now + self._config.connect_timeout_s
        self._sessions[source] = _Session(connection, deadline)
        return None

    def _end(self, source: Source, cause: Cause, detail: str, now: float) -> None:
        session = self._sessions.pop(source)
        level = logging.WARNING if self._consumer.wanted(source) else logging.INFO
        logger.log(level, "session with %s:%d ended (%s): %s", *source[:2], cause, detail)
        self._telemetry.count("lost_sessions", cause=cause)
        silenced = session.transport is None or session.transport.silenced(session.expected)
        if session.transport is not None:
            session.transport.dismiss(session.expected)
        session.connection.close()
        down = self._consumer.session_down(source, cause, detail, now, silenced=silenced)
        self._act(down, now)

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
                case Held(request, cause, detail) as held:
                    if cause is not None:
                        self._telemetry.count("failed_transfers", cause=cause)
                        logger.warning("no KV for request %s (%s): %s", request, cause, detail)
                    self._ended(held)
                case Finished() as finished:
                    self._report(finished)

    def _place(self, place: Place) -> tuple[Cause | None, str]:
        """Scatter and verify one chunk; returns what was wrong with it.

        In this order: a peer that was given up may write into the slot at any moment, and what it
        writes before or during the copy is seen in the checksum. Wrong bytes do no harm in the
        load's own pages, for these count only when all of it was right.
        """
        if isinstance(place.payload, Pieces):
            try:
                found = self._pull(place, place.payload)
            except TransportError as error:
                return Cause.TRANSPORT, str(error)
        else:
            _, fence = self._fences.get(place.header.transfer, ("", None))
            self._cache.scatter(place.route, place.chunk, place.pages, place.payload, fence)
            found = self._cache.checksum or checksum(place.payload)
        if found != place.header.checksum:
            detail = f"chunk {place.header.sequence} of transfer {place.header.transfer}"
            return Cause.CHECKSUM, f"{detail} is corrupt"
        self._telemetry.count("received_chunks")
        self._telemetry.count("received_bytes", place.header.nbytes)
        return None, ""

    def _pull(self, place: Place, theirs: Pieces) -> bytes:
        """Copy a chunk from the producer's pages into ours; returns the checksum of ours.

        Raises TransportError if it cannot be copied.
        """
        session, route = self._sessions[place.source], place.route
        ours = self._cache.pieces(
            route.destination, route.destination_head, route, place.chunk, place.pages
        )
        if ours is None or session.transport is None:
            raise TransportError(
                "pages were offered to be read, and those here are not in host memory"
            )
        self._telemetry.count("pulled_pieces", len(ours.addresses))
        return session.transport.pull(session.expected, theirs, ours)

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
        self._fences = {
            t: known for t, known in self._fences.items() if known[0] != finished.request
        }
        self._ended(finished)


def _parts(transfers: list[str]) -> list[list[str]]:
    """Cut what is wanted into heartbeats that stay below `wire.MAX_MESSAGE_BYTES`."""
    size = _TRANSFERS_PER_HEARTBEAT
    return [transfers[i : i + size] for i in range(0, max(1, len(transfers)), size)]


def _cause(name: str) -> Cause:
    return Cause(name) if name in list(Cause) else Cause.UNREACHABLE
