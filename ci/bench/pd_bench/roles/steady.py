# SPDX-License-Identifier: Apache-2.0
"""`roles steady`: traffic that keeps its shape, or swings about it. A role policy must not do harm there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from math import pi, sin
from random import Random
from typing import NamedTuple

from pd_bench.report import Say
from pd_bench.roles.fleets import FleetKind
from pd_bench.roles.play import Outcome, in_parallel, play
from pd_bench.roles.shift import Half
from scheduler_plugins.order.request import Waiting

POLICIES = ("pressure", "ratio", "arrow", "tetri", "mixed")
LOADS = (0.5, 0.8, 0.9)
SINE_LOAD = 0.8
PERIODS_S = (20.0, 120.0, 600.0)
SWING = 0.8
"""The share of the first trace swings by half of this about one half."""
POINTS, POINTS_NEAR_FULL = 1.0, 3.0
"""`pressure` serves at most this many points less in time than the best fixed ratio: up to a load of 0.8, above it."""
MOST_MOVES = 2
"""Bar for the moves of `pressure` under Poisson arrivals."""


class Case(NamedTuple):
    """A workload of some minutes."""

    name: str
    load: float
    points: float  # allowed below the best fixed ratio
    moves: int | None  # allowed; None: any number
    requests: Sequence[Waiting]
    ratios: Sequence[int]  # fixed numbers of prefill engines to compare with


class Steady(NamedTuple):
    """Results of one workload."""

    case: Case
    fixed: Mapping[int, Outcome]
    roles: Mapping[str, Outcome]

    @property
    def best(self) -> int:
        """Prefill engines of the best fixed ratio."""
        return max(self.fixed, key=lambda p: self.fixed[p].kept)


def cases(halves: Sequence[Half], seconds: float) -> list[Case]:
    """All workloads. A load of 1.0 is the capacity of the best fixed ratio for that trace."""
    made = list[Case]()
    for half in halves:
        near = _near(half)
        for load in LOADS:
            points = POINTS if load <= 0.8 else POINTS_NEAR_FULL
            per_s = load * half.capacity.most
            timed = _drawn([half], seconds, _constant(per_s), _constant(0.0))
            made.append(Case(f"Poisson, {half.name}", load, points, MOST_MOVES, timed, near))
            played = _replayed(half, per_s, seconds)
            made.append(Case(half.name, load, points, None, played, near))
        rate = partial(_step, half.capacity.most, seconds)
        steps = _drawn([half], seconds, rate, _constant(0.0))
        made.append(Case(f"steps, {half.name}", 0.9, POINTS_NEAR_FULL, None, steps, near))
    between = sorted({p for half in halves for p in _near(half)})
    ratios = range(between[0], between[-1] + 1)
    capacities = (halves[0].capacity.most, halves[1].capacity.most)
    for period_s in PERIODS_S:
        share, rate = partial(_share, period_s), partial(_swinging, capacities, period_s)
        timed = _drawn(halves, seconds, rate, share)
        name = f"sine of mix, {period_s:g} s"
        made.append(Case(name, SINE_LOAD, POINTS_NEAR_FULL, None, timed, ratios))
    return made


def compare(fleet: FleetKind, given: Sequence[Case], jobs: int, say: Say) -> list[Steady]:
    """Fixed ratios and policies, for each workload. Policies start with the best of the fixed ratios."""
    results = list[Steady]()
    for case in given:
        fixed_runs = [(fleet, case.requests, p, "") for p in case.ratios]
        fixed = dict(zip(case.ratios, in_parallel(jobs, play, fixed_runs, _quiet), strict=True))
        best = max(fixed, key=lambda p: fixed[p].kept)
        runs = [(fleet, case.requests, best, name) for name in POLICIES]
        roles = dict(zip(POLICIES, in_parallel(jobs, play, runs, _quiet), strict=True))
        results.append(Steady(case, fixed, roles))
        shown = ", ".join(
            f"{name} {outcome.kept:.3f} ({outcome.moves})" for name, outcome in roles.items()
        )
        say(
            f"{fleet.name}, {case.name} at {case.load}: {fleet.ratio_name(best)} "
            f"{fixed[best].kept:.3f}, {shown}"
        )
    return results


def _near(half: Half) -> range:
    best, most = half.capacity.prefill, len(half.capacity.per_s)
    return range(max(1, best - 1), min(most, best + 1) + 1)


def _replayed(half: Half, per_s: float, seconds: float) -> list[Waiting]:
    """The trace with its own bursts at this mean rate, again from the start when it ends."""
    begun_s, ended_s = half.requests[0].arrival_s, half.requests[-1].arrival_s
    scale = len(half.requests) / per_s / max(1e-9, ended_s - begun_s)
    count, long_s = round(per_s * seconds), len(half.requests) / per_s
    return [
        replace(
            request,
            id=str(n),
            arrival_s=n // len(half.requests) * long_s + (request.arrival_s - begun_s) * scale,
        )
        for n, request in enumerate(islice(cycle(half.requests), count))
    ]


def _step(capacity: float, seconds: float, at_s: float) -> float:
    """Rate: thirds of 0.3, 0.9 and 0.3 of the capacity."""
    return capacity * (0.9 if seconds / 3 <= at_s < 2 * seconds / 3 else 0.3)


def _share(period_s: float, at_s: float) -> float:
    """Share of the second trace."""
    return 0.5 + SWING / 2 * sin(2 * pi * at_s / period_s)


def _swinging(capacities: tuple[float, float], period_s: float, at_s: float) -> float:
    """Rate: `SINE_LOAD` of what the fleet could do with the best ratio for the mix of each moment."""
    share = _share(period_s, at_s)
    return SINE_LOAD / ((1 - share) / capacities[0] + share / capacities[1])


def _constant(value: float) -> Callable[[float], float]:
    return lambda at_s: value


def _drawn(
    halves: Sequence[Half],
    seconds: float,
    rate: Callable[[float], float],
    second: Callable[[float], float],
) -> list[Waiting]:
    """Requests drawn from traces, at random times of this rate. `second`: share of the second trace at a time."""
    random, now_s, requests = Random(0), 0.0, list[Waiting]()
    while now_s < seconds:
        now_s += random.expovariate(rate(now_s))
        half = halves[random.random() < second(now_s)]
        request = random.choice(half.requests)
        requests.append(replace(request, id=str(len(requests)), arrival_s=now_s))
    return requests


def _quiet(given: tuple[object, ...], result: Outcome) -> None:
    pass
