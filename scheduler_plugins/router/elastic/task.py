# SPDX-License-Identifier: Apache-2.0
"""The task that asks the role policy every second which engines change their role, and carries out the changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path

from pd_connector.extensions import Faults
from scheduler_plugins.router.elastic.days import DaysFile
from scheduler_plugins.router.elastic.fleet import Groups
from scheduler_plugins.router.elastic.return_home import ReturnHome
from scheduler_plugins.router.elastic.scaling import Scaling
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.moving import SETTINGS, MoveFailedError, Mover
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.limit import SLOW_S, Limited
from scheduler_plugins.router.policies.base import ASSUMED_TPOT_S, ASSUMED_TTFT_S, Role
from scheduler_plugins.router.roles.base import Fleet, Front, Member, Move, RolePolicy, Scale
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.days import DaysError
from scheduler_plugins.router.roles.registry import create
from scheduler_plugins.router.routing.fallback import cause_of, raised_by, slow_text, text_of
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.elastic import Bounds, Moving

logger = logging.getLogger(__name__)

FIRST_S = 120.0
"""A group waits this long after the router's start for engines that have never been up. Otherwise, if one side starts
more slowly, engines of the other side would take its place."""
EVERY_S = 1.0
"""Pause between two questions to the policy."""
_REPAIR = "what it wants is left out. Repair the policy, or name another one (--roles)"


def _assumed(config: RouterConfig, members: Iterable[Member]) -> str:
    """Facts that the policy must assume or lacks, because neither settings nor engines provide them; empty: none."""
    lacking = []
    if all(qos_class.slo.ttft_s == inf for qos_class in config.classes):
        lacking.append(f"{ASSUMED_TTFT_S:g} s to the first token")
    if all(qos_class.slo.tpot_s == inf for qos_class in config.classes):
        lacking.append(f"{ASSUMED_TPOT_S:g} s for each further token")
    text = ""
    if lacking:
        text = f"; no class has a promise (slo), so {' and '.join(lacking)} are assumed"
    if not any(member.view.costs.knows_decode for member in members):
        text += (
            "; no engine's costs of decode steps are known (--profile), so only queues and room count until streams "
            "have taught them"
        )
    return text


class Bounded(RolePolicy):
    """A role policy with a time limit for its calls. While it is paused after a slow call, it moves nothing."""

    def __init__(self, policy: RolePolicy) -> None:
        self._policy = policy
        self._limited = Limited()

    def decide(self, fleet: Fleet, now_s: float) -> list[Move | Scale]:
        if self._limited.is_paused(now_s):
            return []
        return self._limited.call(lambda: list(self._policy.decide(fleet, now_s)), now_s)


def _what(moving: Moving, policy: RolePolicy, config: RouterConfig) -> str:
    """What a policy does with a group's engines, in words."""
    if not policy.scales:
        return "only says which engines it would move" if moving.dry_run else "moves its engines"
    if moving.dry_run:
        return "only says how many engines it would have"
    if config.start_command:
        return "starts and stops its engines (start_command, stop_command)"
    return "shows how many engines it should have (metric pd_router:engines_wanted)"


def _by(name: str, move: Move) -> Move:
    """The move, with the name of what decided it in its cause."""
    return move._replace(cause=f"{name}: {move.cause}")


