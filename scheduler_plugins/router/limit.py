# SPDX-License-Identifier: Apache-2.0
"""An end for calls of other packages' code that do not return. The router serves nothing while it waits for one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from math import inf
from types import FrameType
from typing import TypeVar

from pd_connector.pauses import doubled_s

T = TypeVar("T")
LIMIT_S = 1.0
"""Longest call. A decision should take far less than a millisecond."""
SLOW_S = 0.2
"""A call that takes longer is named in the log."""
_ALARMS = 10  # until the limit
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After a call that did not return, no other one is made for a pause. It doubles with each such call in a row."""


class LateError(BaseException):
    """Raised inside a call that lasts too long. Not a subclass of `Exception`, so that an `except Exception` in that
    code does not catch it."""


class Limited:
    """Ends calls after `LIMIT_S`, and pauses after each call that it ended.

    It can end calls in the main thread only, by a signal. Code that waits in C without looking for signals goes on.
    """

    def __init__(self) -> None:
        self.took_s = 0.0
        """Seconds of the last call."""
        self._late = 0  # calls in a row
        self._until_s = -inf

    def is_paused(self, now_s: float) -> bool:
        """Whether no call may be made now."""
        return now_s < self._until_s

    def call(self, function: Callable[[], T], now_s: float) -> T:
        """Call `function`; returns its result. Raises its errors, or LateError."""
        alarm = _Alarm()
        try:
            result = alarm.call(function)
        finally:
            self.took_s = alarm.ran_s()
            self._late = self._late + 1 if self.took_s >= LIMIT_S else 0
            if self._late:
                pause_s = doubled_s(FIRST_PAUSE_S, self._late - 1, LONGEST_PAUSE_S)
                self._until_s = now_s + self.took_s + pause_s
        return result


class _Alarm:
    """Ends one call after `LIMIT_S`. It counts alarms, because a process that stands still gets only one."""

    def __init__(self) -> None:
        self._alarms, self._step_s = 0, LIMIT_S / _ALARMS
        self._begun_s, self._cpu_s = time.perf_counter(), time.thread_time()
        self._works = threading.current_thread() is threading.main_thread()

    def call(self, function: Callable[[], T]) -> T:
        if not self._works:
            return function()
        handler = signal.signal(signal.SIGALRM, self._rings)
        # Also after the limit: the code may catch what is raised.
        timer = signal.setitimer(signal.ITIMER_REAL, self._step_s, self._step_s)
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)

    def ran_s(self) -> float:
        """Seconds since the call began, without the time in which the process stood still."""
        took_s = time.perf_counter() - self._begun_s
        if not self._works:
            return took_s
        # Code in C may keep alarms from being counted, but takes CPU time.
        counted_s = (self._alarms + 1) * self._step_s
        return min(took_s, max(counted_s, time.thread_time() - self._cpu_s))

    def _rings(self, number: int, frame: FrameType | None) -> None:
        self._alarms += 1
        # In the function `call` itself the call has returned, or has not begun.
        if self._alarms >= _ALARMS and (frame is None or frame.f_code is not _Alarm.call.__code__):
            raise LateError(f"it had not returned after {LIMIT_S:g} s")
