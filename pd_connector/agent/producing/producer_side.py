# SPDX-License-Identifier: Apache-2.0
"""The producing half of an agent: it takes events to the producer's state machine, and carries out its actions."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from pd_connector.agent.confined import confined
from pd_connector.agent.handshake import RefusedError
from pd_connector.agent.integrity import HasIntegrity
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing.consumer_sessions import ConsumerSessions
from pd_connector.agent.producing.producer_commands import ProducerCommands
from pd_connector.agent.producing.send_pipeline import LEFT, ChunkSender, SendPipeline
from pd_connector.agent.resources import RankResources
from pd_connector.control.sockets import Listener
from pd_connector.errors import Cause, MalformedMessageError
from pd_connector.hosts import is_loopback, port_range
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.slab import Slab
from pd_connector.protocol.producing.outgoing import Action, Free, Reply
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport, Written

logger = logging.getLogger("pd_connector.agent.producing.producer_side")

_MAX_DETAIL = 1024  # characters of a refusal, which may quote what a peer sent


EVERY_S = 60.0
MOST_LINES = 5
"""Most log lines of one cause in `EVERY_S` seconds. One line afterwards counts the others."""


@dataclass
class _LogLines:
    since: float
    lines: int = 0
    left_out: int = 0


class Refusals:
    """Counts refused sessions, and logs a few of each cause: any program that reaches the port can cause them. Used by the
    agent's thread only.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._log_lines: dict[Cause, _LogLines] = {}

    def refused(self, cause: Cause, detail: str, now: float) -> None:
        """A session is refused. `detail` can quote a stranger's message."""
        self._telemetry.count("rejected_sessions", cause=cause)
        log = self._log_lines.setdefault(cause, _LogLines(now))
        if now - log.since >= EVERY_S:
            if log.left_out:
                logger.warning("sessions refused (%s): %d more of them", cause, log.left_out)
            log = self._log_lines[cause] = _LogLines(now)
        if log.lines == MOST_LINES:
            log.left_out += 1
            return
        log.lines += 1
        logger.warning("session refused (%s): %s", cause, one_line(detail))


