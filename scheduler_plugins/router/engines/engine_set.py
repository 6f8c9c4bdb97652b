# SPDX-License-Identifier: Apache-2.0
"""The interface to all engines that requests use."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pd_connector.protocol.wire.params import ProducerAddress
from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.observed import Observer
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import BlockHash

logger = logging.getLogger(__name__)


class Pool(ABC):
    """The interface to all engines that requests use."""

    @property
    @abstractmethod
    def engines(self) -> list[BackendEngine]:
        """All known engines, whatever their state."""

    history: Observer
    """Learns what happens to requests."""
    decisions: Collection[Decision]
    """The last decisions on roles."""

    @property
    @abstractmethod
    def prefixes(self) -> Prefixes:
        """The index of what engines have cached."""

    @abstractmethod
    async def start(self) -> None:
        """Start, and return once every engine has been checked."""

    @abstractmethod
    async def close(self) -> None:
        """Stop all tasks."""

    @abstractmethod
    def report_failure(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A request to the engine failed. An unreachable engine goes down at once; any other engine is checked
        now."""

    @abstractmethod
    def confirm(self, engine: BackendEngine, rank: int, seen: ProducerAddress) -> None:
        """Compare the address in a prefill engine's answer with the known address. If they differ, probe the engine
        again."""

    @abstractmethod
    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash]) -> None:
        """The engine has the KV of this prompt."""

    @abstractmethod
    def learnt(self, engine: BackendEngine, load: StepLoad, duration_s: float) -> None:
        """Learn from one step of the engine that took `duration_s` seconds: a prompt computed alone, or one token of
        a stream."""

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """The state of every engine, for `/health`."""

    def up(self, role: Role, besides: Collection[BackendEngine] = ()) -> list[BackendEngine]:
        """Engines of one side that may get a request, without the engines in `besides`.

        An engine that failed several requests in a row is left out for a while, unless there is no other.
        """
        able = [
            e
            for e in self.engines
            if e.serves(role)
            and e.up
            and not (e.draining or e.role_state.moving)
            and e not in besides
        ]
        now = asyncio.get_running_loop().time()
        return [e for e in able if e.circuit.lets_pass(now)] or able

    def all_up(self) -> list[BackendEngine]:
        """Engines of both sides that may get a request."""
        return [engine for engine in self.engines if engine.up]


def note_circuit(engine: BackendEngine, failure: EngineFailedError, metrics: Metrics) -> None:
    """Note that an engine which answers failed a request. After several failures in a row it gets a pause."""
    if failure.cause == "unhealthy":
        return  # it is down already, and its next process has failed nothing
    if engine.circuit.failed(failure.cause, asyncio.get_running_loop().time()):
        metrics.circuit_opened.labels(engine.url, failure.cause).inc()
        engine.paused_for.add(failure.cause)
        logger.warning("%s gets a pause: it failed again and again: %s", engine.url, failure)


def assume_costs(engine: BackendEngine, engines: Iterable[BackendEngine]) -> None:
    """If a prefill engine's costs are unknown, assume the costs of its peers among `engines`."""
    if not engine.hands_over or engine.knows_prefill:
        return
    peers = [
        peer.costs
        for peer in engines
        if peer.knows_prefill
        and peer.hands_over
        and peer.serves(Role.CPU_PREFILL) is engine.serves(Role.CPU_PREFILL)
        and peer.models == engine.models
    ]
    if peers:
        engine.assume(peers)


def handoffs_of(pool: Pool) -> dict[str, int]:
    """Outcomes of requests to pairs, summed over the reports of all decode engines since their starts."""
    outcomes = Counter[str]()
    for engine in pool.engines:
        outcomes.update(engine.handoffs)
    return dict(outcomes)
