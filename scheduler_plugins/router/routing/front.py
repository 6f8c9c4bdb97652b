# SPDX-License-Identifier: Apache-2.0
"""One bounded queue per class at the router, for times in which the engines are busy.

Each engine serves its requests in its own order. A request of a better class can overtake others only while they wait
here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from typing import NamedTuple

from scheduler_plugins.qos.classes import ONLY, QosClass
from scheduler_plugins.qos.shares import DeficitShares
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.routing.attempt import AllOverloadedError
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.elastic import DEFAULT_GROUP

ENGINE_QUEUE_S = 0.5
"""Prefill that each engine can have queued while requests wait here. Less would leave engines idle between two looks at
them; more would let early requests of a low class go before later ones of a high class."""
LOOK_S = 0.01
"""Pause between two checks whether engines have room again."""


class QueueFullError(AllOverloadedError):
    """The queue of the class is full."""

    def __init__(self, qos: str, waiting: int, retry_after_s: int) -> None:
        super().__init__(
            retry_after_s,
            f"{waiting} requests of class {qos!r} wait already; retry in {retry_after_s} s",
        )


class Turn(NamedTuple):
    """What one request waits for."""

    qos: str
    cost_s: float  # of its prompt, on the engine that would finish it first
    engines: int  # that prefill
    has_room: Callable[[], bool]
    group: str = DEFAULT_GROUP
    tokens: int = 0
    since_s: float = 0.0


class _Waiter(NamedTuple):
    turn: Turn
    go: asyncio.Future[None]


def turn_of(request: Request, pool: EnginePool) -> Turn:
    """The conditions that the request waits for. A prefill engine must have less than `ENGINE_QUEUE_S` queued, and a
    decode engine room for the prompt. No request waits for an engine that cannot be reached."""
    prefill = pool.up(Role.PREFILL) or pool.up(Role.DECODE)
    cost_s = min((engine.costs.prefill_s(request.tokens) for engine in prefill), default=0.0)

    def has_room() -> bool:
        now_s = asyncio.get_running_loop().time()
        decode, fill = pool.up(Role.DECODE), pool.up(Role.PREFILL)
        # An idle engine will not get more room. Send it the prompt, so it says what is wrong.
        if decode and all(engine.free_kv < request.tokens and engine.batch for engine in decode):
            return False
        return not fill or any(engine.queued_s(now_s) < ENGINE_QUEUE_S for engine in fill)

    return Turn(
        request.qos,
        cost_s,
        max(1, len(prefill)),
        has_room,
        request.group,
        request.tokens,
        asyncio.get_running_loop().time(),
    )


class FrontQueue:
    """The queues of all classes. `DeficitShares` chooses the next class, as in an engine."""

    def __init__(self) -> None:
        self._classes: Sequence[QosClass] = ONLY
        self._shares = DeficitShares(ONLY)
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._serving: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> dict[str, int]:
        """Number of waiting requests, by class."""
        return {name: len(queue) for name, queue in self._waiting.items() if queue}

    def by_group(self, now_s: float) -> dict[str, Front]:
        """What waits, by group of engines."""
        fronts = dict[str, Front]()
        for queue in self._waiting.values():
            for turn, _ in queue:
                front = fronts.get(turn.group, Front())
                oldest_s = max(front.oldest_s, now_s - turn.since_s)
                fronts[turn.group] = Front(front.requests + 1, front.tokens + turn.tokens, oldest_s)
        return fronts

    def expected_s(self, turn: Turn, classes: Sequence[QosClass]) -> float:
        """Predicted seconds until the turn of a request that comes now. It is the queued prefill of its class and of
        higher classes, shared by all engines; 0 if none waits."""
        rank = {qos_class.name: qos_class.priority for qos_class in classes}
        own = rank.get(turn.qos, 0)
        before = (
            waiter.turn.cost_s
            for name, queue in self._waiting.items()
            if rank.get(name, 0) >= own
            for waiter in queue
        )
        return sum(before) / turn.engines

    async def wait(self, turn: Turn, config: RouterConfig) -> None:
        """Return when it is the request's turn. Raises QueueFullError."""
        if config.classes != self._classes:
            self._classes = config.classes
            self._shares.update(config.classes)
        if not self._others("") and turn.has_room():
            self._shares.charge(turn.qos, turn.cost_s, ())
            return
        queue = self._waiting.setdefault(turn.qos, deque())
        if len(queue) >= config.front_queue:
            raise QueueFullError(
                turn.qos, len(queue), max(1, ceil(self.expected_s(turn, config.classes)))
            )
        waiter = _Waiter(turn, asyncio.get_running_loop().create_future())
        queue.append(waiter)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="the front queue")
        try:
            await waiter.go
        finally:
            with suppress(ValueError):
                queue.remove(waiter)

    async def _serve(self) -> None:
        """Release requests in their order, until none waits."""
        while names := self._others(""):
            name = self._shares.choose(names) or names[0]
            waiter = self._waiting[name][0]
            if not waiter.turn.has_room():
                await asyncio.sleep(LOOK_S)
                continue
            self._waiting[name].popleft()
            if not waiter.go.done():
                waiter.go.set_result(None)
                if name in {qos_class.name for qos_class in self._classes}:
                    self._shares.charge(name, waiter.turn.cost_s, self._others(name))
            # The request must be counted at its engines before the next request is considered.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _others(self, besides: str) -> list[str]:
        """Other classes with waiting requests."""
        return [name for name, queue in self._waiting.items() if queue and name != besides]
