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
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After a call that did not return, no other one is made for a pause. It doubles with each such call in a row."""


class LateError(BaseException):
    """Raised inside a call that lasts too long. No `Exception`: an `except Exception` of that code must not keep it."""


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
        """What `function` returns. Raises what it raises, or LateError."""
        begun_s = time.perf_counter()
        try:
            result = _within(LIMIT_S, function)
        finally:
            self.took_s = time.perf_counter() - begun_s
            self._late = self._late + 1 if self.took_s >= LIMIT_S else 0
            if self._late:
                pause_s = doubled_s(FIRST_PAUSE_S, self._late - 1, LONGEST_PAUSE_S)
                self._until_s = now_s + self.took_s + pause_s
        return result


def _within(limit_s: float, function: Callable[[], T]) -> T:
    if threading.current_thread() is not threading.main_thread():
        return function()

    def late(number: int, frame: FrameType | None) -> None:
        # In this function's own frame the call has returned, or has not begun.
        if frame is None or frame.f_code is not _within.__code__:
            raise LateError(f"it had not returned after {limit_s:g} s")

    handler = signal.signal(signal.SIGALRM, late)
    # Again and again: the code may catch what is raised.
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
