# SPDX-License-Identifier: Apache-2.0
"""The mixes whose (prefill rate, decode rate) no other mix has beaten, by closed forms.

A device's front grows kind by kind, role by role, over its number of GPUs; the devices' fronts are merged. So thousands
of mixes become a few dozen without being listed.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from scheduler_plugins.planner.bound import Bounds
from scheduler_plugins.planner.mix import Mix, mix_of
from scheduler_plugins.router.policies.base import Role


class Point(NamedTuple):
    """A mix, and its closed-form rates."""

    prefill: float  # requests a second
    decode: float
    cost: float  # of the budget
    counts: tuple[tuple[str, Role, int], ...]

    def with_one(self, kind: str, role: Role, prefill: float, decode: float, cost: float) -> Point:
        """The same with one engine more."""
        counts = Counter({(name, its): n for name, its, n in self.counts})
        counts[kind, role] += 1
        return Point(self.prefill + prefill, self.decode + decode, self.cost + cost, mix_of(counts))


_NONE = Point(0.0, 0.0, 0.0, ())


def front(bounds: Bounds) -> list[Mix]:
    """Mixes of prefill and decode engines on the front, the highest closed-form rate first."""
    inventory = bounds.inventory
    merged = [_NONE]
    for device in inventory.devices:
        own = _of_device(bounds, device)
        merged = pareto(
            [
                Point(
                    a.prefill + b.prefill, a.decode + b.decode, a.cost + b.cost, a.counts + b.counts
                )
                for a in merged
                for b in own
                if a.cost + b.cost <= inventory.most_cost
            ]
        )
    able = [tuple(sorted(point.counts)) for point in merged if point.prefill and point.decode]
    return sorted(able, key=bounds.of, reverse=True)


def _of_device(bounds: Bounds, device: str) -> list[Point]:
    """The front of one device: a knapsack of its GPUs in which each item is an engine with a role."""
    inventory = bounds.inventory
    gpus, most = inventory.gpus(device), inventory.most_cost
    best: list[list[Point]] = [[_NONE], *([] for _ in range(gpus))]  # by GPUs that are used
    for kind, profile in inventory.of(device).items():
        rates, cost, size = bounds.rates[kind], inventory.cost(kind), profile.gpus
        for role, prefill, decode in (
            (Role.PREFILL, rates.prefill, 0.0),
            (Role.DECODE, 0.0, rates.decode),
        ):
            for used in range(size, gpus + 1):
                more = [
                    point.with_one(kind, role, prefill, decode, cost)
                    for point in best[used - size]
                    if point.cost + cost <= most
                ]
                best[used] = pareto(best[used] + more)
    return pareto([point for points in best for point in points])


def pareto(points: list[Point]) -> list[Point]:
    """The points that no other point equals or beats in both rates and cost."""
    kept = list[Point]()
    for point in sorted(points, key=lambda point: (-point.prefill, -point.decode, point.cost)):
        if not any(it.decode >= point.decode and it.cost <= point.cost for it in kept):
            kept.append(point)
    return kept
