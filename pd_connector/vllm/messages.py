# SPDX-License-Identifier: Apache-2.0
"""Messages between the connector's scheduler side and worker side, sent through vLLM."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_connector.agent.commands import Command
from pd_connector.errors import Cause, Miss
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.consuming.incoming import Finished


class Prefill(NamedTuple):
    """A request whose KV is offered while a step computes more of it."""

    transfer: str
    request: str
    tokens: int  # computed when the step has ended


class AuditReport(NamedTuple):
    """The end of a rank's comparison for an audited request; without a cause if nothing was wrong."""

    request: str
    cause: Cause | None
    engines: tuple[str, ...]  # the producers of the KV
    detail: str

    @classmethod
    def of(cls, outcome: Finished) -> "AuditReport":
        """The report of a load that compared."""
        counterparts = outcome.comparison.counterparts if outcome.comparison else ()
        engines = tuple(sorted({engine.engine_id for engine in counterparts}))
        return cls(outcome.request, outcome.cause, engines, outcome.detail)


class Cut(NamedTuple):
    """A load from the pool has broken off."""

    stop_token: int  # tokens before this one are in place
    cause: Cause
    miss: Miss | None  # what is wrong with the chunk at that token


def earliest(some: Mapping[str, Cut], others: Mapping[str, Cut]) -> dict[str, Cut]:
    """For each load the earlier cut: all ranks have the KV up to there."""
    cuts = dict(some)
    for request, cut in others.items():
        if request not in cuts or cut.stop_token < cuts[request].stop_token:
            cuts[request] = cut
    return cuts


@dataclass
class StepCommands(KVConnectorMetadata):
    """Scheduler to worker, each step: commands for the agent, in order, and the prefills that stream."""

    commands: list[Command] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    idle: bool = False  # the step computes nothing
    compare_weights: bool = False  # they may have changed since the step before
    # Ended requests: their pages were kept for a comparison, and may be freed.
    over: list[str] = field(default_factory=list)
    # How often each rank's weights have changed, as far as the scheduler knows.
    weight_changes: Mapping[int, int] = field(default_factory=dict)
    # Commands from before the scheduler knew of the last of these changes. They come first.
    of_before: list[Command] = field(default_factory=list)


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: the address at which consumers reach this rank (port 0: none), the rank's shard, the
    port for data (0: none), and its model. With prefill context parallelism it also has the addresses of the ranks that
    differ only in their rank of it, because vLLM can pass on the address of only one of them."""

    host: str
    port: int
    shard: Shard
    data_port: int = 0
    model: ModelFacts | None = None
    copies: tuple["RankAddress", ...] = ()


@dataclass
class WorkerActivity(KVConnectorWorkerMetadata):
    """Worker to scheduler, each step.

    `ready`: watched requests whose KV can be loaded now. `unavailable`: watched requests whose KV will not come.
    `unaudited`: requests whose KV was refused because its producer has not passed an audit. Also: audits that
    have ended, the gauges of ranks with a changed gauge, how often ranks' weights have changed (if they have), why KV
    of requests has not come, where broken-off loads from the pool stopped, and the pool's keys of the ranks' models and
    draft models if they have changed (empty: not known; None: its weights are being read). `facts`: the first rank's
    model as peers get it, if that has changed.
    """

    ready: frozenset[str] = frozenset()
    unavailable: frozenset[str] = frozenset()
    audits: tuple[AuditReport, ...] = ()
    unaudited: frozenset[str] = frozenset()
    gauges: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    weight_changes: Mapping[int, int] = field(default_factory=dict)
    causes: Mapping[str, Cause] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[int, bytes | None] = field(default_factory=dict)
    draft: str = ""
    facts: ModelFacts | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerActivity":
        assert isinstance(other, WorkerActivity)
        return WorkerActivity(
            self.ready | other.ready,
            self.unavailable | other.unavailable,
            self.audits + other.audits,
            self.unaudited | other.unaudited,
            {**self.gauges, **other.gauges},
            {**self.weight_changes, **other.weight_changes},
            {**self.causes, **other.causes},
            earliest(self.cuts, other.cuts),
            Counter(self.saved) + Counter(other.saved),
            {**self.models, **other.models},
            self.draft or other.draft,
            self.facts or other.facts,
        )
