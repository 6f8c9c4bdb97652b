# SPDX-License-Identifier: Apache-2.0
"""The regular questions to a role controller, on a cluster's timeline."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from scheduler_plugins.router.roles.history import KEPT_S
from scheduler_plugins.sim.engine import ARRIVAL
from scheduler_plugins.sim.timeline import Timeline

IDLE_S = 2.0 * KEPT_S
"""The questions stop when nothing has happened for this time, until something does. A policy has forgotten all requests
by then, and engines that were lent have gone home. A trace with an idle month would otherwise be millions of questions."""


class Ticks:
    """Calls a function every few seconds."""

    def __init__(
        self,
        timeline: Timeline,
        every_s: float,
        ask: Callable[[float], None],
        goes_on: Callable[[], bool],
    ) -> None:
        """`goes_on`: whether requests are under way or to come."""
        self._timeline = timeline
        self._every_s = every_s
        self._ask = ask
        self._goes_on = goes_on
        self._busy_s = self._last_s = 0.0
        self._asleep = True

    def wake(self, now_s: float) -> None:
        """Something happens at this time. Goes on if the questions had stopped."""
        self._busy_s = now_s
        if self._asleep:
            self._asleep = False
            steps = max(1, ceil((now_s - self._last_s) / self._every_s))
            self._later(self._last_s + steps * self._every_s)

    def _later(self, at_s: float) -> None:
        self._timeline.at(at_s, ARRIVAL, self._tick)

    def _tick(self, now_s: float) -> None:
        self._last_s = now_s
        self._ask(now_s)
        if self._timeline:  # more is to happen
            self._busy_s = now_s
        if self._goes_on() and now_s - self._busy_s <= IDLE_S:
            self._later(now_s + self._every_s)
        else:
            self._asleep = True
