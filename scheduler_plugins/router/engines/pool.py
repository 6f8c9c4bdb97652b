# SPDX-License-Identifier: Apache-2.0
"""The engines behind the router, and the tasks that watch their health."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
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
from scheduler_plugins.router.engines.engine_set import assume_costs, note_circuit
from scheduler_plugins.router.engines.failures import EngineFailedError, UnreachableError
from scheduler_plugins.router.engines.inquiry import Inquiry
from scheduler_plugins.router.engines.named import NamedEngines
from scheduler_plugins.router.engines.observed import SharedHistory
from scheduler_plugins.router.engines.others import Count
from scheduler_plugins.router.engines.pair_audits import PairAudits
from scheduler_plugins.router.engines.role_state import MOST_DECISIONS, Decision, Version
from scheduler_plugins.router.engines.stores import StoreReaders
from scheduler_plugins.router.engines.watch import EngineWatch
from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.loop import is_behind, ran_s
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import BlockHash
from scheduler_plugins.router.settings.config import SIDES, RouterConfig
from scheduler_plugins.router.settings.elastic import Place


def described(engine: BackendEngine) -> dict[str, Any]:
    """The engine's state as `/health` shows it."""
    state: dict[str, Any] = {
        "url": engine.url,
        "role": engine.role,
        "state": "up" if engine.up else "down",
        "in_flight": engine.in_flight,
    }
    if engine.kind is not None:
        state["kind"] = engine.kind
    elif not engine.role_given:
        state["role"] = "unknown"
    state |= {name: said for name, said in engine.about._asdict().items() if said}
    if engine.hands_over:
        state["hands_over_kv"] = engine.address is not None
    state |= engine.role_state.describe(engine.role)
    if engine.handoffs:
        state["handoffs"] = engine.handoffs
    if engine.draining:
        state["draining"] = True
    if engine.circuit.cause:
        state["circuit"] = engine.circuit.cause
    if engine.reason:
        state["reason"] = engine.reason
    if engine.warning:
        state["warning"] = engine.warning
    return state


logger = logging.getLogger(__name__)

LEAVE_LOOK_S = 0.05
"""Pause between two checks whether a leaving engine has finished its requests."""


