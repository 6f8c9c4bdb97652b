# SPDX-License-Identifier: Apache-2.0
"""A simulated engine that is driven by the wall clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim.engine import SimulatedEngine
from scheduler_plugins.sim.prefill import RunningPrefill
from scheduler_plugins.sim.served import Served

_SHORTEST_TICK_S = 0.002
"""Tokens that come faster than this are reported together."""


@dataclass(eq=False)
class Generation:
    """One request on the engine, as its client sees it."""

    request: Waiting
    record: Served
    hands_over: bool = False
    """The prompt is computed for another engine: nothing is generated here."""
    tokens: int = 0
    """Generated so far."""
    done: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def progress(self) -> AsyncIterator[int]:
        """Yields the number of tokens whenever there are more, until all are there."""
        reported = 0
        while reported < self.request.max_tokens:
            await self.changed.wait()
            self.changed.clear()
            if self.tokens > reported:
                reported = self.tokens
                yield reported
            if self.done:
                return


class ClockedEngine:
    """Runs a `SimulatedEngine` in real time, or `speed` times faster. Used on one event loop."""

    def __init__(self, engine: SimulatedEngine, speed: float = 1.0) -> None:
        self._engine = engine
        self.speed = speed
        self._generations: dict[str, Generation] = {}
        self._wants_room = deque[tuple[int, asyncio.Event]]()
        self._begun_s = asyncio.get_running_loop().time()
        self._wake = asyncio.Event()
        engine.hand_over = self._hand_over
        engine.on_end = self._ended

    @property
    def now_s(self) -> float:
        """The engine's time."""
        return (asyncio.get_running_loop().time() - self._begun_s) * self.speed

    @property
    def waiting(self) -> int:
        return len(self._engine.queue)

    @property
    def running(self) -> int:
        return len(self._generations) - self.waiting

    def prefill(self, request: Waiting, *, hands_over: bool) -> Generation:
        """Add a prompt to compute. `request.arrival_s` is by `now_s`."""
        made = self._begin(request, hands_over)
        self._engine.arrive(request, made.record, self.now_s)
        self._wake.set()
        return made

    @asynccontextmanager
    async def room(self, tokens: int) -> AsyncIterator[None]:
        """Wait in order until there is room for this KV, and keep it until the block ends, in which its
        sequence is received."""
        turn = asyncio.Event()
        self._wants_room.append((tokens, turn))
        try:
            self._give_room()
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._engine.reserved_tokens -= tokens
            else:
                self._wants_room.remove((tokens, turn))
            raise
        try:
            yield
        finally:
            self._engine.reserved_tokens -= tokens
            self._give_room()

    def receive(self, request: Waiting) -> Generation:
        """Add a sequence whose KV has arrived. See `room`."""
        made = self._begin(request, False)
        self._engine.reserved_tokens += request.tokens
        self._engine.receive(request, made.record, self.now_s)
        self._wake.set()
        return made

    def cancel(self, generation: Generation) -> None:
        """Remove a request whose client is gone or has everything."""
        if self._generations.pop(generation.request.id, None) is not None:
            self._engine.cancel(generation.request.id)
            self._wake.set()

    async def run(self) -> None:
        """Drive the engine until cancelled."""
        while True:
            now_s = self.now_s
            while self._engine.next_event_s <= now_s:
                self._engine.advance(self._engine.next_event_s)
            self._engine.settle(now_s)
            self._give_room()
            self._tell()
            self._wake.clear()
            pause_s = (self._engine.next_event_s - self.now_s) / self.speed
            if self._engine.decode.batch:
                step_s = (self._engine.decode.now_s - self.now_s) / self.speed
                pause_s = min(pause_s, max(_SHORTEST_TICK_S, step_s))
            try:
                async with asyncio.timeout(None if pause_s == inf else max(0.0, pause_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _give_room(self) -> None:
        """Keep room for those that wait, in their order."""
        waiting, engine = self._wants_room, self._engine
        while waiting and engine.has_room(waiting[0][0]):
            tokens, turn = waiting.popleft()
            engine.reserved_tokens += tokens
            turn.set()

    def _begin(self, request: Waiting, hands_over: bool) -> Generation:
        made = Generation(request, Served(request), hands_over)
        self._generations[request.id] = made
        return made

    def _hand_over(self, prefill: RunningPrefill, now_s: float) -> bool:
        made = self._generations.get(prefill.request.id)
        if made is None or not made.hands_over:
            return False
        self._finish(made, 1)
        return True

    def _ended(self, record: Served) -> None:
        made = self._generations.get(record.request.id)
        if made is None:
            return
        assert record.end_s is not None
        later_s = (record.end_s - self.now_s) / self.speed
        if later_s > 0:  # the engine decodes up to the end of the running step
            loop = asyncio.get_running_loop()
            loop.call_later(later_s, self._finish, made, record.request.max_tokens)
        else:
            self._finish(made, record.request.max_tokens)

    def _finish(self, made: Generation, tokens: int) -> None:
        made.tokens, made.done = tokens, True
        self._generations.pop(made.request.id, None)
        made.changed.set()

    def _tell(self) -> None:
        """Wake every client whose sequence has new tokens. Those of a running step are not there yet."""
        running = self._engine.decode.now_s > self.now_s
        for request_id, more in self._engine.decode.left():
            made = self._generations.get(request_id)
            tokens = 0 if made is None else made.request.max_tokens - more - running
            if made is not None and tokens > made.tokens:
                made.tokens = tokens
                made.changed.set()
