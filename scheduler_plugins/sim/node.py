# SPDX-License-Identifier: Apache-2.0
"""An engine of a simulated cluster, as policies see it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import create
from scheduler_plugins.qos.classes import ONLY, QosClass
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.router.engines.counted_load import EngineLoad, Loaded
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.engine import SimulatedEngine
from scheduler_plugins.sim.links import NOWHERE, Place


@dataclass(frozen=True)
class _Known:
    """A cost model that is known from the start."""

    model: CostModel


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of a cluster's engines."""

    truth: CostModel
    """Durations of steps. `chunk_tokens` 0: whole prompts (level 1)."""
    cache_blocks: int = 8000
    block_tokens: int = 512
    kv_tokens: float = inf
    """Room for the KV of sequences that decode."""
    order: str = "srjf_calibrated"
    """Policy of the engine's queue."""
    classes: tuple[QosClass, ...] = ONLY
    lag_s: float = 0.0
    """Delay until the router knows of cached blocks."""
    pull_prefix: bool = False
    """Whether an engine fetches cached prefixes from others."""
    place: Place = NOWHERE


class Node(Loaded):
    """An engine, its cache, and the router's knowledge of it."""

    def __init__(self, name: str, role: Role, settings: NodeSettings) -> None:
        self.name = name
        self.role = role
        self.place = settings.place
        self.up = True
        self.draining = False
        self.costs = settings.truth
        self.block_tokens = settings.block_tokens
        self.pull_prefix = settings.pull_prefix
        self.cache = LruBlocks(settings.cache_blocks, lag_s=settings.lag_s)
        queue = WaitingQueue(
            create(settings.order),
            self.cache.hashes,
            page_size=settings.block_tokens,
            costs=_Known(settings.truth),
            classes=settings.classes,
        )
        self.engine = SimulatedEngine(
            queue,
            self.cache,
            settings.truth,
            page_size=settings.block_tokens,
            decode_apart=False,
            kv_tokens=settings.kv_tokens,
        )
        self.load = load = EngineLoad()
        self.queued_s = load.queued_s
        self.accepts = load.accepts
        self.due: tuple[float, int] | None = None
        """Time of its next event, as the heap knows it."""
        self.ticket = 0
        """Number of its valid event. Events with other numbers are outdated."""

    @property
    def free_kv(self) -> float:
        return self.engine.free_kv

    @property
    def prefilling_s(self) -> float:
        """Time that it spent in steps with prompts."""
        return self.engine.busy_s

    @property
    def decoding_s(self) -> float:
        """Time that it spent in steps that only decode."""
        return self.engine.decode.busy_s

    @property
    def busy_s(self) -> float:
        """Time that it spent computing."""
        return self.prefilling_s + self.decoding_s