class EnginePool:
    """All engines. One task per engine polls its health, and probes it if it prefills."""

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        metrics: Metrics,
    ) -> None:
        """Start nothing yet."""
        self._config = config
        self._session = session
        self.metrics = metrics
        self.caches = EngineCaches()
        """What engines have cached."""
        self._watches: dict[BackendEngine, EngineWatch] = {}
        self._tasks: dict[BackendEngine, asyncio.Task[None]] = {}
        self._leaving: dict[BackendEngine, asyncio.Task[None]] = {}
        self._named = NamedEngines(lambda: self._config, session)
        self.name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        """Its name among workers and routers. The smallest leads, so it begins with the time: the oldest one goes on."""
        self.listed = Version()
        """How often an operator or the settings file has changed the list of engines. 0: it is as at the start."""
        self.drained = set[str]()
        """URLs of the engines that an operator drains."""
        self.stopping = set[str]()
        """URLs of engines whose `stop_command` runs here. They get no requests, even if a list names them."""
        self.with_started: Callable[[RouterConfig], RouterConfig] = lambda config: config
        """Returns settings that also list the engines that this router has started."""
        self.unsent_prompts: list[tuple[str, Hashes]] | None = None
        """Prompts that engines without events have computed, and that other routers do not know of yet: the engine's
        URL, and the hashes. None: nobody else needs them."""
        self.leads = True
        """Whether this process decides on roles, and no other worker or router."""
        self.history: SharedHistory = SharedHistory(metrics.pulse)
        """What happened to the requests of all workers and routers."""
        self.decisions: deque[Decision] = deque(maxlen=MOST_DECISIONS)
        """The last decisions on roles."""
        self._following: asyncio.Task[None] | None = None
        self._audits = PairAudits(
            lambda: self.engines if metrics.first_worker else [], lambda: self._config, session
        )
        self._auditing: asyncio.Task[None] | None = None
        self._stores = StoreReaders(
            self.caches.prefixes,
            lambda: self._watches,
            lambda engine, after, of: self._watches[engine].ask.store(after, of),
            lambda: self._config.health_interval_s,
        )

    @property
    def config(self) -> RouterConfig:
        """The current settings."""
        return self._config

    @property
    def engines(self) -> list[BackendEngine]:
        """All known engines, whatever their state."""
        return list(self._watches)

    @property
    def prefixes(self) -> Prefixes:
        """The index of what engines have cached."""
        return self.caches.prefixes

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

    async def start(self) -> None:
        """Start watching. Returns once every engine has been checked, and probed if it is up."""
        await self._named.start()
        self.use(self._config)
        self._following = asyncio.create_task(
            self._named.follow(lambda: self.use(self._config)), name="follow names of engines"
        )
        for watch in list(self._watches.values()):
            await watch.checked.wait()
        self._auditing = asyncio.create_task(self._audits.run(), name="audit pairs of engines")

    def use(self, config: RouterConfig) -> None:
        """Use these settings from now on: engines join and leave accordingly.

        A leaving engine gets no new requests, and has `drain_timeout_s` for its open ones. If its URL comes back before,
        the same engine stays: each URL has one engine. Joining engines are
        checked before others leave. While a new name cannot be looked up, no engine leaves. An engine gets another
        role only if its own entry has changed: other edits leave roles alone. Engines that are being stopped stay out.
        """
        self._config = self._without_stopping(config)
        if self._config is not config:  # other workers must leave them out, too
            self.listed = Version(self.listed.number + 1, self.name)
        config = self._config
        unknown = self._named.use()
        places = config.placed(self._named.members)
        leaving = list[BackendEngine]()
        for engine in self.engines:
            place = places.pop(engine.url, None)
            if place is not None:
                if self.leaves(engine):
                    self._leaving.pop(engine).cancel()
                    engine.draining = False
                self.replace(engine, place)
            elif not (unknown or self.leaves(engine)):
                leaving.append(engine)
                self.drained.discard(engine.url)
        joining = [self.add(url, place) for url, place in places.items()]
        for engine in leaving:
            self.remove(engine, joining)
        for engine in self.engines:
            if endpoints := config.kv_events.get(engine.url):
                self.caches.follow(engine, *endpoints, ranks=engine.ranks, first=engine.ranks[0])

    def _without_stopping(self, config: RouterConfig) -> RouterConfig:
        """The settings without engines that are being stopped; the same object if they list none."""
        if self.stopping.isdisjoint(url for side in SIDES for url in getattr(config, side)):
            return config
        # The file may list no other engine than those, while others have been started.
        for allowed in (config, self.with_started(config)):
            with suppress(ValueError):
                return allowed.without(self.stopping)
        return config  # no engine would be left: their answers are better than none

    def edit(self, config: RouterConfig) -> None:
        """As `use`, for a change that other workers of this router must learn: by an operator or the settings file."""
        self.listed = Version(self.listed.number + 1, self.name)
        self.use(config)

    def replace(self, engine: BackendEngine, place: Place) -> None:
        """Give the engine this place in the settings. If its home has changed, or its role is not allowed any more, it
        goes home, even if it was pinned. An SGLang engine arrives there only when it has been switched."""
        role_state, role = engine.role_state, engine.role
        before, role_state.place = role_state.place, place
        taken = before.may != place.may and self._config.moving is not None
        if before.home == place.home and (not taken or role_state.allows(role)):
            return
        home = role_state.home(role) if before.home == place.home else place.home
        if home is None:
            engine.role_given, role_state.switch_to = False, None
        elif role is not home and not engine.computes_prompts:  # an SGLang engine of one side
            role_state.pinned, role_state.switch_to = False, home
            self.look_again(engine)
        else:
            if role is not home:
                self.metrics.role_moves.labels(role, home, "settings").inc()
            self.set_role(engine, home, pinned=False)

    def add(self, url: str, place: Place) -> BackendEngine:
        """Start to watch an engine. It gets requests once it is up."""
        home = place.home
        engine = BackendEngine(url, home or Role.DECODE, self.metrics, role_given=home is not None)
        engine.role_state.place = place
        engine.role_state.since_s = asyncio.get_running_loop().time()
        if self._config.profile:
            engine.costs, engine.costs_reported = load(Path(self._config.profile)), True
        looked_at = partial(self._looked_at, engine)
        watch = EngineWatch(
            engine, lambda: self._config, self._session, self.caches, looked_at, self._prefills
        )
        self._watches[engine] = watch
        self._tasks[engine] = asyncio.create_task(watch.run(), name=f"watch {url}")
        return engine

    def _prefills(self) -> bool:
        """Whether an engine computes prompts for others."""
        return any(engine.serves(Role.PREFILL) for engine in self.engines)

    def remove(self, engine: BackendEngine, joining: Sequence[BackendEngine] = ()) -> None:
        """Let an engine leave: at once if it has no requests, else when its requests have ended.

        Args:
            joining: engines that replace it. The engine gets requests until they have been checked.
        """
        engine.draining = engine.draining or not joining
        watches = [self._watches[newcomer] for newcomer in joining]
        self._leaving[engine] = asyncio.create_task(
            self._leave(engine, watches), name=f"leaving {engine.url}"
        )

    def leaves(self, engine: BackendEngine) -> bool:
        """Whether the engine is leaving and has not left yet."""
        return engine in self._leaving

    async def _leave(self, engine: BackendEngine, joining: Sequence[EngineWatch]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_timeout_s):
                for watch in joining:
                    await watch.checked.wait()
        engine.draining = True
        end_s = ran_s() + self._config.drain_timeout_s
        load = engine.load
        while load.own_open or load.others.of_workers(Count.OPEN):
            if not is_behind() and ran_s() >= end_s:
                break
            await asyncio.sleep(LEAVE_LOOK_S)
        del self._leaving[engine]
        self._tasks.pop(engine).cancel()
        del self._watches[engine]
        self.caches.removed(engine)
        engine.set_down(asyncio.get_running_loop().time(), "removed", refusing=False)
        engine.forget_metrics()
        self._stores.update()
        logger.info("%s (%s) has left", engine.url, engine.role)

    def set_role(
        self, engine: BackendEngine, role: Role, *, pinned: bool, version: Version | None = None
    ) -> None:
        """Use an engine for another side from now on. Its open requests go on. A pinned engine keeps the role until it is
        released. `version`: of a role that another router gave; None: this router gives it now.
        """
        role_state = engine.role_state
        if version is None:
            version = Version(role_state.version.number + 1, self.name)
        role_state.version, role_state.pinned = version, pinned
        role_state.switch_to, role_state.problem = None, ""
        if engine.role is not role or not engine.role_given:
            engine.role_given = True
            engine.change_role(role, asyncio.get_running_loop().time())
            self._watches[engine].side_changed()
            assume_costs(engine, self._watches)

    def inquiry(self, engine: BackendEngine) -> Inquiry:
        """Asks the engine."""
        return self._watches[engine].ask

    def look_again(self, engine: BackendEngine) -> None:
        """Ask the engine for its side, which may have changed."""
        if engine in self._watches:
            self._watches[engine].identify_again()

    def release(self, engine: BackendEngine) -> None:
        """The controller may move the engine again."""
        self.set_role(engine, engine.role, pinned=False)

    def move(self, engine: BackendEngine, role: Role | None) -> None:
        """Note that the engine moves to this role; None: it is steady."""
        engine.role_state.moving = role

    def drain(self, engine: BackendEngine, drains: bool) -> None:
        """Set whether the engine drains, by an operator: it finishes its requests and gets no new ones."""
        (self.drained.add if drains else self.drained.discard)(engine.url)
        self.listed = Version(self.listed.number + 1, self.name)
        engine.draining = drains

    async def close(self) -> None:
        """Stop all tasks."""
        tasks = [*self._tasks.values(), *self._leaving.values()]
        tasks += [task for task in (self._following, self._auditing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._named.close()
        await self._stores.close()
        await self.caches.close()

    def learnt(self, engine: BackendEngine, load: StepLoad, duration_s: float) -> None:
        """Learn from one step of the engine that took `duration_s` seconds: a prompt computed alone, or one token of
        a stream."""
        if engine.learn(load, duration_s):
            for other in self._watches:
                assume_costs(other, self._watches)

    def _looked_at(self, engine: BackendEngine) -> None:
        """An engine's state may have changed."""
        assume_costs(engine, self._watches)
        if engine in self._watches:
            self._stores.update()

    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash]) -> None:
        """The engine has the KV of this prompt."""
        hashes = self.caches.prefilled(engine, prompt, asyncio.get_running_loop().time())
        if self.unsent_prompts is not None and len(hashes):
            self.unsent_prompts.append((engine.url, hashes))

    def prefilled_elsewhere(self, engine: BackendEngine, hashes: Hashes) -> None:
        """Another router has sent the engine this prompt. `hashes`: as in `unsent_prompts`."""
        now_s = asyncio.get_running_loop().time()
        self.caches.prefixes.prefilled_blocks(engine.name, hashes, now_s)

    def describe(self) -> list[dict[str, Any]]:
        """The state of every engine, for `/health`."""
        return [
            {**described(engine), "cache": self.caches.describe(engine)} for engine in self.engines
        ]

    def report_failure(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A request to the engine failed. An unreachable engine goes down at once; any other engine is checked
        now."""
        if engine not in self._watches:
            return  # it has left
        if isinstance(failure, UnreachableError):
            self._watches[engine].set_down(str(failure), refusing=failure.refused)
        else:
            note_circuit(engine, failure, self.metrics)
        self._watches[engine].wake.set()

    def confirm(self, engine: BackendEngine, rank: int, seen: ProducerAddress) -> None:
        """Compare the address in a prefill engine's answer with the known address. If they differ, probe the engine
        again."""
        if engine in self._watches and engine.moved(rank, seen):
            logger.warning("%s changed its address: probing it again", engine.url)
            engine.set_addresses((), "its address changed")
            watch = self._watches[engine]
            watch.probe_at = 0.0
            watch.wake.set()
