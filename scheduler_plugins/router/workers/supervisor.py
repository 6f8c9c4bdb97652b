# SPDX-License-Identifier: Apache-2.0
"""The process that watches the engines and keeps the index for all workers. It serves no client."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from itertools import count

from scheduler_plugins.router.client.admin_auth import AdminAuth
from scheduler_plugins.router.engines.caches import EngineCaches
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import EngineFailedError, UnreachableError
from scheduler_plugins.router.engines.observed import note
from scheduler_plugins.router.engines.others import Count
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.counts import SharedCounts, words_for
from scheduler_plugins.router.peer_routers.memory import SharedWords
from scheduler_plugins.router.peer_routers.slots import EngineSlots
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.workers import messages
from scheduler_plugins.router.workers.child import Child
from scheduler_plugins.router.workers.link import encode
from scheduler_plugins.router.workers.merging import added, counters_only, families_of, merged
from scheduler_plugins.router.workers.messages import FromWorker
from scheduler_plugins.router.workers.state import state_of
from scheduler_plugins.router.workers.tables import TableMemory

logger = logging.getLogger(__name__)

TOGETHER_S = 0.02
"""Changes within this time are sent to the workers together."""
EVERY_S = 1.0
"""Interval at which workers learn the sizes of caches, and old guesses are forgotten."""
SAMPLES_LIMIT_S = 2.0
"""Longest wait for a worker's metrics. After that, its last report is used."""
_DIGEST_BYTES = 16


