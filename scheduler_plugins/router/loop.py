# SPDX-License-Identifier: Apache-2.0
"""The event loop of a router's process, whose timers do not count the time in which the process stood still."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import cache
from time import monotonic
from typing import Any, Protocol, cast

MOST_S = 0.5
"""Longest time between two turns of the loop that counts as running. If more passes, the process stood still: it was
stopped, its machine was paused, or it got no processor."""
CATCH_UP_S = 0.5
"""Time after a standstill in which the loop only reads what has come meanwhile. Deadlines wait for it."""
_BEAT_S = MOST_S / 4
_ROUNDING_S = 1e-3  # uvloop's timers have whole milliseconds


class _Handle(Protocol):
    def cancel(self) -> None: ...


class _Timer:
    """A timer of a `PatientLoop`. It has the methods of `asyncio.TimerHandle` that callers use."""

    __slots__ = (
        "_call",
        "_cancelled",
        "_context",
        "_due_s",
        "_handle",
        "_looked",
        "_loop",
        "_when_s",
    )

    def __init__(
        self, loop: PatientLoop, delay_s: float, call: Callable[[], object], context: Context | None
    ) -> None:
        self._loop, self._call, self._context = loop, call, context
        self._when_s = loop.time() + delay_s
        self._due_s = loop.ran_s() + delay_s
        self._cancelled = self._looked = False
        self._handle: _Handle = loop.arm(delay_s, self._fire, context)

    def when(self) -> float:
        """When it fires at the earliest, on the loop's clock."""
        return self._when_s

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        self._cancelled = True
        self._handle.cancel()

    def _fire(self) -> None:
        loop = self._loop
        left_s = self._due_s - loop.ran_s()
        if left_s <= _ROUNDING_S and loop.is_behind() and not self._looked:
            self._looked, left_s = True, CATCH_UP_S
        if left_s > _ROUNDING_S:
            self._handle = loop.arm(left_s, self._fire, self._context)
        else:
            self._call()


class PatientLoop:
    """Part of an event loop: timers of at least `MOST_S` count the time in which the process ran.

    After a standstill, loops run timers before they read sockets, so a deadline would ignore data that has already
    come. Here a deadline is extended by the time of the standstill, plus `CATCH_UP_S` to read that data. As all timers
    are made by the loop, this holds for those of asyncio, of aiohttp and of TLS handshakes as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen_s, self._lost_s, self._behind_until_s = monotonic(), 0.0, 0.0
        self._beat()

    def arm(self, delay_s: float, call: Callable[[], object], context: Context | None) -> _Handle:
        """A plain timer."""
        raise NotImplementedError

    def time(self) -> float:
        raise NotImplementedError

    def ran_s(self) -> float:
        """The loop's clock without the time in which the process stood still. Differs between processes."""
        now_s = monotonic()
        if (lost_s := now_s - self._seen_s - MOST_S) > 0:
            self._lost_s += lost_s
            self._behind_until_s = now_s + CATCH_UP_S
        self._seen_s = now_s
        return now_s - self._lost_s

    def is_behind(self) -> bool:
        """Whether the process has just stood still, and may not have read yet what came meanwhile."""
        self.ran_s()
        return self._seen_s < self._behind_until_s

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        call = (lambda: callback(*args)) if args else callback
        if delay < MOST_S:
            return cast(asyncio.TimerHandle, self.arm(delay, call, context))
        return cast(asyncio.TimerHandle, _Timer(self, delay, call, context))

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _beat(self) -> None:
        self.ran_s()
        self.arm(_BEAT_S, self._beat, None)


def ran_s() -> float:
    """`PatientLoop.ran_s` of the running loop; the clock of another loop."""
    loop = asyncio.get_running_loop()
    return loop.ran_s() if isinstance(loop, PatientLoop) else loop.time()


def is_behind() -> bool:
    """`PatientLoop.is_behind` of the running loop."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, PatientLoop) and loop.is_behind()


class AsyncioLoop(PatientLoop, asyncio.SelectorEventLoop):  # type: ignore[misc]
    """asyncio's own loop."""

    def arm(self, delay_s: float, call: Callable[[], object], context: Context | None) -> _Handle:
        when_s = self.time() + delay_s
        return asyncio.SelectorEventLoop.call_at(self, when_s, call, context=context)

    def time(self) -> float:
        return monotonic()


@cache
def _uvloops() -> type[asyncio.AbstractEventLoop]:
    """uvloop's loop. Raises ModuleNotFoundError: it is not installed."""
    import uvloop

    class UvLoop(PatientLoop, uvloop.Loop):  # type: ignore[misc]
        def arm(
            self, delay_s: float, call: Callable[[], object], context: Context | None
        ) -> _Handle:
            return uvloop.Loop.call_later(self, delay_s, call, context=context)

        def time(self) -> float:
            return uvloop.Loop.time(self)

    return UvLoop


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop if it is installed, because it takes less CPU time; else asyncio's own."""
    try:
        return _uvloops()()
    except ModuleNotFoundError:
        return AsyncioLoop()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run until `main` returns."""
    _open_standard_files()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


def _open_standard_files() -> None:
    """Open standard input, output and error if the process was started without. A socket would get such a number, and
    libuv aborts the process when it closes one."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