class Elastic:
    """One controller for each group. Only the leading router uses them."""

    def __init__(
        self, pool: EnginePool, mover: Mover, front: Callable[[], Mapping[str, Front]]
    ) -> None:
        """`front`: returns what waits in the router, by group."""
        self._pool = pool
        self._mover = mover
        self._front = front
        self._groups = Groups()
        self._return_home = ReturnHome(pool)
        self._begun_s = asyncio.get_running_loop().time()
        self._controllers: dict[str, tuple[Moving, Bounds, RoleController]] = {}
        self._moves = set[asyncio.Task[None]]()
        self._faults: dict[str, Faults] = {}  # by group
        self._scaling = Scaling(pool)
        self._days: tuple[str, DaysFile] | None = None
        self._refused = set[str]()  # files of earlier days that cannot be used

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Decide inside the block."""
        task = asyncio.create_task(self.run(), name="elastic roles")
        try:
            yield
        finally:
            moves = list(self._moves)
            for each in (task, *moves):
                each.cancel()
            await asyncio.gather(task, *moves, return_exceptions=True)
            await self._scaling.close()
            if self._pool.leads:
                self._leave_days()

    async def run(self) -> None:
        """Decide until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.tick(asyncio.get_running_loop().time())
            except Exception:
                # A policy of another package must not end the task.
                logger.exception("the role policy failed")

    def tick(self, now_s: float) -> None:
        """Begin the side switches of SGLang engines that the settings require. Call the policy once, and begin its
        moves."""
        for move in self._return_home.moves(now_s):
            self._begin(self._return_home, _by("settings", move), "settings")
        moving = self._pool.config.moving
        if moving is None or not self._pool.leads:
            self._leave_days()  # another process goes on with the file, and it must not be written over later
            self._forget(self._controllers.keys())
            return
        every = create(moving.policy).scales
        groups, front = self._groups.of(self._pool.engines, every=every), self._front()
        self._forget(self._controllers.keys() - groups.keys())
        days = self._days_file()
        if days is not None:
            days.note(self._pool.history, groups, now_s)
        for group, members in groups.items():
            if now_s - self._begun_s < FIRST_S and self._awaits(group):
                continue
            controller = self._controller(group, moving, members)
            for engine in self._pool.engines:
                (controller.pin if engine.role_state.pinned else controller.release)(engine.name)
            waiting = {group: front[group]} if group in front else {}
            begun_s = time.perf_counter()
            fleet = Fleet(members, self._pool.history, waiting)
            start_s = self._pool.config.engine_start_s
            usual_per_s = {} if days is None else days.usual_per_s(group, start_s)
            fleet = fleet._replace(start_s=start_s, usual_per_s=usual_per_s)
            moves = controller.moves(fleet, now_s)
            took_s = time.perf_counter() - begun_s
            self._note_fault(group, moving.policy, controller.fault, took_s, now_s)
            for move in (_by(moving.policy, proposal) for proposal in moves):
                if moving.dry_run:
                    self._only_say(controller, move)
                else:
                    self._begin(controller, move, moving.policy)
            not_started = partial(self._not_started, controller, group)
            self._scaling.carry_out(
                controller.scales, moving.policy, dry_run=moving.dry_run, failed=not_started
            )

    def _days_file(self) -> DaysFile | None:
        """The file of earlier days, if the settings name one."""
        path = self._pool.config.days
        if self._days is not None and self._days[0] != path:
            self._leave_days()
        if path and self._days is None:
            try:
                self._days = path, DaysFile(Path(path))
            except DaysError as error:
                self._days = None
                if path not in self._refused:
                    self._refused.add(path)
                    logger.warning("%s", error)
        return None if self._days is None else self._days[1]

    def _leave_days(self) -> None:
        if self._days is not None:
            self._days[1].save()
            self._days = None

    def _not_started(self, controller: RoleController, group: str, role: Role) -> None:
        controller.not_started(group, role, asyncio.get_running_loop().time())

    def _forget(self, groups: Iterable[str]) -> None:
        for group in list(groups):
            del self._controllers[group]
            self._scaling.forget(group)

    def _note_fault(
        self, group: str, policy: str, fault: BaseException | None, took_s: float, now_s: float
    ) -> None:
        """Log and count what is wrong with a policy."""
        title = f"group {group}: role policy {policy}"
        faults = self._faults.setdefault(group, Faults(logger, _REPAIR))
        if fault is not None:
            cause = cause_of(fault)
            self._pool.metrics.policy_faults.labels(policy, cause).inc()
            faults.note(cause, f"{title} failed: {text_of(fault)}", now_s, raised_by(fault))
        if took_s > SLOW_S and (fault is None or cause_of(fault) != "late"):
            faults.note("slow", f"{title} {slow_text(took_s)}", now_s)

    def _awaits(self, group: str) -> bool:
        """Whether an engine of the group has never been up. Engines that this router has started do not count (the
        numbers have them), nor do engines that are leaving."""
        return any(
            engine.role_state.place.group == group
            and not engine.starts
            and not engine.draining
            and not self._pool.leaves(engine)
            and not self._scaling.has_started(engine.url)
            for engine in self._pool.engines
        )

    def _controller(self, group: str, moving: Moving, members: Iterable[Member]) -> RoleController:
        config = self._pool.config
        bounds = config.bounds(group)
        present = self._controllers.get(group)
        if present is not None and present[:2] == (moving, bounds):
            return present[2]
        if present is not None and present[0] != moving:
            self._scaling.forget(group)  # the new policy may want no numbers
        policy = create(moving.policy)
        # A dry run starts nothing, so nothing is late.
        limit_s = inf if moving.dry_run else config.start_timeout_s
        made = RoleController(
            Bounded(policy),
            min_prefill=bounds.min_prefill,
            min_decode=bounds.min_decode,
            limits=bounds.limits(group, limit_s) if policy.scales else None,
        )
        self._controllers[group] = moving, bounds, made
        logger.info(
            "group %s: %s %s%s",
            group,
            moving.policy,
            _what(moving, policy, config),
            _assumed(self._pool.config, members),
        )
        return made

    def _only_say(self, controller: RoleController, move: Move) -> None:
        engine = self._engine(move)
        logger.info(
            "dry run: %s would move from %s to %s: %s",
            *(engine.url, engine.role, move.role, move.cause),
        )
        self._pool.metrics.role_moves.labels(engine.role, move.role, "dry_run").inc()
        self._note(engine, move, "dry run")
        controller.done(move.engine, asyncio.get_running_loop().time())

    def _begin(self, decider: RoleController | ReturnHome, move: Move, cause: str) -> None:
        engine = self._engine(move)
        carrying = asyncio.create_task(
            self._carry_out(decider, engine, move, cause), name=f"move {engine.url}"
        )
        self._moves.add(carrying)
        carrying.add_done_callback(self._moves.discard)

    async def _carry_out(
        self, decider: RoleController | ReturnHome, engine: BackendEngine, move: Move, cause: str
    ) -> None:
        clock, outcome = asyncio.get_running_loop().time, self._note(engine, move, "moving")
        pinned = engine.role_state.pinned
        try:
            await self._mover.move(engine, move.role, pinned=pinned, cause=cause, why=move.cause)
        except MoveFailedError as failure:
            decider.failed(move.engine, clock(), str(failure))
            outcome("given up" if failure.step == SETTINGS else str(failure))
        except BaseException as error:
            decider.failed(move.engine, clock(), repr(error))
            raise
        else:
            decider.done(move.engine, clock())
            outcome("done")

    def _engine(self, move: Move) -> BackendEngine:
        return next(engine for engine in self._pool.engines if engine.name == move.engine)

    def _note(self, engine: BackendEngine, move: Move, outcome: str) -> Callable[[str], None]:
        """Show the decision on the live page. Returns a function that sets its outcome."""
        decisions = self._pool.decisions
        now_s = asyncio.get_running_loop().time()
        noted = Decision(now_s, engine.url, engine.role, move.role, move.cause, outcome)
        decisions.append(noted)

        def set_outcome(text: str) -> None:
            if noted in decisions:
                decisions[decisions.index(noted)] = noted._replace(outcome=text)

        return set_outcome
