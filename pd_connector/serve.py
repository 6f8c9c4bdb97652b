# SPDX-License-Identifier: Apache-2.0
"""The producing half of an agent: sessions with consumers, and the chunks that go out."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_connector import wire
from pd_connector.codec import permitted
from pd_connector.config import Config
from pd_connector.errors import (
    Cause,
    MalformedMessageError,
    TransportError,
)
from pd_connector.gate import Gate
from pd_connector.handshake import Identity, RefusedError, connect, judge_hello
from pd_connector.integrity import checksum
from pd_connector.memory import Pieces
from pd_connector.outgoing import Action, Free, Offer, Reply, Send
from pd_connector.pages import PagedCache
from pd_connector.producer import Producer
from pd_connector.route import Route
from pd_connector.security import CurveKeys
from pd_connector.session import Context, Listener
from pd_connector.slab import Slab
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport, Written

logger = logging.getLogger("pd_connector.serve")

_MAX_DETAIL = 1024  # characters of a refusal, which may quote what a peer sent


@dataclass(slots=True)
class _Session:
    engine_id: str
    transport: Transport
    link: Hashable  # of the transport
    routes: tuple[Route, ...]
    read: bool  # chunks are offered to be read
    heard: float


class _Moving(NamedTuple):
    """A chunk on its way."""

    session: bytes
    transfer: str
    send_slot: int | None
    nbytes: int
    deadline: float


_READ_FIRST = frozenset({"shm"})
"""Transports over which reading costs one copy less than writing."""
_READ_AHEAD = 4
"""Chunks that are offered to a consumer at a time."""
_OFFERED = "offered"  # in place of a transport's name, for chunks that the consumer reads


class Server:
    """Used by the agent's thread only. `freed` is told of every request whose pages may go."""

    def __init__(
        self,
        context: Context,
        config: Config,
        keys: CurveKeys | None,
        identity: Identity,
        cache: PagedCache,
        transports: Sequence[Transport],
        sending: Slab,
        telemetry: Telemetry,
        gate: Gate,
        freed: Callable[[Free], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._cache = cache
        self._transports = transports
        self._sending = sending
        self._telemetry = telemetry
        self._gate = gate
        self._freed = freed
        self._codecs = permitted(config.codec, config.codec_max_error)
        self._producer = Producer(config)
        self._listener = Listener(context, config.host, keys)
        self._sessions: dict[bytes, _Session] = {}
        self._moving: dict[tuple[str, int], _Moving] = {}
        self._offers = itertools.count()
        self._ahead: set[bytes] = set()  # sessions that have enough to read
        self._send_slots = deque(range(sending.slots))
        self._fences: dict[str, Any] = {}

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def pollables(self) -> list[object]:
        return [self._listener.socket]

    @property
    def busy(self) -> bool:
        """Whether writes are under way."""
        return bool(self._moving)

    def gauges(self) -> dict[str, float]:
        return {
            "leased_pages": self._producer.leased_pages,
            "outgoing_transfers": self._producer.transfers,
            "consumer_sessions": len(self._sessions),
            "send_slots": self._sending.slots - len(self._send_slots),
        }

    def expect(self, transfer: str, now: float) -> None:
        self._producer.expect(transfer, now)

    def offer(self, offer: Offer, fence: Any, now: float) -> None:
        """Take KV to be sent. `fence` orders the work that computed it before a gather."""
        self._fence(offer.request, fence)
        self._act(self._producer.offer(offer, now))

    def computed(
        self, transfer: str, request: str, tokens: int, stop_layer: int | None, fence: Any
    ) -> None:
        """A prefill has come further; see `Producer.computed`."""
        self._fence(request, fence)
        self._act(self._producer.computed(transfer, request, tokens, stop_layer))

    def revoke(self, transfer: str, request: str) -> None:
        """The request's pages are no longer its own. Its gate has been shut before."""
        self._fences.pop(request, None)
        self._producer.revoke(transfer, request)
        self._gate.open(request)

    def withdraw(self, transfer: str, request: str) -> None:
        """The request offers nothing more. Its gate has been shut before."""
        self._fences.pop(request, None)
        self._act(self._producer.withdraw(transfer, request))
        self._gate.open(request)

    def take(self) -> list[tuple[bytes, bytes]]:
        """Messages that wait, to be given to `handle`."""
        return self._listener.receive()

    def handle(self, messages: Sequence[tuple[bytes, bytes]], now: float) -> None:
        """Do what consumers ask."""
        for sender, data in messages:
            try:
                message = wire.decode_consumer_message(data)
            except MalformedMessageError as error:
                self._reject(sender, Cause.MALFORMED_MESSAGE, str(error))
                continue
            if isinstance(message, wire.Hello):
                self._greet(sender, message, now)
                continue
            session = self._sessions.get(sender)
            if session is None:
                self._reject(sender, Cause.SESSION_LOST, "no session with you: say Hello first")
                continue
            session.heard = now
            self._dispatch(sender, message, now)

    def written(self, transport: Transport, written: Written) -> None:
        """A write has ended."""
        self._moved((transport.name, written.token), written.ok, written.detail)

    def send(self, now: float) -> None:
        """Start as many writes as there are send slots and credits."""
        while self._send_slots and (send := self._producer.next_send(self._ahead)) is not None:
            self._send(send, now)

    def tick(self, now: float) -> None:
        """End silent sessions, sessions whose transport does not move, and expired leases."""
        for stuck in {m.session for m in self._moving.values() if m.deadline <= now}:
            if stuck in self._sessions:
                detail = "a chunk was not moved within stall_timeout_s"
                self._reject(stuck, Cause.STALLED, detail)
        for sender, session in list(self._sessions.items()):
            if session.heard + self._config.session_timeout_s < now:
                logger.warning("consumer %s fell silent: session ended", session.engine_id)
                self._forget(sender)
        self._act(self._producer.tick(now))

    def close(self) -> None:
        self._listener.close()

    def _dispatch(self, sender: bytes, message: wire.ConsumerMessage, now: float) -> None:
        match message:
            case wire.Watch():
                self._act(self._producer.watch(sender, message.transfer, now))
            case wire.Open():
                routes = self._sessions[sender].routes
                self._act(self._producer.open(sender, message, routes, now))
            case wire.Credit():
                self._producer.credit(sender, message.transfer, message.slots)
            case wire.Taken():
                moving = self._moving.get((_OFFERED, message.offer))
                if moving is not None and moving.session == sender:
                    self._moved((_OFFERED, message.offer), True, "")
            case wire.Done():
                self._act(self._producer.done(sender, message.transfer))
            case wire.Cancel():
                cause = Cause(message.cause) if message.cause in list(Cause) else Cause.ABORTED
                transfer, readers = message.transfer, message.readers
                self._act(self._producer.cancel(sender, transfer, cause, now, readers))
            case wire.Heartbeat():
                self._producer.heartbeat(sender, message.transfers, now)
                self._listener.send(sender, wire.encode(wire.Pulse(self._identity.epoch)))

    def _greet(self, sender: bytes, hello: wire.Hello, now: float) -> None:
        geometry = self._cache.geometry
        try:
            schema, paths = judge_hello(hello, self._identity, geometry, self._codecs)
            self._forget(sender)
            transport, link = connect(hello, self._transports)
        except RefusedError as refused:
            return self._reject(sender, refused.cause, str(refused))
        read = self._reads(transport) and transport.name in hello.readable
        self._sessions[sender] = _Session(hello.engine_id, transport, link, paths, read, now)
        welcome = wire.Welcome(
            schema=schema,
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            geometry=geometry,
            codecs=list(self._codecs),
            transport=transport.name,
            transport_address=transport.address(),
            slot_bytes=self._config.slot_bytes,
            read=read,
            direct=read and self._config.direction == "auto",
        )
        self._listener.send(sender, wire.encode(welcome))
        return None

    def _reads(self, transport: Transport) -> bool:
        """Whether consumers read from here over this transport."""
        auto = self._config.direction == "auto" and transport.name in _READ_FIRST
        return transport.readable and (auto or self._config.direction == "read")

    def _reject(self, sender: bytes, cause: Cause, detail: str) -> None:
        detail = detail[:_MAX_DETAIL]
        logger.warning("session refused (%s): %s", cause, detail)
        self._telemetry.count("rejected_sessions", cause=cause)
        self._forget(sender)
        reject = wire.Reject(cause, detail, wire.SCHEMA, wire.OLDEST_SCHEMA)
        self._listener.send(sender, wire.encode(reject))

    def _forget(self, sender: bytes) -> None:
        session = self._sessions.pop(sender, None)
        if session is None:
            return
        self._act(self._producer.session_lost(sender))
        for key in [k for k, m in self._moving.items() if m.session == sender and k[0] == _OFFERED]:
            # Should it still read there, its checksum will tell.
            self._moved(key, False, "the session has ended")
        session.transport.disconnect(session.link)

    def _fence(self, request: str, fence: Any) -> None:
        if fence is not None:
            self._fences[request] = fence

    def _send(self, send: Send, now: float) -> None:
        """Gather a chunk and set it on its way."""
        session = self._sessions[send.session]
        if not send.kept:
            self._producer.unsend(send)
            detail = f"tokens {send.chunk.first_token}-{send.chunk.stop_token} are not kept"
            self._act(self._producer.fail(send.session, send.transfer, Cause.WINDOW, detail))
            return
        with self._gate.passing(send.request) as passes:
            if not passes:
                self._producer.unsend(send)
                return
            if send.direct and (pieces := self._pieces(send)):
                self._offer_pages(send, session, pieces, now)
                return
            lies = None
            if session.transport.copies and not session.read:
                lies = self._cache.in_place(send.route, send.chunk, send.pages)
            if lies is not None:
                self._move(send, session, lies, checksum(lies), None, now)
                return
            # Into memory of our own, never straight into the landing slot: a producer that was
            # given up may still write there, and the checksum would certify its bytes.
            send_slot = self._send_slots.pop()  # the one used last is warm in the cache
            payload = self._gather(send, self._sending.slot(send_slot))
        found = self._cache.checksum or checksum(payload)
        self._move(send, session, payload, found, send_slot, now)

    def _move(
        self,
        send: Send,
        session: _Session,
        payload: memoryview,
        found: bytes,
        send_slot: int | None,
        now: float,
    ) -> None:
        """Set a payload on its way, which lies in a send slot of ours, or in full pages.

        Args:
            found: its checksum.
        """
        header = self._header(send, len(payload), found)
        moving = self._moving_now(send, send_slot, len(payload), now)
        if session.read:
            assert send_slot is not None
            offer = next(self._offers)
            place = send.transfer, offer, send_slot, send.slot
            self._offer(offer, moving, wire.Offered(*place, len(payload), header))
            return
        try:
            token = session.transport.write(session.link, header, payload, send.slot)
        except TransportError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("write for transfer %s cannot start: %s", send.transfer, str(error))
            if send_slot is not None:
                self._send_slots.append(send_slot)
            self._act(self._producer.written(send.session, send.transfer, False, str(error)))
            return
        self._telemetry.count("sent_chunks")
        self._moving[session.transport.name, token] = moving

    def _gather(self, send: Send, slot: memoryview) -> memoryview:
        fence = self._fences.get(send.request)
        return self._cache.gather(send.route, send.chunk, send.pages, slot, fence)

    def _pieces(self, send: Send) -> Pieces | None:
        """Where the chunk lies, if the consumer may read it there."""
        route = send.route
        found = self._cache.pieces(route.source, route.source_head, route, send.chunk, send.pages)
        return found if found and len(found.addresses) <= wire.MAX_PIECES else None

    def _offer_pages(self, send: Send, session: _Session, pieces: Pieces, now: float) -> None:
        header = self._header(send, pieces.nbytes, pieces.checksum())
        moving = self._moving_now(send, None, pieces.nbytes, now)
        offer = next(self._offers)
        addresses = pieces.addresses.astype("<u8").tobytes()
        place = send.transfer, offer, send.slot
        self._offer(offer, moving, wire.OfferedPages(*place, pieces.piece_bytes, addresses, header))

    def _offer(self, offer: int, moving: _Moving, offered: wire.Message) -> None:
        self._moving[_OFFERED, offer] = moving
        self._look_ahead(moving.session)
        self._telemetry.count("sent_chunks")
        self._listener.send(moving.session, wire.encode(offered))

    def _moving_now(self, send: Send, send_slot: int | None, nbytes: int, now: float) -> _Moving:
        deadline = now + self._config.stall_timeout_s
        return _Moving(send.session, send.transfer, send_slot, nbytes, deadline)

    def _header(self, send: Send, nbytes: int, checksum: bytes) -> bytes:
        return wire.encode(
            wire.chunk_header(
                send.transfer,
                self._identity.epoch,
                send.identity,
                send.chunk,
                send.route.codec,
                nbytes,
                checksum,
            )
        )

    def _moved(self, key: tuple[str, int], ok: bool, detail: str) -> None:
        """A chunk has arrived, or certainly will not."""
        moving = self._moving.pop(key, None)
        if moving is None:
            return
        if moving.send_slot is not None:
            self._send_slots.append(moving.send_slot)
        self._look_ahead(moving.session)
        if ok:
            self._telemetry.count("sent_bytes", moving.nbytes)
        else:
            logger.warning("chunk of transfer %s failed: %s", moving.transfer, detail)
        self._act(self._producer.written(moving.session, moving.transfer, ok, detail))

    def _look_ahead(self, sender: bytes) -> None:
        """Offer no more than is soon read: what was just gathered is in the processors' cache."""
        offered = sum(
            kind == _OFFERED and moving.session == sender
            for (kind, _), moving in self._moving.items()
        )
        if offered < _READ_AHEAD:
            self._ahead.discard(sender)
        else:
            self._ahead.add(sender)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(session, message):
                    self._listener.send(session, wire.encode(message))
                case Free(request, cause):
                    self._fences.pop(request, None)
                    self._telemetry.count("releases", cause=cause or "delivered")
                    self._freed(action)
