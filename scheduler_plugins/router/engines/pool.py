# SPDX-License-Identifier: Apache-2.0
"""The engines behind the router, and the tasks that watch their health."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from pd_connector.protocol.wire.params import ProducerAddress
from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.cost.profile import load
from scheduler_plugins.router.engines.caches import EngineCaches
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.engine_set import Pool, assume_costs, note_circuit
from scheduler_plugins.router.engines.exchange import (
    EngineFailedError,
    UnreachableError,
)
from scheduler_plugins.router.engines.pair_audits import PairAudits
from scheduler_plugins.router.engines.stores import StoreReaders
from scheduler_plugins.router.engines.watch import EngineWatch
from scheduler_plugins.router.index.prefixes import PrefixReader
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import BlockHash
from scheduler_plugins.router.settings.config import SIDES, RouterConfig
from scheduler_plugins.router.settings.members import MembersError, is_name, members

logger = logging.getLogger(__name__)

MEMBERS_S = 5.0
"""Pause between two lookups of the engines behind a name. Name servers keep their answers for about as long."""
LEAVE_LOOK_S = 0.05
"""Pause between two checks whether a leaving engine has finished its requests."""


class EnginePool(Pool):
    """All engines. One task per engine polls its health, and probes it if it prefills."""

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        caches: EngineCaches | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Start nothing yet.

        Args:
            caches: filled with what engines have cached; None: a new object.
            on_change: called when an engine or its state has changed.
        """
        self._config = config
        self._session = session
        self._metrics = metrics
        self.caches = caches or EngineCaches()
        """What engines have cached."""
        self._on_change = on_change
        self._watches: dict[BackendEngine, EngineWatch] = {}
        self._tasks: dict[BackendEngine, asyncio.Task[None]] = {}
        self._leaving: dict[BackendEngine, asyncio.Task[None]] = {}
        self._named: dict[str, tuple[str, ...]] = {}
        self._name_problems: dict[str, str] = {}  # by name; the problem as it was logged
        self._new_name = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._audits = PairAudits(lambda: self.engines, lambda: self._config, session)
        self._auditing: asyncio.Task[None] | None = None
        self._stores = StoreReaders(
            self.caches.prefixes,
            lambda: self._watches,
            lambda engine, after: self._watches[engine].ask.store(after),
            lambda: self._config.health_interval_s,
        )

    @property
    def config(self) -> RouterConfig:
        """The current settings."""
        return self._config

    @property
    def engines(self) -> list[BackendEngine]:
        return list(self._watches)

    @property
    def prefixes(self) -> PrefixReader:
        return self.caches.prefixes

    async def start(self) -> None:
        """Start watching. Returns once every engine has been checked, and probed if it is up."""
        await self._ask_names()
        self._named = dict.fromkeys(_names(self._config), ()) | self._named
        self.use(self._config)
        self._following = asyncio.create_task(self._follow_names(), name="follow names of engines")
        for watch in list(self._watches.values()):
            await watch.checked.wait()
        self._auditing = asyncio.create_task(self._audits.run(), name="audit pairs of engines")

    def use(self, config: RouterConfig) -> None:
        """Use these settings from now on: engines join, leave and change sides accordingly.

        A leaving engine gets no new requests, and has `drain_timeout_s` for its open ones. Joining engines are
        checked before others leave. While a new name cannot be looked up, no engine leaves.
        """
        self._config = config
        names = _names(config)
        self._named = {name: self._named[name] for name in names if name in self._named}
        if unknown := len(self._named) < len(names):
            self._new_name.set()
        roles = config.roles(self._members)
        for engine in self.engines:
            role = roles.get(engine.url)
            if role and engine.role_given and Role.BOTH in (role, engine.role):
                self.set_role(engine, role)  # one side stays, so its requests go on
        wanted = dict.fromkeys(roles.items())
        leaving = list[BackendEngine]()
        for engine in self.engines:
            key = (engine.url, engine.role if engine.role_given else None)
            if key in wanted:
                del wanted[key]
                if self.leaves(engine):
                    self._leaving.pop(engine).cancel()
                    engine.draining = False
            elif not (unknown or self.leaves(engine)):
                leaving.append(engine)
        joining = [self.add(url, role) for url, role in wanted]
        for engine in leaving:
            self.remove(engine, joining)
        for engine in self.engines:
            if found := config.kv_events.get(engine.url):
                self.caches.follow(engine, *found, ranks=engine.ranks, first=engine.ranks[0])
        self._on_change()

    def _members(self, urls: Sequence[str]) -> Iterator[str]:
        """The URLs, with each name replaced by the URLs of its engines."""
        for url in urls:
            yield from self._named.get(url, ()) if is_name(url) else (url,)

    async def _follow_names(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MEMBERS_S):
                    await self._new_name.wait()
            self._new_name.clear()
            if await self._ask_names():
                self.use(self._config)

    async def _ask_names(self) -> bool:
        """Look up the engines of all names. Returns whether they changed. If a lookup fails, the engines stay as they
        were."""
        before = dict(self._named)
        for url in _names(self._config):
            try:
                self._named[url] = await members(url, self._session)
            except MembersError as error:
                problem = str(error)
            else:
                problem = ""
            self._note_name(url, problem)
        return self._named != before

    def _note_name(self, url: str, problem: str) -> None:
        """Log once that a name cannot be looked up, and once that it can again."""
        before = self._name_problems.pop(url, "")
        if problem:
            self._name_problems[url] = problem
            if problem != before:
                logger.warning("%s; the engines known before stay", problem)
        elif before:
            logger.info("%s: its engines can be looked up again", url)

    def add(self, url: str, role: Role | None) -> BackendEngine:
        """Start to watch an engine. It gets requests once it is up.

        Args:
            role: its side; None: the engine is asked.
        """
        known = role is not None
        engine = BackendEngine(url, role or Role.DECODE, self._metrics, role_given=known)
        if self._config.profile:
            engine.costs, engine.told_costs = load(Path(self._config.profile)), True
        looked_at = partial(self._looked_at, engine)
        watch = EngineWatch(engine, lambda: self._config, self._session, self.caches, looked_at)
        self._watches[engine] = watch
        self._tasks[engine] = asyncio.create_task(watch.run(), name=f"watch {url}")
        return engine

    def remove(self, engine: BackendEngine, joining: Sequence[BackendEngine] = ()) -> None:
        """Let an engine leave: at once if it has no requests, else when its requests have ended.

        Args:
            joining: engines that replace it. The engine gets requests until they have been checked.
        """
        engine.draining = engine.draining or not joining
        watches = [self._watches[one] for one in joining]
        self._leaving[engine] = asyncio.create_task(
            self._leave(engine, watches), name=f"leaving {engine.url}"
        )

    def leaves(self, engine: BackendEngine) -> bool:
        """Whether the engine is leaving and has not left yet."""
        return engine in self._leaving

    async def _leave(self, engine: BackendEngine, joining: Sequence[EngineWatch]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_timeout_s):
                for watch in joining:
                    await watch.checked.wait()
        engine.draining = True
        self._on_change()
        end = loop.time() + self._config.drain_timeout_s
        while engine.in_flight and loop.time() < end:  # noqa: ASYNC110 - a count, not an event
            await asyncio.sleep(LEAVE_LOOK_S)
        del self._leaving[engine]
        self._tasks.pop(engine).cancel()
        del self._watches[engine]
        if not any(other.url == engine.url for other in self._watches):
            self.caches.removed(engine)
        engine.set_down(loop.time(), "removed", refusing=False)
        engine.forget_metrics()
        self._stores.update()
        self._on_change()
        logger.info("%s (%s) has left", engine.url, engine.role)

    def set_role(self, engine: BackendEngine, role: Role) -> None:
        """Use an engine for another side from now on. Its open requests go on."""
        if engine.role is role:
            return
        engine.forget_metrics()
        handed_over = engine.hands_over
        engine.role, engine.role_given = role, True
        if handed_over and engine.hands_over:
            engine.set_addresses(engine.addresses, engine.reason)
        else:
            engine.set_addresses((), "its side has changed" if engine.hands_over else "")
        watch = self._watches[engine]
        watch.probe_at = 0.0
        watch.wake.set()
        self._on_change()

    def drain(self, engine: BackendEngine, wanted: bool) -> None:
        """Set whether the engine drains: it finishes its requests and gets no new ones."""
        engine.draining = wanted
        self._on_change()

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._leaving.values()]
        tasks += [task for task in (self._following, self._auditing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stores.close()
        await self.caches.close()

    def learnt(self, engine: BackendEngine, load: StepLoad, duration_s: float) -> None:
        # Every request teaches a little; others hear of it only when the costs have changed.
        if engine.learn(load, duration_s):
            for other in self._watches:
                assume_costs(other, self._watches)
            self._on_change()

    def _looked_at(self, engine: BackendEngine) -> None:
        """An engine's state may have changed."""
        assume_costs(engine, self._watches)
        if engine in self._watches:
            self._stores.update()
        self._on_change()

    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash]) -> None:
        self.caches.prefilled(engine, prompt, asyncio.get_running_loop().time())

    def describe(self) -> list[dict[str, Any]]:
        return [
            {**engine.describe(), "cache": self.caches.describe(engine)} for engine in self.engines
        ]

    def report_failure(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        if engine not in self._watches:
            return  # it has left
        if not isinstance(failure, UnreachableError):
            note_circuit(engine, failure, self._metrics)
        self.check(engine, failure)

    def check(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A request to the engine failed, in this process or in another. Check the engine now."""
        if engine not in self._watches:
            return
        if isinstance(failure, UnreachableError):
            self._watches[engine].set_down(str(failure), refusing=failure.refused)
        self._watches[engine].wake.set()

    def confirm(self, engine: BackendEngine, rank: int, seen: ProducerAddress) -> None:
        if engine in self._watches and engine.moved(rank, seen):
            logger.warning("%s changed its address: probing it again", engine.url)
            engine.set_addresses((), "its address changed")
            watch = self._watches[engine]
            watch.probe_at = 0.0
            watch.wake.set()


def _names(config: RouterConfig) -> set[str]:
    """The names of the settings that stand for several engines."""
    return {url for side in SIDES for url in getattr(config, side) if is_name(url)}
