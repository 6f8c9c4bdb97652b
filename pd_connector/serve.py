# SPDX-License-Identifier: Apache-2.0
"""The producing half of an agent: sessions with consumers, and the chunks that go out."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_connector import wire
from pd_connector.config import Config
from pd_connector.errors import Cause, MalformedMessageError, TransportError
from pd_connector.integrity import checksum
from pd_connector.pages import PagedCache
from pd_connector.plan import refusal
from pd_connector.producer import Action, Free, Offer, Producer, Reply, Send
from pd_connector.security import CurveKeys
from pd_connector.session import Context, Listener
from pd_connector.slab import Slab
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Route, Transport, Written

logger = logging.getLogger("pd_connector.serve")

_MAX_DETAIL = 1024  # characters of a refusal, which may quote what a peer sent


class Identity(NamedTuple):
    """Who this rank is, as its peers see it. `epoch` differs for every start."""

    engine_id: str
    epoch: int
    model: bytes


@dataclass(slots=True)
class _Session:
    engine_id: str
    transport: Transport
    route: Route
    heard: float


class _Writing(NamedTuple):
    session: bytes
    transfer: str
    send_slot: int
    nbytes: int
    deadline: float


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
        freed: Callable[[Free], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._cache = cache
        self._transports = transports
        self._sending = sending
        self._telemetry = telemetry
        self._freed = freed
        self._producer = Producer(config, cache.geometry)
        self._listener = Listener(context, config.host, keys)
        self._sessions: dict[bytes, _Session] = {}
        self._writing: dict[tuple[str, int], _Writing] = {}
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
        return bool(self._writing)

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
        """Take pages into lease. `fence` orders the work that computed them before a gather."""
        if fence is not None:
            self._fences[offer.request] = fence
        self._act(self._producer.offer(offer, now))

    def withdraw(self, transfer: str) -> None:
        self._act(self._producer.withdraw(transfer))

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
        writing = self._writing.pop((transport.name, written.token), None)
        if writing is None:
            return
        self._send_slots.append(writing.send_slot)
        if written.ok:
            self._telemetry.count("sent_bytes", writing.nbytes)
        else:
            logger.warning("write for transfer %s failed: %s", writing.transfer, written.detail)
        self._act(
            self._producer.written(writing.session, writing.transfer, written.ok, written.detail)
        )

    def send(self, now: float) -> None:
        """Start as many writes as there are send slots and credits."""
        while self._send_slots and (send := self._producer.next_send()) is not None:
            self._write(send, now)

    def tick(self, now: float) -> None:
        """End silent sessions, sessions whose transport does not move, and expired leases."""
        for stuck in {w.session for w in self._writing.values() if w.deadline <= now}:
            if stuck in self._sessions:
                detail = "a write did not end within stall_timeout_s"
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
            case wire.Open():
                self._act(self._producer.open(sender, message, now))
            case wire.Credit():
                self._producer.credit(sender, message.transfer, message.slots)
            case wire.Done():
                self._act(self._producer.done(sender, message.transfer))
            case wire.Cancel():
                cause = Cause(message.cause) if message.cause in list(Cause) else Cause.ABORTED
                self._act(self._producer.cancel(sender, message.transfer, cause, now))
            case wire.Heartbeat():
                self._producer.heartbeat(sender, message.transfers, now)
                self._listener.send(sender, wire.encode(wire.Pulse(self._identity.epoch)))

    def _greet(self, sender: bytes, hello: wire.Hello, now: float) -> None:
        schema = wire.common_schema(hello.newest, hello.oldest)
        mine = f"{wire.OLDEST_SCHEMA}-{wire.SCHEMA}"
        if schema is None:
            detail = f"wire schema: producer speaks {mine}, consumer {hello.oldest}-{hello.newest}"
            return self._reject(sender, Cause.VERSION, detail)
        if hello.expected_engine_id not in ("", self._identity.engine_id):
            detail = (
                f"engine {self._identity.engine_id} answers here, {hello.expected_engine_id} was "
                "wanted (restarted since?)"
            )
            return self._reject(sender, Cause.UNREACHABLE, detail)
        if hello.model != self._identity.model:
            detail = (
                f"model fingerprint {self._identity.model.hex()} here, {hello.model.hex()} there: "
                "both engines must serve the same weights and config"
            )
            return self._reject(sender, Cause.MODEL, detail)
        if unlike := refusal(self._cache.geometry, hello.geometry):
            return self._reject(sender, Cause.GEOMETRY, unlike)
        self._forget(sender)
        connected = self._connect(hello)
        if isinstance(connected, str):
            return self._reject(sender, Cause.NO_TRANSPORT, connected)
        transport, route = connected
        self._sessions[sender] = _Session(hello.engine_id, transport, route, now)
        welcome = wire.Welcome(
            schema=schema,
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            transport=transport.name,
            transport_address=transport.address(),
            slot_bytes=self._config.slot_bytes,
        )
        self._listener.send(sender, wire.encode(welcome))
        return None

    def _connect(self, hello: wire.Hello) -> tuple[Transport, Route] | str:
        """The first transport of ours that reaches the consumer, or why there is none."""
        problems: list[str] = []
        for transport in self._transports:
            address = hello.transports.get(transport.name)
            if address is None:
                problems.append(f"{transport.name}: not offered")
                continue
            try:
                return transport, transport.connect(address)
            except TransportError as error:
                problems.append(str(error))
        offered = ", ".join(hello.transports) or "none"
        return f"consumer offers {offered}; here {'; '.join(problems)}"

    def _reject(self, sender: bytes, cause: Cause, detail: str) -> None:
        detail = detail[:_MAX_DETAIL]
        logger.warning("session refused (%s): %s", cause, detail)
        self._telemetry.count("rejected_sessions", cause=cause)
        self._forget(sender)
        reject = wire.Reject(cause, detail, wire.SCHEMA, wire.OLDEST_SCHEMA)
        self._listener.send(sender, wire.encode(reject))

    def _forget(self, sender: bytes) -> None:
        session = self._sessions.pop(sender, None)
        if session is not None:
            self._act(self._producer.session_lost(sender))
            session.transport.disconnect(session.route)

    def _write(self, send: Send, now: float) -> None:
        session = self._sessions[send.session]
        send_slot = self._send_slots.pop()  # the one used last is warm in the cache
        fence = self._fences.get(send.request)
        # Into memory of our own, never straight into the landing slot: a producer that was given
        # up may still write there, and the checksum would certify its bytes.
        payload = self._cache.gather(send.chunk, send.pages, self._sending.slot(send_slot), fence)
        header = wire.ChunkHeader(
            transfer=send.transfer,
            epoch=self._identity.epoch,
            sequence=send.chunk.sequence,
            identity=send.identity,
            first_layer=send.chunk.first_layer,
            stop_layer=send.chunk.stop_layer,
            first_page=send.chunk.first_page,
            stop_page=send.chunk.stop_page,
            codec=send.codec,
            nbytes=len(payload),
            checksum=checksum(payload),
        )
        try:
            data = wire.encode(header)
            token = session.transport.write(session.route, data, payload, send.slot)
        except TransportError as error:
            logger.warning("write for transfer %s cannot start: %s", send.transfer, error)
            self._send_slots.append(send_slot)
            self._act(self._producer.written(send.session, send.transfer, False, str(error)))
            return
        self._telemetry.count("sent_chunks")
        deadline = now + self._config.stall_timeout_s
        writing = _Writing(send.session, send.transfer, send_slot, len(payload), deadline)
        self._writing[session.transport.name, token] = writing

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(session, message):
                    self._listener.send(session, wire.encode(message))
                case Free(request, cause):
                    self._fences.pop(request, None)
                    self._telemetry.count("releases", cause=cause or "delivered")
                    self._freed(action)