def one_line(text: str) -> str:
    """The text with all characters escaped that are not printable, such as ends of lines."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


class ProducerSide:
    """Used by the agent's thread only.

    Attributes:
        commands: carries out the engine's commands.

    Args:
        sending: the send slots.
        gate: the engine's thread shuts it for requests whose pages must not be read.
        report: takes every request whose pages can be freed.
        port: control port to listen on; 0: that of the config.
    """

    def __init__(
        self,
        resources: RankResources,
        sending: Slab,
        gate: PageGate,
        report: Callable[[Free], None],
        port: int,
    ) -> None:
        config, identity = resources.config, resources.identity
        self._config = config
        self._identity = identity
        self._telemetry, self._refusals = resources.telemetry, Refusals(resources.telemetry)
        self._steps = resources.steps
        self._ranks = resources.ranks
        self._report = report
        self._producer = Producer(
            config, resources.cache.pages, late_revokes=resources.steps.late_revokes
        )
        ports = range(port, port + 1) if port else port_range(config.control_port)
        self._listener = Listener(
            resources.context, config.host, resources.keys, ports, config.connect_timeout_s
        )
        if config.insecure and is_loopback(config.host):
            logger.warning(
                "insecure: true, but host is %s: engines on other machines would dial themselves. Set `host` "
                "(config key, or PD_CONNECTOR_HOST) to an address of this machine",
                config.host,
            )
        self._sessions = ConsumerSessions(resources)
        self._unheard: set[bytes] = set()  # consumers that did not take a message
        self._next_sweep = 0.0
        self._send_pipeline = SendPipeline(config, identity.epoch, resources.cache, sending, gate)
        self._sender = ChunkSender(
            resources, self._producer, self._send_pipeline, self._sessions, self._say, self._act
        )
        self.commands = ProducerCommands(
            self._producer,
            self._send_pipeline,
            gate,
            resources.cache,
            resources.telemetry,
            self._act,
        )

    @property
    def host(self) -> str:
        return self._listener.host

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def pollables(self) -> list[object]:
        return self._listener.pollables

    @property
    def busy(self) -> bool:
        """Whether chunks are under way."""
        return self._send_pipeline.busy

    @property
    def compiling(self) -> bool:
        """Whether consumers wait for kernels to be compiled."""
        return bool(self._sessions.compiling)

    @property
    def waits_for_device(self) -> bool:
        """Whether KV to be sent is still computed by the engine's device."""
        return self.commands.waits

    @property
    def device_done(self) -> bool:
        """Whether some of this KV is computed now."""
        return self.commands.due

    @property
    def parts_with_integrity(self) -> list[HasIntegrity]:
        return [self._producer, self._send_pipeline]

    def gauges(self) -> dict[str, float]:
        return {
            "leased_pages": self._producer.leased_pages,
            "outgoing_transfers": self._producer.transfers,
            "consumer_sessions": len(self._sessions),
            "send_slots": self._send_pipeline.held,
        }

    def change_model(self, facts: ModelFacts, now: float) -> None:
        """The engine serves other weights. KV of the old weights is not sent any more. Sessions end, so that models are
        compared again."""
        self.commands.resume_all(now)  # their KV is of the old weights
        self._identity = self._identity._replace(facts=facts)
        self._sessions.change_model(facts)
        detail = "the engine's weights have changed"
        self._act(self._producer.end_all(Cause.MODEL, detail))
        for sender, _ in self._sessions:
            self._reject(sender, Cause.MODEL, detail, now)

    def know_weights(self, facts: ModelFacts) -> None:
        """All bytes of the engine's weights were read: from now on consumers get sessions."""
        self._identity = self._identity._replace(facts=facts)
        self._sessions.change_model(facts)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Take the waiting messages, as (sender, bytes), for `handle`."""
        return self._listener.receive()

    def handle(self, arrived: Sequence[tuple[bytes, bytes]], now: float) -> None:
        """Handle messages of consumers."""
        for sender, data in arrived:
            with self._ending_on_error(sender, now):
                self._handle(sender, data, now)

    def _handle(self, sender: bytes, data: bytes, now: float) -> None:
        try:
            message = messages.decode_consumer_message(data)
        except MalformedMessageError as error:
            return self._reject(sender, Cause.MALFORMED_MESSAGE, str(error), now)
        if isinstance(message, messages.Hello):
            return self._greet(sender, message, now)
        if isinstance(message, messages.AskRanks):
            return self._tell_ranks(sender)
        session = self._sessions.get(sender)
        if session is not None:
            session.last_heard = now
            self._dispatch(sender, message, now)
        elif isinstance(message, messages.Cancel):  # a consumer without a session can cancel
            self._dispatch(sender, message, now)
        else:
            self._reject(sender, Cause.SESSION_LOST, "no session with you: say Hello first", now)
        return None

    def _tell_ranks(self, sender: bytes) -> None:
        ranks = [
            messages.RankAddress(source.host, source.port, shard) for source, shard in self._ranks()
        ]
        self._say(sender, messages.Ranks(self._identity.engine_id, ranks))

    def _say(self, receiver: bytes, message: messages.Message) -> None:
        """Send a message. A consumer that does not take it loses its session."""
        if not self._listener.send(receiver, messages.encode(message)):
            self._unheard.add(receiver)

    def _ending_on_error(self, sender: bytes, now: float) -> AbstractContextManager[None]:
        """An error of one session ends only this session."""
        detail = "an unexpected error of the producer"
        give_up = partial(self._reject, sender, Cause.INTERNAL, detail, now)
        return confined(self._telemetry, "session with a consumer", give_up)

    def written(self, transport: Transport, written: Written) -> None:
        """A write has ended."""
        if not written.ok:
            self._next_sweep = 0.0  # its link may be broken
        self._sender.chunk_ended((transport.name, written.token), written.ok, written.detail)

    def send(self, now: float) -> None:
        """Send chunks while there are send slots and credits."""
        for chunk in self._sender.ready():
            with self._ending_on_error(chunk.session, now):
                self._sender.send(chunk, now)
        self._sender.settle()

    def tick(self, now: float) -> None:
        """End silent sessions, sessions with late chunks, and expired leases."""
        for sender in self._send_pipeline.in_flight.timed_out(now):
            if sender in self._sessions:
                detail = "a chunk was not moved within stall_timeout_s"
                self._reject(sender, Cause.STALLED, detail, now)
        unheard, self._unheard = self._unheard, set()
        for sender in unheard:
            if sender in self._sessions:
                self._forget(sender, now, "takes no messages")
        for sender in self._listener.broken():
            if session := self._sessions.get(sender):
                session.broken_at = now
        if now >= self._next_sweep:
            self._next_sweep = now + self._config.heartbeat_s / 2
            for sender in self._sessions.silent(now):
                self._forget(sender, now, "is gone or silent")
            for sender, session in self._sessions:
                if session.path.transport.broken(session.path.link):
                    detail = "the data connection has ended"
                    self._reject(sender, Cause.TRANSPORT, detail, now)
        if closed := self._listener.tick(now):
            self._telemetry.count("closed_connections", closed)
        self._act(self._producer.tick(now))

    def close(self) -> None:
        self._listener.close()

    def _dispatch(self, sender: bytes, message: messages.ConsumerMessage, now: float) -> None:
        match message:
            case messages.Watch(transfer, keep):
                self._act(self._producer.watch(sender, transfer, now, keep=keep))
            case messages.Open():
                session = self._sessions[sender]
                routes = session.routes if message.coded else session.plain
                self._act(self._producer.open(sender, message, routes, now))
            case messages.Credit():
                self._producer.credit(sender, message.transfer, message.slots)
            case messages.Taken():
                if self._send_pipeline.in_flight.left_to(sender, message.number):
                    self._sender.chunk_ended((LEFT, message.number), True, "")
            case messages.Done():
                self._act(self._producer.done(sender, message.transfer))
            case messages.Cancel():
                cause = Cause(message.cause) if message.cause in list(Cause) else Cause.ABORTED
                transfer, readers = message.transfer, message.readers
                self._act(self._producer.cancel(sender, transfer, cause, now, readers))
            case messages.Heartbeat():
                self._sessions.expect_heartbeat(self._sessions[sender], message.next_ms)
                self._producer.heartbeat(message.transfers, now)
                age_ms = int(1000 * self._steps.age_s())
                self._say(sender, messages.Pulse(self._identity.epoch, age_ms))

    def _greet(self, sender: bytes, hello: messages.Hello, now: float) -> None:
        self._forget(sender, now)
        try:
            welcome = self._sessions.open(sender, hello, now)
        except RefusedError as refused:
            # Older versions, which tell samples, do not know the cause `unread`.
            unknown = refused.cause is Cause.UNREAD and hello.facts.samples
            cause = Cause.MODEL if unknown else refused.cause
            return self._reject(sender, cause, str(refused), now)
        self._listener.serve(sender, now)
        self._say(sender, welcome)
        return None

    def _reject(self, sender: bytes, cause: Cause, detail: str, now: float) -> None:
        detail = detail[:_MAX_DETAIL]
        self._refusals.refused(cause, detail, now)
        self._forget(sender, now)
        reject = messages.Reject(cause, detail, messages.SCHEMA, messages.OLDEST_SCHEMA)
        self._say(sender, reject)

    def _forget(self, sender: bytes, now: float, why: str = "") -> None:
        session = self._sessions.pop(sender)
        if session is None:
            return
        if why:
            logger.info("consumer %s %s: session ended", one_line(session.engine_id), why)
        self._listener.release(sender, now)
        self._act(self._producer.session_lost(sender))
        for key in self._send_pipeline.in_flight.unread_by(sender):
            # If the consumer still reads the chunk, its checksum will be wrong.
            self._sender.chunk_ended(key, False, "the session has ended")
        session.path.transport.disconnect(session.path.link)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(session, message):
                    self._say(session, self._sessions.fitting(session, message))
                case Free(request, cause):
                    self._send_pipeline.forget(request)
                    self._telemetry.count("releases", cause=cause or "delivered")
                    self._report(action)
