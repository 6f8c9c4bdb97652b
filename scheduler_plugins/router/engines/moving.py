# SPDX-License-Identifier: Apache-2.0
"""Carries out a change of an engine's role: `steady`, `moving`, `steady`.

A vLLM engine with `kv_both` serves both sides at any time, so a move only changes what the router sends to it. An
SGLang engine must be idle: it drains, gets `POST /pd_role_switch`, and is asked for its new side. If a step fails, the
engine goes back to its old role.
"""

from __future__ import annotations

import asyncio
import logging

from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.loop import is_behind, ran_s
from scheduler_plugins.router.settings.elastic import MOVABLE, Place
from scheduler_plugins.router.tracing import Tracing

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Pause between two checks whether an engine is idle."""
SWITCH_S = 60.0
"""Longest wait for an SGLang engine's answer to `/pd_role_switch`. It captures its decode graphs meanwhile."""
READY_S = 5.0
"""Longest wait until a switched SGLang engine is up and has told where it hands KV over. The router sends it nothing
before, so requests would find no engine although the move has ended."""
REFUSED_S = 1.0
"""Pause before an engine that was not idle yet is asked again."""

SETTINGS = "settings"
"""The step of a move that a change of the settings has ended."""


class MoveFailedError(Exception):
    """A move failed, and the engine has its old role. `step` is a metric label; the message is for people."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(f"{step}: {message}")
        self.step = step


class Mover:
    """Moves engines of one pool. An engine has one move at a time."""

    def __init__(self, pool: EnginePool, tracing: Tracing) -> None:
        self._pool = pool
        self._tracing = tracing

    def check(self, engine: BackendEngine, role: Role) -> None:
        """Raises ValueError if the engine can never have this role, or is moving."""
        if engine.role_state.moving is not None:
            raise ValueError(
                f"url {engine.url}: is being moved to {engine.role_state.moving}; wait until that has ended"
            )
        if engine.role is role or engine.whole:
            return
        if engine.kind is not Kind.SGLANG:
            if engine.handover_known and role in MOVABLE - engine.able:
                raise ValueError(
                    f'url {engine.url}: this engine cannot {role}; start it with PDConnector and "kv_role": "kv_both"'
                )
            return
        if not engine.switches:
            raise ValueError(
                f"url {engine.url}: this SGLang engine cannot change its side; start it with --enable-pd-role-switch"
            )
        if role not in (Role.PREFILL, Role.DECODE):
            raise ValueError(f"url {engine.url}: role {role}: an SGLang engine has one side")

    async def move(
        self, engine: BackendEngine, role: Role, *, pinned: bool, cause: str, why: str
    ) -> None:
        """Give an engine another role.

        Args:
            pinned: whether the engine keeps the role until it is released.
            cause: the metric label.
            why: a sentence for the log.

        Raises:
            MoveFailedError: the engine has its old role.
        """
        before, pool, place = engine.role, self._pool, engine.role_state.place
        if role is before:
            pool.set_role(engine, role, pinned=pinned)
            return
        logger.info("%s moves from %s to %s: %s", engine.url, before, role, why)
        with self._tracing.move(engine.url, before, role, why) as span:
            try:
                if engine.kind is Kind.SGLANG:
                    await self._switch(engine, role, place)
            except MoveFailedError as failure:
                logger.warning("%s stays %s: %s", engine.url, engine.role, failure)
                if failure.step != SETTINGS:  # the operator's wish is not a fault
                    pool.metrics.role_moves.labels(before, role, f"failed_{failure.step}").inc()
                span.failed(str(failure))
                raise
            if engine not in pool.engines:
                raise MoveFailedError("left", "the engine has left")
            pool.set_role(engine, role, pinned=pinned)
            pool.metrics.role_moves.labels(before, role, cause).inc()
            if engine.kind is Kind.SGLANG:
                await self._ready(engine)
        role_state = engine.role_state
        if role_state.place != place:  # edited too late to end the move: the edit holds from now on
            edited, role_state.place = role_state.place, place
            pool.replace(engine, edited)

    async def _switch(self, engine: BackendEngine, role: Role, place: Place) -> None:
        """Drain an SGLang engine and have it change its side. `place`: its place in the settings when the move
        began."""
        pool, before = self._pool, engine.role
        ask = pool.inquiry(engine)
        pool.move(engine, role)
        try:
            until_s = ran_s() + pool.config.drain_timeout_s
            await self._idle(engine, until_s, place)
            while (refusal := await ask.switch_role(role, SWITCH_S)) is not None:
                if not refusal.again:
                    raise MoveFailedError("switch", refusal.message)
                await asyncio.sleep(REFUSED_S)
                await self._idle(engine, until_s, place)
        except EngineFailedError as failure:
            # The engine may have switched despite the error: ask it for its side.
            if await self._side(engine) != role:
                raise MoveFailedError("switch", str(failure)) from None
        else:
            if (side := await self._side(engine, role)) != role:
                raise MoveFailedError("confirm", f"it says that it is on the side {side or '?'}")
        finally:
            pool.move(engine, None)
            if engine.role is before:
                pool.look_again(engine)

    async def _idle(self, engine: BackendEngine, until_s: float, place: Place) -> None:
        """Wait until the engine has no requests. Raises MoveFailedError at `until_s`, or if the settings give it
        another place meanwhile: new settings take precedence over the move."""
        while True:
            if engine.role_state.place != place:
                raise MoveFailedError(SETTINGS, "its entry in the settings has changed meanwhile")
            if ran_s() >= until_s and not is_behind():
                limit_s = self._pool.config.drain_timeout_s
                raise MoveFailedError("drain", f"it was not idle within {limit_s:g} s")
            if not (engine.in_flight or engine.open_requests):
                return
            await asyncio.sleep(LOOK_S)

    async def _ready(self, engine: BackendEngine) -> None:
        """Wait until the router can use the engine on its new side, `READY_S` at most."""
        until_s = ran_s() + READY_S
        while is_behind() or ran_s() < until_s:
            if engine.up and (engine.address is not None or not engine.hands_over):
                return
            await asyncio.sleep(LOOK_S)

    async def _side(self, engine: BackendEngine, assumed: str = "") -> str:
        """The side that the engine reports; `assumed` if its report has no side, and empty if it does not answer."""
        try:
            facts = await self._pool.inquiry(engine).sglang_facts()
        except EngineFailedError:
            return ""
        if facts is None:
            return ""
        return facts.mode if facts.tells_side else assumed
