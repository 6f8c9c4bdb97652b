# SPDX-License-Identifier: Apache-2.0
"""The planner's search beside others, with what each took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import Judge, Promise, windows_of
from scheduler_plugins.planner.inventory import Inventory
from scheduler_plugins.planner.mix import Mix, fits, mix_of
from scheduler_plugins.planner.plan import SEARCHES
from scheduler_plugins.planner.search import Found, best_of
from scheduler_plugins.router.policies.base import Role

PROMISE = Promise(0.5, 0.05)


class Searched(NamedTuple):
    """What a search found, and what it took."""

    found: Found | None
    runs: int
    simulated: int  # requests

    @property
    def per_s(self) -> float:
        return self.found.per_s if self.found else 0.0


class Halves(NamedTuple):
    """Rates in the second half of a trace of fleets that were chosen in the first."""

    ours: float
    exhaustive: float


def every_mix(inventory: Inventory) -> list[Mix]:
    """Every mix of prefill and decode engines that uses all GPUs."""
    found: list[Counter[tuple[str, Role]]] = [Counter()]
    for device in inventory.devices:
        found = [
            total + part
            for total in found
            for part in _fillings(inventory, device, inventory.gpus(device))
        ]
    mixes = {mix_of(counts) for counts in found}
    return [mix for mix in mixes if fits(mix, inventory)]


def _fillings(
    inventory: Inventory, device: str, gpus: int, first: int = 0
) -> Iterator[Counter[tuple[str, Role]]]:
    """Every way to fill these GPUs."""
    engines = [
        (kind, role) for kind in inventory.of(device) for role in (Role.PREFILL, Role.DECODE)
    ]
    if gpus == 0:
        yield Counter()
    for n in range(first, len(engines)):
        size = inventory.kinds[engines[n][0]].gpus
        if size <= gpus:
            for rest in _fillings(inventory, device, gpus - size, n):
                yield rest + Counter({engines[n]: 1})


def searched(inventory: Inventory, requests: Sequence[Waiting], each: int, name: str) -> Searched:
    """One of the planner's searches, or `exhaustive`."""
    bounds = Bounds(inventory, Workload.of(requests, PROMISE.tpot_s))
    judge = Judge(windows_of(requests, each), PROMISE)
    judge.first_per_s = max(0.1, bounds.of(front(bounds)[0]) / 8)
    if name == "exhaustive":
        mixes = sorted(every_mix(inventory), key=lambda mix: (-bounds.of(mix), mix))
        found = best_of(mixes, judge, inventory)
    else:
        found = SEARCHES[name](judge, bounds)
    return Searched(found, judge.runs, judge.simulated)


def on_the_other_half(
    inventory: Inventory, requests: Sequence[Waiting], each: int
) -> tuple[Halves, list[Searched]]:
    """Plan with the first half, ours and exhaustively, and judge both in the second."""
    half = len(requests) // 2
    judge = Judge(windows_of(requests[half:], each), PROMISE)
    plans = [searched(inventory, requests[:half], each, name) for name in ("planner", "exhaustive")]
    ours, theirs = (judge.goodput(plan.found.fleet) if plan.found else 0.0 for plan in plans)
    return Halves(ours, theirs), plans


def front_cpu_s(inventory: Inventory, requests: Sequence[Waiting]) -> tuple[float, int]:
    """CPU seconds of the front, and its mixes."""
    bounds = Bounds(inventory, Workload.of(requests, PROMISE.tpot_s))
    begun_s = time.process_time()
    found = front(bounds)
    return time.process_time() - begun_s, len(found)
