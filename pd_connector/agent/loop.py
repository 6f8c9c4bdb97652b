# SPDX-License-Identifier: Apache-2.0
"""The loop of the agent's thread. It takes commands, messages, completions and deadlines to the state machines. It owns the
transports, slots, sockets and sessions."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from pd_connector.agent.commands import (
    ChangeModel,
    Command,
    CommandQueue,
    Computed,
    Distrust,
    Drop,
    Expect,
    Hold,
    KnowWeights,
    ReadWeights,
    Revoke,
    Withdraw,
)
from pd_connector.agent.consuming.consumer_side import ConsumerSide
from pd_connector.agent.consuming.open_sessions import MOST_SESSIONS
from pd_connector.agent.engine_steps import EngineSteps
from pd_connector.agent.handshake import RankIdentity
from pd_connector.agent.integrity import HasIntegrity, checks_wanted
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.agent.pool_side import PoolSide, accelerator
from pd_connector.agent.producing.producer_side import ProducerSide
from pd_connector.agent.resources import RankResources
from pd_connector.codec import COMPILER
from pd_connector.config import Config
from pd_connector.control.keys import CurveKeys, Gatekeeper
from pd_connector.errors import TransportError
from pd_connector.kv.coding import RAW
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import knowing
from pd_connector.memory.buffers import Buffers
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.codecs import pool_codecs
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.record import Writer
from pd_connector.pool.store.base import Store
from pd_connector.pool.trust import WriterTrust
from pd_connector.protocol.consuming.audit import AuditBook
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Landed, Transport, TransportParts, Written
from pd_connector.transport.choice import FASTEST_BETWEEN_MACHINES, Choice, with_names
from pd_connector.transport.registry import make_transports, slot_use

_MOST_SOCKETS = 4 * MOST_SESSIONS + 1024
"""libzmq's own limit is 1023. A session takes three sockets; transports take others."""
_DATA_TURNS_S = 0.005
"""Seconds in which the loop handles transports alone while parts of chunks arrive. A full step costs as much as a copy of
some MiB."""


_BUSY_TRANSPORT_POLL_MS = 1
"""Poll interval for transports that do not signal progress (`Transport.restless`)."""
_UNHURRIED_POLL_MS = 5
"""Longest wait for further answers to heartbeats. Many sessions' answers cost less if they are taken together."""
_COMPILING_POLL_MS = 20
"""Poll interval while kernels compile: a background compilation does not signal its end."""
_DOUBT_S = 0.25
"""Poll interval while transfers are under way: a peer's machine that stops to acknowledge does not signal that."""
_DEVICE_POLL_MS = 1
"""Poll interval for a device that computes a step."""


