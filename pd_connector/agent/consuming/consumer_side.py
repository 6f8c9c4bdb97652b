# SPDX-License-Identifier: Apache-2.0
"""The consuming half of an agent: it takes events to the consumer's state machine, and carries out its actions.

`session_keeper` keeps its sessions with producers, and `receive_pipeline` takes chunks in.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pd_connector.agent.commands import Distrust, Drop, Hold
from pd_connector.agent.consuming.auditor import Auditor
from pd_connector.agent.consuming.consumer_commands import ConsumerCommands
from pd_connector.agent.consuming.dialler import Dialler
from pd_connector.agent.consuming.name_queue import NameQueue
from pd_connector.agent.consuming.open_sessions import OpenSessions
from pd_connector.agent.consuming.outage import LoadEnds, OutageWatch
from pd_connector.agent.consuming.pair_counts import PairCounts
from pd_connector.agent.consuming.receive_pipeline import ChunkReceiver, ReceivePipeline
from pd_connector.agent.consuming.session_keeper import SessionKeeper
from pd_connector.agent.integrity import HasIntegrity
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.resources import RankResources
from pd_connector.control.resolver import Resolver
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.slab import SlotPool
from pd_connector.pool.codecs import pool_codecs
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import (
    Action,
    Dial,
    Finished,
    Held,
    IncomingChunk,
    Load,
    PlaceStates,
    Stalled,
    Tell,
)
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source
from pd_connector.remedies import FAILING_GAUGE
from pd_connector.transport.base import Landed

logger = logging.getLogger("pd_connector.agent.consuming.consumer_side")


class ConsumerSide:
    """Used by the agent's thread only.

    Args:
        shards: shards of all ranks of this engine, this one included.
        gate: passed before pages are written. The engine's thread shuts it for requests whose pages must not be written.
        report: takes the end of every load and watched hold.
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
        self._telemetry = resources.telemetry
        self._pool = SlotPool(config.slots)
        one_sided = any(transport.one_sided for transport in resources.transports)
        self._consumer = Consumer(
            config,
            cache.geometry,
            self._pool,
            one_sided,
            shards,
            needs_final_token=bool(resources.identity.needs),
            audits=resources.audits,
        )
        self._dialler = Dialler(resources)
        self._sessions = OpenSessions(config, self._dialler)
        self._pairs = PairCounts(self._telemetry)
        codecs = pool_codecs(config, consumes=True).readable
        self._receive_pipeline = ReceivePipeline(cache, gate, self._telemetry, self._pairs, codecs)
        self._receiver = ChunkReceiver(
            resources, self._consumer, self._receive_pipeline, self._sessions, self._act
        )
        for transport in resources.transports:
            transport.destinations = self._receiver.destination
        self._outage = OutageWatch()
        self._ends = LoadEnds(self._telemetry, self._outage, report)
        self._keeper = SessionKeeper(
            resources,
            self._dialler,
            self._sessions,
            self._consumer,
            self._receive_pipeline,
            self._outage,
            act=self._act,
            read=self._receiver.read_left,
        )
        self._auditor = Auditor(
            resources, self._sessions, self._keeper, self._consumer, self._outage, report
        )
        names = NameQueue(Resolver(resources.wake), config.permits, config.connect_timeout_s)
        self._commands = ConsumerCommands(
            names,
            self._consumer,
            self._receive_pipeline,
            gate,
            self._auditor,
            self._telemetry,
            self._act,
        )

    @property
    def pollables(self) -> list[object]:
        return self._sessions.pollables

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return self._consumer.transfers > 0

    @property
    def unhurried(self) -> bool:
        """Whether reading messages of producers can be delayed: no chunk is on its way, and the last messages were
        answers to heartbeats."""
        return self._keeper.only_pulses and not self._pool.held

    @property
    def urgent(self) -> bool:
        """Whether there is work that the poller does not signal."""
        return self._sessions.urgent

    @property
    def due(self) -> float:
        """When `tick` must be called at the latest, on its clock."""
        return self._keeper.due

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
            "distrusted_producers": self._auditor.distrusted,
        }

    def execute(self, command: Hold | Load | Drop, fence: Any, now: float) -> None:
        """See `ConsumerCommands.execute`."""
        self._commands.execute(command, fence, now)

    def change_model(self, facts: ModelFacts, now: float) -> None:
        """The engine serves other weights: KV on its way cannot be used, and every producer must pass an audit again."""
        self._auditor.change_model(facts)
        self._keeper.change_model(facts, now)

    def know_weights(self, facts: ModelFacts) -> None:
        """All bytes of this engine's weights were read."""
        self._auditor.know_weights(facts)
        self._keeper.know_weights(facts)

    def distrust(self, command: Distrust) -> None:
        """An audit on another rank has found that a producer's KV is wrong."""
        self._auditor.distrust(command)

    def receive(self, now: float) -> None:
        """Handle every message that waits, and every connection that broke."""
        self._keeper.receive(now)

    def tick(self, now: float) -> None:
        """End sessions and transfers whose deadlines have passed; send heartbeats that are due."""
        self._commands.tick(now)
        self._act(self._consumer.tick(now), now)
        self._keeper.tick(now, hurried=self._pool.held > 0)
        self._auditor.tick(now)

    def landed(self, landed: Sequence[Landed], now: float) -> None:
        """See `ChunkReceiver.landed`."""
        self._receiver.landed(landed, now)

    def close(self) -> None:
        self._commands.close()
        self._sessions.close()

    def _note_choice(self, source: Source, message: messages.Open) -> None:
        """Count a transfer by its codec. With `codec: auto`, count and log the choice."""
        codec = self._consumer.codec(source, coded=message.coded)
        self._telemetry.count("asked_transfers", codec=codec)
        if choice := self._consumer.codec_choice(source):
            self._telemetry.count("coded_transfers" if message.coded else "plain_transfers")
            if news := choice.news():
                logger.info("codec auto: from %s:%d %s", *source[:2], news)

    def _act(self, actions: Sequence[Action], now: float) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Dial(source, addresses):
                    self._keeper.dial(source, addresses, now)
                case Tell(source, message):
                    if session := self._sessions.get(source):
                        self._sessions.send(session, message)
                    if isinstance(message, messages.Open):
                        self._note_choice(source, message)
                case IncomingChunk() as chunk:
                    pending.extend(
                        self._consumer.landings.placed(chunk, *self._receiver.place(chunk), now)
                    )
                case PlaceStates(transfer, request):
                    placed = self._receiver.place_states(transfer, request)
                    pending.extend(
                        self._consumer.landings.states_placed(transfer, request, *placed, now)
                    )
                case Stalled(source):
                    self._keeper.stalled(source, now)
                case Held() as held:
                    self._ends.held(held, now)
                case Finished() as finished:
                    self._finished(finished, now)

    def _finished(self, finished: Finished, now: float) -> None:
        self._receive_pipeline.forget(finished.request)
        if finished.comparison is not None:
            self._auditor.ended(finished, now)
        else:
            self._pairs.ended(finished)
            self._ends.finished(finished, now)
