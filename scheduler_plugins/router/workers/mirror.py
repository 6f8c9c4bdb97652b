# SPDX-License-Identifier: Apache-2.0
"""The engines as a worker knows them: by the keeper's messages, and by failures of the worker's own
requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pd_connector.protocol.wire.params import ProducerAddress
from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.engines.description import described
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.engine_set import Pool, note_circuit
from scheduler_plugins.router.engines.failures import EngineFailedError, UnreachableError
from scheduler_plugins.router.engines.observed import Event, SentEvents
from scheduler_plugins.router.engines.others import NoOthers
from scheduler_plugins.router.index.prefixes import PrefixReader
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.counts import SharedCounts
from scheduler_plugins.router.policies.base import BlockHash
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.workers import messages
from scheduler_plugins.router.workers.link import Link
from scheduler_plugins.router.workers.messages import EngineState, FromKeeper
from scheduler_plugins.router.workers.state import apply
from scheduler_plugins.router.workers.tables import SharedPrefixes


class MirrorPool(Pool):
    """`Pool` of a worker. It watches no engine itself."""

    def __init__(self, link: Link[FromKeeper], counts: SharedCounts, metrics: Metrics) -> None:
        self._link = link
        self._counts = counts
        self._metrics = metrics
        self._known: dict[int, BackendEngine] = {}
        self._numbers: dict[BackendEngine, int] = {}
        self._cache: dict[BackendEngine, dict[str, Any]] = {}
        self._prefixes = SharedPrefixes()
        self._told = asyncio.Event()
        self.history = SentEvents(self._happened)
        self.waiting: Callable[[], Mapping[str, Front]] = dict
        """Returns what waits in this worker's front queue, by group."""

    @property
    def engines(self) -> list[BackendEngine]:
        return list(self._numbers)

    @property
    def prefixes(self) -> PrefixReader:
        return self._prefixes.reader

    async def start(self) -> None:
        """Return once the keeper has sent the engines."""
        await self._told.wait()

    async def close(self) -> None:
        pass  # nothing runs here

    def use(self, told: messages.Engines) -> None:
        """Apply the keeper's message about the engines."""
        self._prefixes.use(told)
        self.decisions = told.decisions
        for state in told.engines:
            engine = self._known.get(state.id) or self._new(state)
            apply(state, engine)
            self._cache[engine] = state.cache
        for number in self._known.keys() - {state.id for state in told.engines}:
            engine = self._known.pop(number)
            engine.load.others = NoOthers()  # the slot may belong to another engine by now
            # Its time to drain is over: give up its open requests, which go on elsewhere.
            engine.set_down(asyncio.get_running_loop().time(), "removed", refusing=False)
            engine.forget_metrics()
            del self._numbers[engine], self._cache[engine]
        self._told.set()

    def _happened(self, events: list[Event]) -> None:
        self._link.send(messages.Happened(events, dict(self.waiting())))

    def _new(self, state: EngineState) -> BackendEngine:
        engine = BackendEngine(state.url, state.role, self._metrics, role_given=state.role_given)
        engine.load.others = self._counts.engine(state.slot) or NoOthers()
        self._known[state.id], self._numbers[engine] = engine, state.id
        return engine

    def report_failure(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        number = self._numbers.get(engine)
        if number is None:
            return  # it has left
        refused = None
        if isinstance(failure, UnreachableError):
            # The keeper will tell all workers. This worker's next request must not wait for that.
            refused = failure.refused
            engine.set_down(asyncio.get_running_loop().time(), str(failure), refusing=refused)
        else:
            note_circuit(engine, failure, self._metrics)
        self._link.send(messages.Failed(number, failure.cause, str(failure), refused))

    def confirm(self, engine: BackendEngine, rank: int, seen: ProducerAddress) -> None:
        number = self._numbers.get(engine)
        if number is not None and engine.moved(rank, seen):
            engine.set_addresses((), "its address changed")
            self._link.send(messages.Moved(number, rank, seen))

    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash]) -> None:
        number = self._numbers.get(engine)
        if number is None or not isinstance(prompt, PromptKeys):
            return
        if prompt.tokens is not None and engine.follower is not None:
            return  # its events report the prompt
        if engine.name not in self._prefixes.asked:
            return  # no policy here looks up its cache
        text = b"" if prompt.tokens is not None else b"".join(prompt)
        self._link.send_soon(messages.Prefilled(number, text, prompt.tokens, prompt.extras))

    def learnt(self, engine: BackendEngine, load: StepLoad, duration_s: float) -> None:
        number = self._numbers.get(engine)
        if number is not None and not engine.costs_reported:
            self._link.send_soon(messages.Learnt(number, load, duration_s))

    def describe(self) -> list[dict[str, Any]]:
        return [{**described(engine), "cache": self._cache[engine]} for engine in self._numbers]