class LoopWaits:
    """Waits until the loop has work: for sockets, transports, the engine's device and deadlines. Used by the agent's thread
    only.

    Attributes:
        only_data: whether the last wait ended only because of transports.

    Args:
        always: sockets and descriptors to poll besides transports and sessions.
        longest_s: longest wait, in seconds.
    """

    def __init__(
        self,
        always: Sequence[Any],
        transports: Sequence[Transport],
        producer: ProducerSide | None,
        consumer: ConsumerSide | None,
        pool: PoolSide | None,
        longest_s: float,
    ) -> None:
        self.only_data = False
        self._always = always
        self._transports = transports
        self._producer, self._consumer, self._pool = producer, consumer, pool
        self._longest_s = longest_s
        self._poller = self._others = zmq.Poller()  # `_others`: without a consumer's sessions
        self._polled: list[Any] = []

    def wait(self, stepped: float) -> None:
        """Wait until there may be work.

        Args:
            stepped: the begin of the last full step, in seconds, monotonic.
        """
        consumer = self._consumer
        sessions = consumer.pollables if consumer else []
        others = self._pollables()
        if [*sessions, *others] != self._polled:  # rarely
            self._polled = [*sessions, *others]
            self._poller, self._others = _poller(self._polled), _poller(others)
        sides = [side for side in (self._producer, consumer) if side]
        restless = any(t.restless for t in self._transports) and any(s.busy for s in sides)
        timeout_ms = _BUSY_TRANSPORT_POLL_MS if restless else self._longest_ms(stepped)
        if any(side.compiling for side in sides):
            timeout_ms = min(timeout_ms, _COMPILING_POLL_MS)
        if consumer and consumer.urgent:
            timeout_ms = 0
        elif consumer and consumer.unhurried and not restless:
            self._others.poll(_UNHURRIED_POLL_MS)
        ready = self._poll(timeout_ms)
        data = [each for transport in self._transports for each in transport.pollables]
        self.only_data = bool(timeout_ms and ready) and all(what in data for what in ready)

    def _poll(self, timeout_ms: int) -> list[Any]:
        """Wait for ready pollables, at most `timeout_ms`, and return them. Also returns when the engine's device has
        computed pages to be sent or saved: that is polled, which is cheap."""
        ends = time.monotonic() + timeout_ms / 1000
        sides = [side for side in (self._producer, self._pool) if side]
        while timeout_ms > _DEVICE_POLL_MS and any(side.waits_for_device for side in sides):
            ready = self._poller.poll(_DEVICE_POLL_MS)
            done = any(side.device_done for side in sides)
            if ready or done or time.monotonic() >= ends:
                return [what for what, _ in ready]
        return [what for what, _ in self._poller.poll(timeout_ms)]

    def _longest_ms(self, stepped: float) -> int:
        """The time until the next deadline."""
        wait_s = self._longest_s
        if any(side.busy for side in (self._producer, self._consumer) if side):
            wait_s = min(wait_s, _DOUBT_S)
        if self._consumer:
            wait_s = min(wait_s, max(0.0, self._consumer.due - stepped))
        if self._pool:
            wait_s = min(wait_s, max(0.0, self._pool.due_s - stepped))
        return math.ceil(1000 * wait_s)

    def _pollables(self) -> list[Any]:
        """All pollables except the consumer's sessions."""
        pollables = list(self._always)
        for owner in (self._producer, *self._transports):
            if owner:
                pollables += owner.pollables
        return pollables


def _poller(pollables: Sequence[Any]) -> zmq.Poller:
    poller = zmq.Poller()
    for pollable in pollables:
        poller.register(pollable, zmq.POLLIN)
    return poller


