# SPDX-License-Identifier: Apache-2.0
"""Carries out a policy's numbers of engines: by a metric for Kubernetes' autoscaler, and by the user's commands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_plugins.router.elastic.command import CommandError, output_of
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Scale
from scheduler_plugins.router.settings.config import SIDES, RouterConfig
from scheduler_plugins.router.settings.elastic import DEFAULT_GROUP, Place
from scheduler_plugins.router.settings.members import is_name
from scheduler_plugins.router.settings.scaling import START, STOP, filled
from scheduler_plugins.router.settings.urls import base_url

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Pause between two checks whether an engine serves, or is idle."""
STOP_TRIES = 3
"""Runs of `stop_command` for one engine."""
TRY_AGAIN_S = 10.0

_Side = tuple[str, Role]


class _StartFailedError(Exception):
    """An engine did not start. `step` is a metric label; the message is for people."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


@dataclass(eq=False)
class _Start:
    """An engine that is being started."""

    side: _Side
    stop_command: str
    """For its engine, if it is not needed any more. The settings may lose it meanwhile."""
    task: asyncio.Task[None] | None = None
    url: str = ""
    """As the command has printed it, or of the engine that a name shows."""
    earlier: set[str] = field(default_factory=set)
    """URLs of engines that were there before, or that other starts have."""
    by_name: bool = False
    """Whether its command has ended, and a name shall show its engine."""


@dataclass(eq=False)
class _Stop:
    """An engine that is drained, and then stopped."""

    side: _Side
    url: str
    engine: BackendEngine | None
    """None: it never came into the list of engines."""
    command: str
    """`stop_command` when the stop began: the settings may lose it meanwhile."""
    task: asyncio.Task[None] | None = None
    drains: bool = True
    """False: its command runs, so it cannot be taken back."""


class Scaling:
    """Keeps as many engines running as a role policy has decided. Changed on the event loop only.

    Without commands it only shows the numbers. A start that fails is reported to `failed`. Engines that it has started
    stay in the list of engines when the settings file is read again.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._shown: dict[_Side, int] = {}
        self._starts: list[_Start] = []
        self._stops: dict[str, _Stop] = {}
        self._started: dict[str, _Side] = {}
        self._closed = False
        pool.with_started = self._with_started

    def carry_out(
        self,
        scales: Sequence[Scale],
        policy: str,
        *,
        dry_run: bool,
        failed: Callable[[Role], None],
    ) -> None:
        """Have these numbers of engines from now on.

        Args:
            scales: scales of one group.
            dry_run: whether to only show the numbers.
            failed: called if an engine of this side could not be started.
        """
        commands = bool(self._pool.config.start_command) and not dry_run
        if commands:
            self._keep_started()
            self._drain_again()
        for scale in scales:
            side, before = (scale.group, scale.role), self._shown.get((scale.group, scale.role))
            self._shown[side] = scale.engines
            if not dry_run:
                self._pool.metrics.engines_wanted.labels(*side).set(scale.engines)
            if before != scale.engines and scale.cause:
                self._say(scale, before, policy, dry_run)
            if commands:
                self._reach(scale, failed)

    def forget(self, group: str) -> None:
        """This router no longer decides about the group. Its starts are cancelled: the next router that decides starts its own."""
        for start in self._starts:
            if start.side[0] == group and start.task is not None:
                start.task.cancel()
        for side in [side for side in self._shown if side[0] == group]:
            del self._shown[side]
            with suppress(KeyError):
                self._pool.metrics.engines_wanted.remove(*side)

    def has_started(self, url: str) -> bool:
        """Whether a command of this router has started the engine, and none has begun to stop it. An engine that a name
        shows counts while its start is under way."""
        return url in self._started or any(start.url == url for start in self._starts)

    async def close(self) -> None:
        """Cancel starts and stops that are under way. A draining engine goes on draining."""
        self._closed = True
        underway: list[_Start | _Stop] = [*self._starts, *self._stops.values()]
        tasks = [each.task for each in underway if each.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _say(self, scale: Scale, before: int | None, policy: str, dry_run: bool) -> None:
        what = "would have" if dry_run else "shall have"
        was = "" if before is None else f" after {before}"
        logger.info(
            "group %s %s %d %s engines%s: %s: %s",
            *(scale.group, what, scale.engines, scale.role, was, policy, scale.cause),
        )
        self._pool.decisions.append(
            Decision(
                asyncio.get_running_loop().time(),
                f"group {scale.group}",
                f"{'?' if before is None else before} {scale.role}",
                f"{scale.engines} {scale.role}",
                f"{policy}: {scale.cause}",
                "dry run" if dry_run else "done",
            )
        )

    def _reach(self, scale: Scale, failed: Callable[[Role], None]) -> None:
        """Start or stop engines of a side until it has the number of engines that it shall have."""
        side, now_s = (scale.group, scale.role), asyncio.get_running_loop().time()
        # A task that has ended may be listed until its callback has run.
        starts = [
            start
            for start in self._starts
            if start.side == side and not (start.task is not None and start.task.done())
        ]
        for start in starts:
            self._look_behind_names(start)
        begun = {start.url for start in starts}
        # The guards see the same engines: those of role `both` on either side, and no engine that works alone.
        members = [
            engine
            for engine in self._pool.engines
            if engine.role_state.place.group == scale.group
            and engine.role in (scale.role, Role.BOTH)
            and not engine.whole
            and not self._pool.leaves(engine)
            and engine.url not in self._stops
            and engine.url not in begun
        ]
        serving = [engine for engine in members if engine.up and not engine.draining]
        # An engine that went down may come back by itself: a new process of it, or a new pod.
        limit_s = self._pool.config.start_timeout_s
        back = [
            engine
            for engine in members
            if not engine.up and now_s - (engine.down_since or now_s) < limit_s
        ]
        missing = scale.engines - len(serving) - len(back) - len(starts)
        for stop in [stop for stop in self._stops.values() if stop.side == side and stop.drains]:
            if missing > 0 and stop.task is not None:
                stop.task.cancel()
                missing -= 1
        for _ in range(missing):
            self._start(side, failed)
        for start in reversed(starts):
            if missing < 0 and start.task is not None:
                start.task.cancel()
                missing += 1
        free = [
            engine
            for engine in serving
            if engine.role is scale.role and not engine.role_state.pinned
        ]
        free.sort(key=lambda engine: (engine.open_requests, engine.context))
        # An engine that may come back replaces none that serves.
        surplus = len(serving) - scale.engines
        for engine in free[: max(0, min(surplus, len(serving) - 1))]:
            self._stop(side, engine.url, engine, self._pool.config.stop_command)

    def _start(self, side: _Side, failed: Callable[[Role], None]) -> None:
        earlier = {each.url for each in self._pool.engines if not self._pool.leaves(each)}
        start = _Start(side, self._pool.config.stop_command, earlier=earlier)
        self._starts.append(start)
        start.task = asyncio.create_task(self._starting(start, failed), name=f"start {side[1]}")

        def ended(
            task: asyncio.Task[None],
        ) -> None:  # also of a task that was cancelled before its first step
            self._starts.remove(start)
            if task.cancelled():
                self._take_back(start)

        start.task.add_done_callback(ended)

    async def _starting(self, start: _Start, failed: Callable[[Role], None]) -> None:
        (group, role), counts = start.side, self._pool.metrics.engine_starts
        try:
            await self._bring_up(start)
        except _StartFailedError as error:
            logger.warning("no %s engine of group %s was started: %s", role, group, error)
            counts.labels(group, role, f"failed_{error.step}").inc()
            failed(role)
            self._take_back(start)
        else:
            counts.labels(group, role, "started").inc()

    async def _bring_up(self, start: _Start) -> None:
        """Run the command, and wait until its engine serves. Raises _StartFailedError."""
        (group, role), config = start.side, self._pool.config
        arguments, variables = filled(config.start_command, {"group": group, "role": role})
        begun_s = asyncio.get_running_loop().time()
        try:
            text = await output_of(START, arguments, variables, config.start_timeout_s)
        except (CommandError, OSError) as error:  # OSError: /tmp is full
            raise _StartFailedError("command", str(error)) from None
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if not lines and any(is_name(url) for url in getattr(config, role)):
            start.by_name = True
        else:
            try:
                start.url = base_url("url", lines[-1] if lines else "")
            except ValueError as error:
                raise _StartFailedError(
                    "address",
                    f"{START} must print the engine's URL as its last line, such as http://10.0.0.7:8000: {error}",
                ) from None
            self._started[start.url] = start.side
            self._keep_started()
        left_s = config.start_timeout_s - (asyncio.get_running_loop().time() - begun_s)
        end_s = asyncio.get_running_loop().time() + left_s
        while True:
            self._look_behind_names(start)
            engine = next((each for each in self._pool.engines if each.url == start.url), None)
            if engine is not None and engine.up:
                break
            if asyncio.get_running_loop().time() >= end_s:
                raise _StartFailedError(
                    "serving",
                    f"{start.url or 'no engine that a name has shown since'} does not serve {config.start_timeout_s:g} s after "
                    f"{START} began (start_timeout_s): {'?' if engine is None else engine.reason}",
                )
            await asyncio.sleep(LOOK_S)
        if engine.whole:  # it would never count, and others would be started in its place
            raise _StartFailedError(
                "serving",
                f"{start.url} is an SGLang engine that works alone; start it with --disaggregation-mode",
            )

    def _look_behind_names(self, start: _Start) -> None:
        """Match starts with engines that a name in the settings shows: a new engine there belongs to the start from now
        on."""
        if not start.by_name or start.url:
            return
        group, role = start.side
        for engine in self._pool.engines:
            if (
                engine.url not in start.earlier
                and engine.url not in self._started
                and engine.role_state.place.group == group
                and engine.role in (role, Role.BOTH)
                and not self._pool.leaves(engine)
            ):
                start.url = engine.url
                for other in self._starts:
                    other.earlier.add(engine.url)
                return

    def _take_back(self, start: _Start) -> None:
        """Stop the engine of a start that has failed or is not needed any more."""
        if self._closed or not start.url or start.url in self._stops:
            return
        engine = next((each for each in self._pool.engines if each.url == start.url), None)
        self._stop(start.side, start.url, engine, start.stop_command)

    def _keep_started(self) -> None:
        """Put engines that were started here into the list of engines, if the settings file has taken them out."""
        config = self._pool.config
        if (kept := self._with_started(config)) is not config:
            self._pool.edit(kept)

    def _with_started(self, config: RouterConfig) -> RouterConfig:
        """The settings with all engines that were started here; the same object if there is nothing to add."""
        listed = {url for side in SIDES for url in getattr(config, side)}
        lacking = {url: side for url, side in self._started.items() if url not in listed}
        if not lacking:
            return config
        settings: dict[str, Any] = {"places": dict(config.places)}
        for url, (group, role) in lacking.items():
            settings[role] = (*settings.get(role, getattr(config, role)), url)
            if group != DEFAULT_GROUP or config.places:
                settings["places"][url] = Place(None, frozenset(), group)
        try:
            return replace(config, **settings)
        except ValueError as error:
            logger.warning("engines that were started cannot be used: %s", error)
            return config

    def _drain_again(self) -> None:
        """Let an engine drain that the settings file has removed but that is still in the list: it gets no requests
        while it is stopped."""
        for engine in self._pool.engines:
            stop = self._stops.get(engine.url)
            if stop is not None and stop.drains and not engine.draining:
                stop.engine = engine  # a new one, if it had left already
                self._pool.drain(engine, True)

    def _stop(self, side: _Side, url: str, engine: BackendEngine | None, command: str) -> None:
        stop = self._stops[url] = _Stop(side, url, engine, command, drains=engine is not None)
        if engine is not None:
            self._pool.drain(engine, True)
        stop.task = asyncio.create_task(self._stopping(stop), name=f"stop {url}")

        def ended(task: asyncio.Task[None]) -> None:
            del self._stops[url]
            self._pool.stopping.discard(url)
            if task.cancelled() and stop.drains and stop.engine and not self._closed:
                self._pool.drain(stop.engine, False)  # it is needed again

        stop.task.add_done_callback(ended)

    async def _stopping(self, stop: _Stop) -> None:
        pool, (group, role), url = self._pool, stop.side, stop.url
        await self._idle(stop)
        stop.drains = False
        pool.stopping.add(url)
        self._started.pop(url, None)
        self._remove(url)
        values = {"group": group, "role": role, "url": url}
        arguments, variables = filled(pool.config.stop_command or stop.command, values)
        for again in range(STOP_TRIES):
            try:
                await output_of(STOP, arguments, variables, pool.config.stop_timeout_s)
            except (CommandError, OSError) as error:
                pool.metrics.engine_starts.labels(group, role, "failed_stop").inc()
                left = "it is tried again" if again + 1 < STOP_TRIES else "stop it by hand"
                logger.warning("%s gets no more requests, but still runs: %s; %s", url, error, left)
                await asyncio.sleep(TRY_AGAIN_S)
            else:
                logger.info("%s (%s) was stopped", url, role)
                pool.metrics.engine_starts.labels(group, role, "stopped").inc()
                break

    async def _idle(self, stop: _Stop) -> None:
        """Wait until the engine has no requests and keeps no KV for other engines, at most as long as an answer can
        take."""
        clock, config = asyncio.get_running_loop().time, self._pool.config
        end_s, idle_since_s = clock() + config.answer_timeout_s, clock()
        while (engine := stop.engine) is not None and clock() < end_s:
            if not (engine.up or engine.load.open_exchanges):
                return  # one whose health check is late may still answer
            if engine.load.open_exchanges or engine.load.prefills or engine.copies:
                idle_since_s = clock()
            # A look at its metrics after the last request says whether KV is still to be fetched.
            looked = clock() - idle_since_s > 2 * config.health_interval_s
            if looked and not engine.traffic.leased_pages:
                return
            if clock() - idle_since_s > config.drain_timeout_s:
                return  # nobody has asked for it: a lease ends by itself
            await asyncio.sleep(LOOK_S)

    def _remove(self, url: str) -> None:
        """Take an engine out of the list. An engine of a name leaves when the name does not show it any more."""
        try:
            self._pool.edit(self._pool.config.without({url}))
        except ValueError as error:
            logger.warning("%s stays in the list of engines: %s", url, error)
