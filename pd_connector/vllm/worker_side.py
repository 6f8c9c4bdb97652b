# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker: describes the cache to an agent, and relays commands and outcomes."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import vllm

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.agent.agent import Agent
from pd_connector.agent.commands import Command, Computed, Withdraw
from pd_connector.agent.idle_backoff import IdleBackoff
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.host import open_pool
from pd_connector.pool.jobs import Fill, Save, Saved
from pd_connector.protocol.consuming.incoming import Finished, Held, Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.final_token import FIRST_TOKEN
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.cache import describe_cache
from pd_connector.vllm.identity.model import (
    draft_model,
    identify_caches,
    loaded_files,
    loaded_weights,
    model_facts,
)
from pd_connector.vllm.identity.model_watch import ModelWatch
from pd_connector.vllm.messages import (
    AuditReport,
    Prefill,
    RankAddress,
    StepCommands,
    WorkerActivity,
)
from pd_connector.vllm.metrics import PDStats
from pd_connector.vllm.pool.fills import PoolFills
from pd_connector.vllm.runner import hooks_tell_layers, in_lockstep, revokes_late
from pd_connector.vllm.shards import engine_shards, gather_copies, gather_ranks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("pd_connector.vllm")


class WorkerSide:
    """Called only by vLLM's model runner. The agent exists from `register` until `close`."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: Config
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._agent: Agent | None = None
        self._address: RankAddress | None = None
        self._model: ModelWatch | None = None
        self._told_changes = 0
        self._rank = int(vllm_config.parallel_config.rank)
        self._gauges: dict[str, float] = {}  # as they were before the last outcomes were taken
        self._reported_gauges: dict[str, float] = {}  # as last reported to the scheduler
        self._prefills: list[Prefill] = []
        self._idle = False
        self._backoff = IdleBackoff(alone=vllm_config.parallel_config.world_size == 1)
        self._lockstep = in_lockstep(vllm_config)
        # Layer number by the name that `save_kv_layer` passes.
        self._layers: dict[str, int] = {}
        self._ready: set[str] = set()
        self._unavailable: set[str] = set()
        self._causes: dict[str, Cause] = {}
        self._compared: set[str] = set()  # requests with a load that only compares
        self.fills = PoolFills(kv_cache_config)  # loads from the pool
        self._audits: list[AuditReport] = []
        self._unaudited: set[str] = set()
        self._over: list[str] = []  # requests whose pages were kept for a comparison
        self._saved: Counter[str] = Counter()
        self._advertised_model: dict[int, bytes | None] = {}  # as in `WorkerActivity.models`
        self._told_facts: ModelFacts | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's cache tensors (by layer name) and start the agent.

        Raises:
            UnsupportedGeometryError: the cache has a layout that cannot be moved.
        """
        self.close()
        caches = identify_caches(self._vllm_config, list(kv_caches))
        numbers = {name: cache.number for name, cache in caches.items()}
        cache = describe_cache(kv_caches, self._kv_cache_config, self._vllm_config, numbers)
        self._layers = numbers if hooks_tell_layers(self._vllm_config, caches) else {}
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        shard = cache.geometry.shard
        loaded, files = loaded_weights(self._vllm_config), loaded_files(self._vllm_config)
        draft = draft_model(self._vllm_config, self._config, caches)
        facts = model_facts(self._vllm_config, self._config, caches, shard, loaded, files, draft)
        self._agent = Agent(
            self._config,
            transfer.engine_id,
            facts,
            cache,
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            shards=engine_shards(self._vllm_config, shard),
            tells=(FIRST_TOKEN,) if transfer.is_kv_producer else (),
            late_revokes=revokes_late(self._vllm_config, self._kv_cache_config),
            audits=self._config.audit != "off",
            experts=self._vllm_config.model_config.is_moe,
            store=pool[0] if (pool := open_pool(self._config.pool)) else None,
            engine=f"vllm {vllm.__version__}",
        )
        submit = self._agent.submit
        read = draft if isinstance(draft, DraftFiles) else None
        self._model = ModelWatch(self._vllm_config, facts, loaded, files, submit, read)
        self._told_changes, self._told_facts = 0, facts
        self._address = RankAddress(
            self._agent.host, self._agent.port, shard, self._agent.data_port, facts
        )
        if shard.pcp_size > 1:
            self._address.copies = tuple(gather_copies(self._address))
        if transfer.is_kv_producer and self._vllm_config.parallel_config.world_size > 1:
            source = Source(self._agent.host, self._agent.port, transfer.engine_id)
            self._agent.introduce(gather_ranks(Peer(source, shard)))
        logger.info(
            "PDConnector ready: engine %s, %s, control port %s:%d, data port %d, transports %s, %s",
            transfer.engine_id,
            transfer.kv_role,
            self._config.host,
            self._agent.port,
            self._agent.data_port,
            self._agent.transports,
            cache.geometry,
        )

    def address(self) -> RankAddress:
        assert self._address is not None
        return self._address

    def begin(self, step: StepCommands) -> None:
        """A step begins. Pass its commands to the agent before anything is computed. After the return the agent reads
        no page that the step may reuse."""
        assert self._agent is not None or not step.commands
        changes = 0
        if self._model is not None:
            self._model.step(suspected=step.compare_weights, idle=step.idle)
            changes = self._model.changes
        if self._agent is not None:
            self._agent.engine_steps()
        present = step.weight_changes.get(self._rank, 0) == changes
        commands = step.commands if present else self._of_before(step.commands)
        for command in (*self._of_before(step.of_before), *commands):
            if isinstance(command, Load | Fill) and command.compares:
                self._compared.add(command.request)
            elif isinstance(command, Fill):
                self.fills.begin(command)
            self._agent.submit(command)  # type: ignore[union-attr]
        self._over += step.over
        self._prefills = step.prefills if present else []
        self._idle = step.idle
        if step.commands or not step.idle:
            self._backoff.reset()

    def take_back(self, step: StepCommands) -> None:
        """A step is about to be prepared. After the return the agent reads no page that the step may overwrite."""
        if self._agent is not None:
            self._agent.take_back(step.commands)

    def layer_computed(self, name: str) -> None:
        """The step has computed this layer's KV for all of its requests."""
        number = self._layers.get(name)
        if self._prefills and number is not None and self._config.overlap in ("layer", "auto"):
            self._computed(number + 1)

    def end(self) -> None:
        """The step has computed everything."""
        if self._prefills:
            self._computed(None)
            self._prefills = []

    def outcomes(self) -> tuple[set[str], set[str], set[str]]:
        """Three sets of requests: those whose pages can be freed, whose load has ended, and whose load has failed."""
        if self._idle and self._agent and not self._lockstep:
            self._backoff.pause(self._agent.wait_for_outcome)
        # Read before the outcomes: a gauge at rest here was at rest when those outcomes were counted.
        self._gauges = self._agent.telemetry.gauges() if self._agent else {}
        sent, self._over = set(self._over), []
        received: set[str] = set()
        failed: set[str] = set()
        for outcome in self._agent.outcomes() if self._agent else ():
            match outcome:
                case Saved():
                    self._saved[outcome.request] += 1
                case Finished() if outcome.request in self._compared:
                    self._compared.discard(outcome.request)
                    self._audits.append(AuditReport.of(outcome))
                case Finished():
                    if outcome.cause in (Cause.UNAUDITED, Cause.AUDIT):
                        self._unaudited.add(outcome.request)
                    received.add(outcome.request)
                    kept = self.fills.ended(outcome)
                    if outcome.cause is not None:
                        self._causes[outcome.request] = outcome.cause
                        if not kept:
                            failed.add(outcome.request)
                case Held():
                    if outcome.cause is None:
                        self._ready.add(outcome.request)
                    else:
                        self._unavailable.add(outcome.request)
                        self._causes[outcome.request] = outcome.cause
                case _:
                    sent.add(outcome.request)
        return sent, received, failed

    def stats(self) -> PDStats | None:
        """Counts since the last step, if there are any."""
        return PDStats.of(self._agent.telemetry) if self._agent else None

    def activity(self) -> WorkerActivity:
        """Everything that has ended or changed since the last call."""
        changed, self._reported_gauges = self._gauges != self._reported_gauges, self._gauges
        activity = WorkerActivity(
            frozenset(self._ready),
            frozenset(self._unavailable),
            tuple(self._audits),
            frozenset(self._unaudited),
            {self._rank: self._gauges} if changed else {},
            self._weights_changed(),
            dict(self._causes),
            self.fills.take_cuts(),
            Counter(self._saved),
            self._model_changed(),
            self._agent.pool_draft if self._agent else "",
            self._facts_changed(),
        )
        self._saved.clear()
        for reported in (
            self._ready,
            self._unavailable,
            self._audits,
            self._unaudited,
            self._causes,
        ):
            reported.clear()
        return activity

    @property
    def outgoing_transfers(self) -> int:
        """Transfers that consumers have not yet fetched from this rank."""
        gauges = self._agent.telemetry.gauges() if self._agent else {}
        return int(gauges.get("outgoing_transfers", 0))

    def sleep(self) -> None:
        """vLLM is about to give up the memory of the pages. After the return the agent does not touch them.

        Raises:
            PDConnectorError: the agent does not answer.
        """
        if self._agent is not None:
            self._agent.rest()
            self._prefills = []
        if self._model is not None:
            self._model.pages_lost()

    def wake(self) -> None:
        """The pages have memory again. Nothing that they held before is used."""
        if self._agent is not None:
            self._agent.wake()

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def change_version(self, version: str) -> None:
        """The operator has changed the weights while the engine served, and this is their version now."""
        if self._model is not None:
            self._model.change_version(version)

    def _of_before(self, commands: Iterable[Command]) -> Iterator[Command]:
        """Filter commands of a scheduler that does not know of the latest change of weights. Their pages may hold KV of
        earlier weights, so they are neither offered, saved nor compared."""
        for command in commands:
            match command:
                case Offer(transfer, request):
                    if command.final:
                        self._over.append(request)
                    yield Withdraw(transfer, request)
                case Load(request=request) | Fill(request=request) if command.compares:
                    detail = "the weights have changed"
                    self._audits.append(AuditReport(request, Cause.ABORTED, (), detail))
                case Save(request):
                    self._saved[request] += 1
                case _:
                    yield command

    def _weights_changed(self) -> dict[int, int]:
        """How often this rank's weights have changed, if that is not reported to the scheduler yet; otherwise empty."""
        if self._model is None or self._model.changes == self._told_changes:
            return {}
        self._told_changes = self._model.changes
        return {self._rank: self._told_changes}

    def _model_changed(self) -> dict[int, bytes | None]:
        """The loaded model's part of the pool's keys, if it has changed since the last report."""
        # Asked first: if nothing is read any more, what was read is known.
        reads = self._model is not None and self._model.reads
        loaded = self._agent.pool_model if self._agent else b""
        model = {self._rank: loaded or (None if reads else b"")}
        if model == self._advertised_model:
            return {}
        self._advertised_model = model
        return model

    def _facts_changed(self) -> ModelFacts | None:
        """The facts that peers get of the model, if this is the first rank and they have changed since its last report."""
        facts = self._agent.facts if self._agent and not self._rank else self._told_facts
        changed, self._told_facts = facts != self._told_facts, facts
        return facts if changed else None

    def _computed(self, stop_layer: int | None) -> None:
        assert self._agent is not None
        for transfer, request, tokens in self._prefills:
            self._agent.submit(Computed(transfer, request, tokens, stop_layer))
