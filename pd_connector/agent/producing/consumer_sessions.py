# SPDX-License-Identifier: Apache-2.0
"""A producer's sessions with consumers, from `Hello` to their end."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pd_connector.agent.handshake import RefusedError, check_hello, connect
from pd_connector.agent.resources import RankResources
from pd_connector.errors import Cause
from pd_connector.kv.coding import RAW, permitted
from pd_connector.kv.model import ModelFacts
from pd_connector.plan.route import Route
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.final_token import needs_drafts
from pd_connector.remedies import unread_in
from pd_connector.transport.base import Transport

MOST_SESSIONS = 1024
LAST_MESSAGES_S = 0.2
"""Seconds after the end of a consumer's connection in which its last messages are handled."""
_LATE = 1.5
"""Factor: a consumer is lost after 1.5 times the announced time to its next heartbeat."""


class SendPath(NamedTuple):
    """How chunks get to a consumer."""

    transport: Transport
    link: Hashable  # the transport's handle of the consumer
    read: bool  # chunks are left for the consumer to read


@dataclass(slots=True)
class ConsumerSession:
    """One session with a consumer."""

    engine_id: str
    path: SendPath
    routes: tuple[Route, ...]
    plain: tuple[Route, ...]  # the same in `raw`, for transfers that are not coded
    last_heard: float
    patience_s: float  # the session is lost after this time without a message
    drafts: bool  # it goes on from first drafts
    broken_at: float = math.inf  # when its connection was seen to have ended


class ConsumerSessions:
    """The sessions, by the sender's routing id in libzmq. Used by the agent's thread only."""

    def __init__(self, resources: RankResources) -> None:
        config = resources.config
        self._config = config
        self._identity = resources.identity
        self._cache = resources.cache
        self._transports = resources.transports
        self._codecs = permitted(config.codec, config.codec_max_error)
        self._telemetry = resources.telemetry
        self._choice = resources.choice
        self._buffers = resources.buffers
        self._sessions: dict[bytes, ConsumerSession] = {}
        self._compiling: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[tuple[bytes, ConsumerSession]]:
        """Every session that exists when the iteration begins."""
        return iter(list(self._sessions.items()))

    def __contains__(self, sender: bytes) -> bool:
        return sender in self._sessions

    def get(self, sender: bytes) -> ConsumerSession | None:
        return self._sessions.get(sender)

    def __getitem__(self, sender: bytes) -> ConsumerSession:
        return self._sessions[sender]

    @property
    def compiling(self) -> set[bytes]:
        """Sessions whose kernels are not compiled yet: nothing can be gathered for them."""
        if self._compiling:
            self._compiling = {s for s in self._compiling if not self._compiled(s)}
        return self._compiling

    def open(self, sender: bytes, hello: messages.Hello, now: float) -> messages.Welcome:
        """Begin a session with a consumer that has none; returns the answer.

        Raises RefusedError if the two cannot work together, or there are too many sessions.
        """
        if self._identity.facts.reading:
            far = unread_in(self._telemetry.gauges())
            raise RefusedError(Cause.UNREAD, f"the producer does not know its weights yet: {far}")
        geometry = self._cache.geometry
        schema, routes = check_hello(hello, self._identity, geometry, self._codecs)
        plain = check_hello(hello, self._identity, geometry, (RAW.name,))[1]
        if len(self._sessions) >= MOST_SESSIONS:
            detail = f"{MOST_SESSIONS} consumers have a session here"
            raise RefusedError(Cause.SESSION_LIMIT, detail)
        transport, link = connect(hello, self._transports)
        self._telemetry.count("sessions", transport=transport.label or transport.name)
        if slower := self._choice.why_slower(transport.name):
            self._telemetry.count("slower_sessions", cause=slower)
        on_device = transport.device_slots(link) is not None
        if cause := self._buffers.why_staged(reaches=transport.reaches_devices, used=on_device):
            self._telemetry.count("staged_sessions", cause=cause)
        read = self._reads(transport) and transport.name in hello.readable
        path = SendPath(transport, link, read)
        patience_s = (
            self._config.session_timeout_s
        )  # until its first heartbeat (`expect_heartbeat`)
        self._sessions[sender] = ConsumerSession(
            hello.engine_id, path, routes, plain, now, patience_s, needs_drafts(hello.needs)
        )
        if not self._compiled(sender):
            self._compiling.add(sender)
        return messages.Welcome(
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
            plain=True,
            lease_ms=int(1000 * self._config.lease_s),
        )

    def fitting(self, sender: bytes, message: messages.Message) -> messages.Message:
        """The message in a form that this consumer can decode: the first draft is left out unless
        the consumer needs drafts."""
        session = self._sessions.get(sender)
        if not isinstance(message, messages.Accept) or message.final_token is None:
            return message
        if message.final_token.draft is None or (session is not None and session.drafts):
            return message
        plain = msgspec.structs.replace(message.final_token, draft=None)
        return msgspec.structs.replace(message, final_token=plain)

    def change_model(self, facts: ModelFacts) -> None:
        """The engine serves other weights. The caller ends the present sessions."""
        self._identity = self._identity._replace(facts=facts)

    def pop(self, sender: bytes) -> ConsumerSession | None:
        """Forget a session."""
        self._compiling.discard(sender)
        return self._sessions.pop(sender, None)

    def silent(self, now: float) -> list[bytes]:
        """Sessions without a message for too long, or whose connection has ended."""
        return [
            sender
            for sender, session in self
            if session.last_heard + session.patience_s < now
            or session.broken_at + LAST_MESSAGES_S < now
        ]

    def expect_heartbeat(self, session: ConsumerSession, next_ms: int) -> None:
        """The consumer has announced its next heartbeat, in `next_ms` milliseconds; 0: not announced."""
        late_s = min(_LATE * next_ms / 1000, self._config.lease_s)
        session.patience_s = max(self._config.session_timeout_s, late_s)

    def _compiled(self, sender: bytes) -> bool:
        session = self._sessions.get(sender)
        return session is None or self._cache.prepare(
            (*session.routes, *session.plain), gathers=True
        )

    def _reads(self, transport: Transport) -> bool:
        """Whether consumers read chunks from this rank over this transport."""
        auto = self._config.direction == "auto" and transport.reads_first
        return transport.readable and (auto or self._config.direction == "read")