class Supervisor:
    """All engines, the index and the workers of one router."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._memory = SharedWords(words_for(config.workers))
        self.counts = SharedCounts(self._memory.map, None)
        self.slots = EngineSlots(self.counts)
        self.changed = asyncio.Event()
        """Set when the workers must hear of a change."""
        self._held, self._recent = TableMemory(self.changed.set), TableMemory(self.changed.set)
        self.caches = EngineCaches(Prefixes(self._held, self._recent))
        self.pool: EnginePool
        """Set before anything else is called."""
        self.children = [
            Child(row, self._begin, self._heard, self._ended)
            for row in range(1, 1 + config.workers)
        ]
        self._ids: dict[BackendEngine, int] = {}
        self._numbers = count(1)
        self._wanted: dict[int, set[Child]] = {}
        self._told: dict[int, asyncio.Event] = {}
        self._gone: tuple[messages.Family, ...] = ()
        self._told_last = b""
        self._refreshing = False
        self._asking = set[asyncio.Task[None]]()
        self.port = config.port
        self.operator = AdminAuth(config.admin_key)

    def use(self, config: RouterConfig) -> None:
        """The settings have changed."""
        self._config = config
        self.pool.use(config)
        for child in self.children:
            child.send(messages.Configured(self._for_worker()))

    async def tell(self) -> None:
        """Send the engines and the last minutes to the workers whenever something has changed, until cancelled."""
        loop = asyncio.get_running_loop()
        beats = messages.Beats(())
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self.changed.wait()
            self.changed.clear()
            self.caches.prefixes.refresh(loop.time())
            content = encode(self._engines())
            if content != self._told_last:
                self._told_last = content
                for child in self.children:
                    child.send_encoded(content)
            if (now := messages.Beats(self.pool.metrics.pulse.beats(loop.time()))) != beats:
                beats = now
                for child in self.children:
                    child.send(beats)
            await asyncio.sleep(TOGETHER_S)

    def close(self) -> None:
        for memory in (self._memory, self._held, self._recent):
            memory.close()

    def _engines(self) -> messages.Engines:
        self._number_engines()
        held, recent = self.caches.prefixes.tables
        return messages.Engines(
            tuple(
                state_of(number, self.slots.place(engine), engine, self.caches.describe(engine))
                for engine, number in self._ids.items()
            ),
            self._held.state(held),
            self._recent.state(recent),
            self.caches.prefixes.by_events,
            tuple(self.pool.decisions),
        )

    def _number_engines(self) -> None:
        known = self.pool.engines
        self.slots.follow(known)
        for engine in self._ids.keys() - set(known):
            del self._ids[engine]
        for engine in known:
            if engine not in self._ids:
                self._ids[engine] = next(self._numbers)

    def sent(self, engine: BackendEngine) -> list[float]:
        """The sums of all workers' counts for an engine, in the order of `Count`."""
        slot = self.slots.of(engine)
        rows = [child.row for child in self.children]
        return [0.0] * len(Count) if slot is None else self.counts.totals(slot, rows)

    def waiting(self) -> dict[str, Front]:
        """What waits in the workers' front queues, by group."""
        found = dict[str, Front]()
        for child in self.children:
            for group, one in child.front.items():
                other = found.get(group, Front())
                found[group] = Front(
                    one.requests + other.requests,
                    one.tokens + other.tokens,
                    max(one.oldest_s, other.oldest_s),
                )
        return found

    def _for_worker(self) -> RouterConfig:
        """The settings of one worker. The router's limits are divided among the workers."""
        config = self._config
        each = config.workers
        return replace(
            config,
            port=self.port,
            admin_port=None,
            admin_key=self.operator.token,
            exchange="",
            fellows=(),
            connections=-(-config.connections // each),
            bodies_mib=max(config.body_mib, config.bodies_mib // each),
        )

    def _begin(self, child: Child) -> tuple[messages.Begin, messages.Engines, messages.Beats]:
        level = logging.getLogger().level
        begin = messages.Begin(self._for_worker(), child.row, self._memory.ref, level)
        beats = self.pool.metrics.pulse.beats(asyncio.get_running_loop().time())
        return begin, self._engines(), messages.Beats(beats)

    def _ended(self, child: Child) -> None:
        self.counts.clear_row(child.row)
        child.front = {}
        self._gone = added(self._gone, counters_only(child.families))
        child.families = ()
        for number, waited_for in self._wanted.items():
            waited_for.discard(child)
            if not waited_for:
                self._told[number].set()
        self._metrics.worker_restarts.inc()

    def _heard(self, child: Child, message: FromWorker) -> None:
        if isinstance(message, messages.Listening):
            logger.info("worker %d serves (process %d)", child.row, message.pid)
        elif isinstance(message, messages.Samples):
            self._sampled(child, message)
        elif isinstance(message, messages.Happened):
            child.front = message.front
            note(self.pool.history, message.events, asyncio.get_running_loop().time())
        elif isinstance(message, messages.MetricsWanted):
            task = asyncio.create_task(self._answer(child, message.number))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        else:
            self._of_engine(message)

    def _of_engine(
        self, message: messages.Failed | messages.Moved | messages.Prefilled | messages.Learnt
    ) -> None:
        engine = next((e for e, number in self._ids.items() if number == message.engine), None)
        if engine is None:
            return  # it has left
        if isinstance(message, messages.Failed | messages.Moved):
            # The worker has already changed its own view of the engine. Send the state again, even if it is unchanged
            # here.
            self._told_last = b""
        if isinstance(message, messages.Failed):
            self.pool.check(engine, _failure(message))
        elif isinstance(message, messages.Moved):
            self.pool.confirm(engine, message.rank, message.seen)
        elif isinstance(message, messages.Learnt):
            self.pool.learnt(engine, message.load, message.duration_s)
        else:
            text = message.text
            digests = [text[n : n + _DIGEST_BYTES] for n in range(0, len(text), _DIGEST_BYTES)]
            prompt = PromptKeys(digests, message.tokens, message.extras)
            self.pool.prefilled(engine, prompt)
            if not self._refreshing:
                # Prompts that come together are added to the index together.
                self._refreshing = True
                asyncio.get_running_loop().call_soon(self._refresh)

    def _refresh(self) -> None:
        self._refreshing = False
        self.caches.prefixes.refresh(asyncio.get_running_loop().time())

    async def _answer(self, child: Child, number: int) -> None:
        """Send a worker the metrics of all processes."""
        own = next(self._numbers)
        waited_for = self._wanted[own] = {one for one in self.children if one.listening.is_set()}
        told = self._told[own] = asyncio.Event()
        for one in list(waited_for):
            one.send(messages.SamplesWanted(own))
        with suppress(TimeoutError):
            async with asyncio.timeout(SAMPLES_LIMIT_S):
                await told.wait()
        del self._wanted[own], self._told[own]
        self._metrics.workers.set(sum(one.listening.is_set() for one in self.children))
        parts = [self._gone, *(one.families for one in self.children)]
        text = merged([*parts, families_of(self._metrics.registry)])
        child.send(messages.Metrics(number, text))

    def _sampled(self, child: Child, message: messages.Samples) -> None:
        child.families = message.families
        waited_for = self._wanted.get(message.number)
        if waited_for is not None:
            waited_for.discard(child)
            if not waited_for:
                self._told[message.number].set()


def _failure(message: messages.Failed) -> EngineFailedError:
    if message.refused is None:
        return EngineFailedError(message.cause, message.message)
    return UnreachableError(message.message, refused=message.refused)
