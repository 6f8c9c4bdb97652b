# SPDX-License-Identifier: Apache-2.0
"""The highest rate of a fleet that keeps the promise in every window of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import msgspec

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim.capacity import KEPT, kept, largest
from scheduler_plugins.sim.fleet import Fleet
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.simulate import Scenario

WINDOWS = 4
BETTER = 1.02
"""A fleet is looked at only if it holds this many times the best rate so far: one run refutes it."""
CLOSE = 0.015
"""Relative error of a rate."""
LEAST_PER_S = 0.01
LASTS = 5
"""A window lasts at least this many promised TTFTs. In a shorter one every rate is in time."""


class Promise(NamedTuple):
    """What users are promised, in seconds."""

    ttft_s: float
    tpot_s: float


class Window(NamedTuple):
    """A part of a trace."""

    skip: int  # requests before it
    requests: Sequence[Waiting]


class Late(NamedTuple):
    """Parts of the requests that were late, by cause."""

    prefill: float  # the prompt was not computed in time, or refused as such
    decode: float  # tokens were too slow
    link: float  # the KV came too late
    room: float  # the KV came too late, and would not with more room on the decode side


def windows_of(requests: Sequence[Waiting], each: int) -> list[Window]:
    """Four windows of `each` requests at even distances; fewer requests if the trace has no more."""
    each = max(1, min(each, len(requests) // WINDOWS))
    starts = [n * len(requests) // WINDOWS for n in range(WINDOWS)]
    return [Window(start, requests[start : start + each]) for start in starts]


@dataclass
class Judge:
    """Simulates fleets. `runs` and `simulated` count what that took; `ran` is called with `runs` after each one."""

    windows: Sequence[Window]
    promise: Promise
    policy: str = ""
    order: str = "srjf_calibrated"
    first_per_s: float = 1.0
    """Where the search for a rate begins."""
    runs: int = 0
    simulated: int = 0
    ran: Callable[[int], None] = lambda runs: None

    def __post_init__(self) -> None:
        self._hardest = list(range(len(self.windows)))
        fewest = min(len(window.requests) for window in self.windows)
        self.most_per_s = fewest / (LASTS * max(1e-9, self.promise.ttft_s))
        """No higher rate can be told apart with windows of this length."""

    def served(self, fleet: Fleet, per_s: float, window: int) -> list[Served]:
        """Play a window. `pd-router simulate` does exactly this."""
        scenario = Scenario(
            fleet=fleet,
            level=2,
            order=self.order,
            ttft_slo_s=self.promise.ttft_s,
            tpot_slo_s=self.promise.tpot_s,
        )
        requests = scenario.arrivals(self.windows[window].requests, per_s=[per_s])
        self.runs += 1
        self.simulated += len(requests)
        self.ran(self.runs)
        return scenario.cluster(self.policy or "least_delay").run(requests)

    def kept(self, fleet: Fleet, per_s: float, window: int) -> float:
        """Part of a window's requests in time: of the class that has the fewest."""
        classes = dict[str, list[Served]]()
        for outcome in self.served(fleet, per_s, window):
            classes.setdefault(outcome.request.qos, []).append(outcome)
        return min(kept(part, *self.promise) for part in classes.values())

    def holds(self, fleet: Fleet, per_s: float) -> bool:
        """Whether every window keeps the promise. The window that failed last is played first."""
        for n in self._hardest:
            if self.kept(fleet, per_s, n) < KEPT:
                self._hardest.remove(n)
                self._hardest.insert(0, n)
                return False
        return True

    def goodput(self, fleet: Fleet, floor: float = 0.0, close: float = CLOSE) -> float:
        """The highest rate at which every window keeps the promise; 0 if `floor` times 1.02 is too much."""
        return self._highest(lambda per_s: self.holds(fleet, per_s), floor, close)

    def of_window(self, fleet: Fleet, window: int, start: float) -> float:
        """The highest rate of one window. `start`: a rate to begin at."""
        keeps = lambda per_s: self.kept(fleet, per_s, window) >= KEPT  # noqa: E731
        return self._highest(keeps, start / BETTER) or self._highest(keeps, 0.0)

    def worst_window(self, fleet: Fleet, per_s: float) -> tuple[int, float]:
        """The window with the fewest requests in time at a rate, and that part of them."""
        parts = [self.kept(fleet, per_s, n) for n in range(len(self.windows))]
        return parts.index(min(parts)), min(parts)

    def late(self, fleet: Fleet, per_s: float, window: int) -> Late:
        """Why requests are late at a rate."""
        late = self._late(fleet, per_s, window)
        if not late.link:
            return late
        link = min(late.link, self._late(_roomy(fleet), per_s, window).link)
        return late._replace(link=link, room=late.link - link)

    def _late(self, fleet: Fleet, per_s: float, window: int) -> Late:
        """The same, as if all KV that comes too late came over a slow link."""
        served = self.served(fleet, per_s, window)
        (ttft_s, tpot_s), n = self.promise, len(served)
        prefill = decode = handoff = 0
        for outcome in served:
            computed_s = inf if outcome.prefilled_s is None else outcome.prefilled_s
            if outcome.rejected == "tpot" or (
                outcome.end_s is not None and outcome.tpot_s > tpot_s
            ):
                decode += 1
            elif outcome.rejected or computed_s - outcome.request.arrival_s > ttft_s:
                prefill += 1
            elif outcome.ttft_s > ttft_s:
                handoff += 1
        return Late(prefill / n, decode / n, handoff / n, 0.0)

    def _highest(self, keeps: Callable[[float], bool], floor: float, close: float = CLOSE) -> float:
        low, high = 0.0, floor * BETTER or min(self.first_per_s, self.most_per_s / 2)
        while high < self.most_per_s and keeps(high):
            low, high = high, high * (1.15 if floor else 2.0)
        if not low and floor:
            return 0.0
        while not low and high > LEAST_PER_S:  # the first guess was too high
            low = high / 2 if keeps(high / 2) else 0.0
            high = high if low else high / 2
        return largest(keeps, low, min(high, self.most_per_s), close) if low else 0.0


def _roomy(fleet: Fleet) -> Fleet:
    """The fleet with any room for KV."""
    parts = (
        msgspec.structs.replace(part, profile=msgspec.structs.replace(part.profile, kv_tokens=inf))
        for part in fleet.parts
    )
    return replace(fleet, parts=tuple(parts))
