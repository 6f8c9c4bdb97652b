# SPDX-License-Identifier: Apache-2.0
"""The producing side of an agent: sessions with consumers, and outgoing chunks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pd_connector.agent.commands import Computed
from pd_connector.agent.handshake import RefusedError, check_hello, connect
from pd_connector.agent.outbox import OFFERED, Key, Outbox, RevokedError, SendPath
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.resources import RankResources
from pd_connector.control.sockets import Listener
from pd_connector.errors import (
    Cause,
    MalformedMessageError,
    TransportError,
)
from pd_connector.kv.coding import permitted
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.slab import Slab
from pd_connector.plan.route import Route
from pd_connector.protocol import messages
from pd_connector.protocol.outgoing import Action, Free, Offer, Reply, Send
from pd_connector.protocol.producer import Producer
from pd_connector.transport.base import Transport, Written

logger = logging.getLogger("pd_connector.agent.producer_side")

_MAX_DETAIL = 1024  # characters of a refusal, which may quote what a peer sent


_READ_FIRST = frozenset({"shm"})
"""Transports over which reading costs one copy less than writing."""


@dataclass(slots=True)
class ConsumerSession:
    """What this side knows of one session."""

    engine_id: str
    path: SendPath
    routes: tuple[Route, ...]
    last_heard: float


class ProducerSide:
    """Used by the agent's thread only.

    Args:
        sending: the send slots.
        gate: shut by the engine's thread for requests whose pages may not be read.
        report: told of every request whose pages may be freed.
    """

    def __init__(
        self,
        resources: RankResources,
        sending: Slab,
        gate: PageGate,
        report: Callable[[Free], None],
    ) -> None:
        config, identity = resources.config, resources.identity
        self._config = config
        self._identity = identity
        self._cache = resources.cache
        self._transports = resources.transports
        self._telemetry = resources.telemetry
        self._gate = gate
        self._report = report
        self._codecs = permitted(config.codec, config.codec_max_error)
        self._producer = Producer(config)
        self._listener = Listener(resources.context, config.host, resources.keys)
        self._sessions: dict[bytes, ConsumerSession] = {}
        self._compiling: set[bytes] = set()  # sessions that wait for kernels of their routes
        self._outbox = Outbox(config, identity.epoch, resources.cache, sending, gate)

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def pollables(self) -> list[object]:
        return [self._listener.socket]

    @property
    def busy(self) -> bool:
        """Whether chunks are under way."""
        return self._outbox.busy

    @property
    def compiling(self) -> bool:
        """Whether consumers wait for kernels to be compiled."""
        return bool(self._compiling)

    @property
    def parts_with_integrity(self) -> list[object]:
        return [self._producer, self._outbox]

    def gauges(self) -> dict[str, float]:
        return {
            "leased_pages": self._producer.leased_pages,
            "outgoing_transfers": self._producer.transfers,
            "consumer_sessions": len(self._sessions),
            "send_slots": self._outbox.held,
        }

    def expect(self, transfer: str, now: float) -> None:
        self._producer.expect(transfer, now)

    def offer(self, offer: Offer, fence: Any, now: float) -> None:
        """KV may be sent. It is gathered after the work that `fence` stands for, which computes
        it."""
        self._outbox.fence(offer.request, fence)
        self._act(self._producer.offer(offer, now))

    def computed(self, computed: Computed, fence: Any) -> None:
        """A prefill has come further; see `Producer.computed`."""
        transfer, request, tokens, stop_layer = computed
        self._outbox.fence(request, fence)
        self._act(self._producer.computed(transfer, request, tokens, stop_layer))

    def revoke(self, transfer: str, request: str) -> None:
        """The request's pages are no longer its own. Its gate has been shut before."""
        self._outbox.forget(request)
        self._producer.revoke(transfer, request)
        self._gate.open(request)

    def withdraw(self, transfer: str, request: str) -> None:
        """The request offers nothing more. Its gate has been shut before."""
        self._outbox.forget(request)
        self._act(self._producer.withdraw(transfer, request))
        self._gate.open(request)

    def change_model(self, facts: ModelFacts) -> None:
        """The engine serves other weights: what was computed with the old ones is not sent any
        more, and every consumer must compare models again."""
        self._identity = self._identity._replace(facts=facts)
        detail = "the engine's weights have changed"
        self._act(self._producer.end_all(Cause.MODEL, detail))
        for sender in list(self._sessions):
            self._reject(sender, Cause.MODEL, detail)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Messages that wait, as (sender, bytes), for `handle`."""
        return self._listener.receive()

    def handle(self, arrived: Sequence[tuple[bytes, bytes]], now: float) -> None:
        """Handle messages of consumers."""
        for sender, data in arrived:
            try:
                message = messages.decode_consumer_message(data)
            except MalformedMessageError as error:
                self._reject(sender, Cause.MALFORMED_MESSAGE, str(error))
                continue
            if isinstance(message, messages.Hello):
                self._greet(sender, message, now)
                continue
            session = self._sessions.get(sender)
            if session is not None:
                session.last_heard = now
                self._dispatch(sender, message, now)
            elif isinstance(message, messages.Cancel):  # a refused one ends its transfers
                self._dispatch(sender, message, now)
            else:
                self._reject(sender, Cause.SESSION_LOST, "no session with you: say Hello first")

    def written(self, transport: Transport, written: Written) -> None:
        """A write has ended."""
        self._ended_write((transport.name, written.token), written.ok, written.detail)

    def send(self, now: float) -> None:
        """Start as many writes as there are send slots and credits."""
        self._compiling = {s for s in self._compiling if not self._compiled(s)}
        while not self._outbox.full:
            send = self._producer.next_send({*self._outbox.backpressured, *self._compiling})
            if send is None:
                return
            self._send(send, now)

    def tick(self, now: float) -> None:
        """End silent sessions, sessions whose transport does not move, and expired leases."""
        for sender in self._outbox.timed_out(now):
            if sender in self._sessions:
                detail = "a chunk was not moved within stall_timeout_s"
                self._reject(sender, Cause.STALLED, detail)
        for sender, session in list(self._sessions.items()):
            if session.last_heard + self._config.session_timeout_s < now:
                logger.warning("consumer %s fell silent: session ended", session.engine_id)
                self._forget(sender)
        self._act(self._producer.tick(now))

    def close(self) -> None:
        self._listener.close()

    def _dispatch(self, sender: bytes, message: messages.ConsumerMessage, now: float) -> None:
        match message:
            case messages.Watch():
                self._act(self._producer.watch(sender, message.transfer, now))
            case messages.Open():
                routes = self._sessions[sender].routes
                self._act(self._producer.open(sender, message, routes, now))
            case messages.Credit():
                self._producer.credit(sender, message.transfer, message.slots)
            case messages.Taken():
                if self._outbox.offered_to(sender, message.offer):
                    self._ended_write((OFFERED, message.offer), True, "")
            case messages.Done():
                self._act(self._producer.done(sender, message.transfer))
            case messages.Cancel():
                cause = Cause(message.cause) if message.cause in list(Cause) else Cause.ABORTED
                transfer, readers = message.transfer, message.readers
                self._act(self._producer.cancel(sender, transfer, cause, now, readers))
            case messages.Heartbeat():
                self._producer.heartbeat(sender, message.transfers, now)
                self._listener.send(sender, messages.encode(messages.Pulse(self._identity.epoch)))

    def _greet(self, sender: bytes, hello: messages.Hello, now: float) -> None:
        geometry = self._cache.geometry
        try:
            schema, routes = check_hello(hello, self._identity, geometry, self._codecs)
            self._forget(sender)
            transport, link = connect(hello, self._transports)
        except RefusedError as refused:
            return self._reject(sender, refused.cause, str(refused))
        read = self._reads(transport) and transport.name in hello.readable
        self._sessions[sender] = ConsumerSession(
            hello.engine_id, SendPath(transport, link, read), routes, now
        )
        if not self._compiled(sender):
            self._compiling.add(sender)
        welcome = messages.Welcome(
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
            facts=self._identity.facts,
        )
        self._listener.send(sender, messages.encode(welcome))
        return None

    def _compiled(self, sender: bytes) -> bool:
        """Whether the kernels that gather for this consumer are compiled; true if it has gone."""
        session = self._sessions.get(sender)
        return session is None or self._cache.prepare(session.routes, gathers=True)

    def _reads(self, transport: Transport) -> bool:
        """Whether consumers read from here over this transport."""
        auto = self._config.direction == "auto" and transport.name in _READ_FIRST
        return transport.readable and (auto or self._config.direction == "read")

    def _reject(self, sender: bytes, cause: Cause, detail: str) -> None:
        detail = detail[:_MAX_DETAIL]
        logger.warning("session refused (%s): %s", cause, detail)
        self._telemetry.count("rejected_sessions", cause=cause)
        self._forget(sender)
        reject = messages.Reject(cause, detail, messages.SCHEMA, messages.OLDEST_SCHEMA)
        self._listener.send(sender, messages.encode(reject))

    def _forget(self, sender: bytes) -> None:
        session = self._sessions.pop(sender, None)
        if session is None:
            return
        self._act(self._producer.session_lost(sender))
        for key in self._outbox.offers_to(sender):
            # If it still reads there, its checksum will be wrong.
            self._ended_write(key, False, "the session has ended")
        session.path.transport.disconnect(session.path.link)

    def _send(self, send: Send, now: float) -> None:
        """Send a chunk, if its pages are still kept."""
        if not send.kept:
            self._producer.unsend(send)
            detail = f"tokens {send.chunk.first_token}-{send.chunk.stop_token} are not kept"
            self._act(self._producer.fail(send.session, send.transfer, Cause.WINDOW, detail))
            return
        try:
            offer = self._outbox.post(send, self._sessions[send.session].path, now)
        except RevokedError:
            self._producer.unsend(send)
            return
        except TransportError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("write for transfer %s cannot start: %s", send.transfer, str(error))
            self._act(self._producer.written(send.session, send.transfer, False, str(error)))
            return
        if send.early:  # counted first: who sees all chunks sees those that were early
            self._telemetry.count("early_chunks")
        self._telemetry.count("sent_chunks")
        if offer is not None:
            self._listener.send(send.session, messages.encode(offer))

    def _ended_write(self, key: Key, ok: bool, detail: str) -> None:
        """A chunk has arrived, or certainly will not."""
        chunk = self._outbox.ended(key)
        if chunk is None:
            return
        if ok:
            self._telemetry.count("sent_bytes", chunk.nbytes)
        else:
            logger.warning("chunk of transfer %s failed: %s", chunk.transfer, detail)
        self._act(self._producer.written(chunk.session, chunk.transfer, ok, detail))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(session, message):
                    self._listener.send(session, messages.encode(message))
                case Free(request, cause):
                    self._outbox.forget(request)
                    self._telemetry.count("releases", cause=cause or "delivered")
                    self._report(action)