class Loop:
    """Made by the engine's thread, then used by the agent's thread only.

    Args:
        commands: the engine's commands.
        gate: the engine's thread shuts it for requests whose pages must not be touched.
        report: takes every outcome.
        steps: the engine's steps.
        ranks: returns all ranks of this engine that it has introduced.
        produces: serve consumers.
        consumes: fetch from producers.
        shards: shards of all ranks of this engine, this one included.
        audits: results of audits; None if producers need not pass one.
        port: control port to listen on; 0: that of the config.
        wrap: wraps each transport, for tests.
        store: keeps chunks of KV after their request; None without a pool.
        trust: the writers whose pool chunks this engine uses.
        engine: name and version of the engine, for records of the pool.

    Raises:
        PDConnectorError: the host cannot be listened on, or a transport cannot be set up.
    """

    def __init__(
        self,
        config: Config,
        identity: RankIdentity,
        cache: PagedCache,
        commands: CommandQueue,
        gate: PageGate,
        telemetry: Telemetry,
        report: Callable[[Outcome], None],
        steps: EngineSteps,
        ranks: Callable[[], Sequence[Peer]],
        *,
        produces: bool,
        consumes: bool,
        shards: Sequence[Shard],
        audits: AuditBook | None,
        port: int = 0,
        wrap: Callable[[Transport], Transport],
        choice: Choice,
        store: Store | None = None,
        trust: WriterTrust | None = None,
        engine: str = "",
    ) -> None:
        if not produces:  # no peer dials it
            config = msgspec.structs.replace(config, data_port=0)
        self._config = config
        self._facts = identity.facts
        self._cache = cache
        self._commands = commands
        self._telemetry = telemetry
        self._steps = steps
        self._checks = checks_wanted()
        self._stepped = 0.0  # the begin of the last full step
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = _MOST_SOCKETS
        self._gatekeeper: Gatekeeper | None = None
        self.buffers = Buffers(
            config,
            cache.device,
            slot_use(config.transports),
            produces=produces,
            consumes=consumes,
            slot_device=cache.slot_device,
        )
        self._transports: list[Transport] = []
        self.producer_side: ProducerSide | None = None
        self.consumer_side: ConsumerSide | None = None
        self.pool_side: PoolSide | None = None
        try:
            keys = CurveKeys.derive(config.key) if config.key else None
            self._gatekeeper = Gatekeeper(self._context, keys) if keys else None
            codecs = pool_codecs(config, consumes=consumes)
            self._begin_to_compile(codecs.readable)
            made = self._make_transports(keys, choice)
            self.data_port = (
                max((transport.port for transport in made), default=0) if produces else 0
            )
            self._transports = [wrap(transport) for transport in made]
            resources = RankResources(
                config=config,
                identity=identity,
                context=self._context,
                keys=keys,
                cache=cache,
                transports=self._transports,
                telemetry=telemetry,
                wake=commands.wake,
                steps=steps,
                ranks=ranks,
                choice=self.choice,
                buffers=self.buffers,
                audits=audits,
            )
            if produces:
                self.producer_side = ProducerSide(
                    resources, self.buffers.sending, gate, report, port
                )
            if consumes:
                self.consumer_side = ConsumerSide(resources, shards, gate, report)
            if store and trust:
                kind = f"{engine} on {accelerator(cache.device)}"
                writer = Writer(kind, identity.engine_id, codecs.passed)
                self.pool_side = PoolSide(
                    cache,
                    telemetry,
                    commands.wake,
                    identity.facts,
                    store,
                    trust,
                    writer,
                    codecs,
                    len(shards) or 1,
                    gate,
                    report,
                    experts=bool(audits and audits.experts),
                )
        except BaseException:
            self.close()
            raise
        self._waits = LoopWaits(
            [commands.wakes, *([self._gatekeeper.socket] if self._gatekeeper else [])],
            self._transports,
            self.producer_side,
            self.consumer_side,
            self.pool_side,
            config.heartbeat_s,
        )
        device_slots = sum(slab.slots for slab in self.buffers.device_slots.slabs)
        telemetry.gauge(device_slots=device_slots)
        self._update_gauges()

    def _make_transports(self, keys: CurveKeys | None, choice: Choice) -> list[Transport]:
        """The transports of the config. `nixl` is left out if it was chosen automatically and cannot be set up."""
        self.choice = choice
        try:
            return make_transports(self._parts(self._config, keys))
        except TransportError as error:
            if not choice.automatic or FASTEST_BETWEEN_MACHINES not in choice.names:
                raise
            self.choice = choice.failed(error)
            if self.buffers.device_slots.slabs:
                self.buffers.leave_device(str(error))
        config = with_names(self._config, self.choice.names)
        return make_transports(self._parts(config, keys))

    def _parts(self, config: Config, keys: CurveKeys | None) -> TransportParts:
        return TransportParts(self._context, config, keys, self.buffers)

    @property
    def host(self) -> str:
        """Numeric address that consumers dial."""
        return self.producer_side.host if self.producer_side else self._config.host

    @property
    def port(self) -> int:
        """Control port that consumers dial; 0 for a rank that does not produce."""
        return self.producer_side.port if self.producer_side else 0

    @property
    def parts_with_integrity(self) -> list[HasIntegrity]:
        """The parts that count slots and transfers."""
        sides = [side for side in (self.producer_side, self.consumer_side) if side]
        return [part for side in sides for part in side.parts_with_integrity]

    def wait(self) -> None:
        """Wait until there may be work."""
        self._waits.wait(self._stepped)

    def step(self, now: float) -> None:
        """One turn: handle all that has arrived or is due. `now` is in seconds, monotonic."""
        moved: list[tuple[Transport, list[Written], list[Landed]]] = []
        if self._waits.only_data and now < self._stepped + _DATA_TURNS_S:
            moved = [(transport, *transport.poll()) for transport in self._transports]
            if not any(written or landed for _, written, landed in moved):
                return  # only a part of a chunk has arrived
        self._stepped = now
        producer_side, consumer_side = self.producer_side, self.consumer_side
        if self._gatekeeper:
            self._gatekeeper.answer()
        messages = producer_side.receive() if producer_side else []
        # Set before commands are taken: commands of later steps may come after the `drain`.
        self._steps.handled = self._steps.count
        # Commands before messages: an offer is known when messages that were sent after it are handled.
        for command, fence in self._commands.drain():
            self._execute(command, fence, now)
        if producer_side:
            producer_side.commands.resume(now)
            producer_side.handle(messages, now)
        if consumer_side:
            consumer_side.receive(now)
        for transport, written, landed in moved or ((t, *t.poll()) for t in self._transports):
            for write in written:
                if producer_side:
                    producer_side.written(transport, write)
            if consumer_side:
                consumer_side.landed(landed, now)
        if producer_side:
            producer_side.send(now)
            producer_side.tick(now)
        if consumer_side:
            consumer_side.tick(now)
        if self.pool_side:
            self.pool_side.tick()
        self._update_gauges()
        if self._checks:
            for part in self.parts_with_integrity:
                part.check_integrity()

    def close(self) -> None:
        """Free sockets, memory and descriptors. Transports close before the control port: when the port closes,
        consumers ask their transports whether this rank still writes into their slots."""
        before = (self.consumer_side, self.pool_side)
        for owner in (*before, *self._transports, self.producer_side, self._gatekeeper):
            if owner:
                owner.close()
        self.buffers.close()
        self._context.destroy(linger=100)

    def _begin_to_compile(self, codecs: Sequence[str]) -> None:
        """Start to compile the loops of these codecs for a cache in host memory. Nothing waits for them."""
        if self._cache.on_host and any(codec != RAW.name for codec in codecs):
            COMPILER.begin()

    def _execute(self, command: Command, fence: Any, now: float) -> None:
        producer_side, consumer_side = self.producer_side, self.consumer_side
        match command:
            case Expect() | Offer() | Computed() | Revoke() | Withdraw() if producer_side:
                producer_side.commands.execute(command, fence, now)
            case Hold() | Load() | Drop() if consumer_side:
                consumer_side.execute(command, fence, now)
            case Save() | Fill() if self.pool_side:
                self.pool_side.execute(command, fence)
            case Distrust() if consumer_side:
                consumer_side.distrust(command)
            case ChangeModel(facts):
                self._facts = facts
                if producer_side:
                    producer_side.change_model(facts, now)
                if consumer_side:
                    consumer_side.change_model(facts, now)
                if self.pool_side:
                    self.pool_side.change_model(facts)
            case ReadWeights(read_bytes, nbytes):
                self._telemetry.gauge(weights_read_bytes=read_bytes, weights_bytes=nbytes)
            case KnowWeights(weights, draft):
                facts = self._facts = knowing(self._facts, weights, draft)
                if producer_side:
                    producer_side.know_weights(facts)
                if consumer_side:
                    consumer_side.know_weights(facts)
                if self.pool_side:
                    self.pool_side.know_weights(facts)

    def _update_gauges(self) -> None:
        for side in (self.producer_side, self.consumer_side):
            if side:
                self._telemetry.gauge(**side.gauges())
