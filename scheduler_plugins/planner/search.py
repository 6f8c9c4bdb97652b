# SPDX-License-Identifier: Apache-2.0
"""The best fleet of an inventory: the front by closed forms, one run refutes, swaps.

1. Every mix of the front (`front.py`), the highest closed-form rate first, is played once at 1.02 times the best rate so
   far. Only if every window holds, its own rate is searched.
2. From the best one on, neighbours are tried by the same rule: an engine with another role, two engines joined to one of
   twice the tensor parallelism, one split, roles of two devices exchanged, and the other placement on the nodes. When
   none is better, the search ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from scheduler_plugins.planner.bound import Bounds
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import Judge
from scheduler_plugins.planner.inventory import Inventory, device_of
from scheduler_plugins.planner.mix import Mix, counts_of, fits, mix_of, name_of, placed
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.fleet import Fleet

SIDES = (Role.PREFILL, Role.DECODE)


class Candidate(NamedTuple):
    """A fleet, and the highest rate at which it keeps the promise in every window."""

    name: str
    mix: Mix
    fleet: Fleet
    per_s: float
    copies: int = 1  # of this fleet, each with its part of the requests
    chunk_tokens: int = 0

    @property
    def unit_per_s(self) -> float:
        """The rate of one copy."""
        return self.per_s / self.copies


def best_of(
    mixes: Iterable[Mix], judge: Judge, inventory: Inventory, best: Candidate | None = None
) -> Candidate | None:
    """The best of these mixes in every placement, or `best` if none is 2 % better."""
    for mix in mixes:
        for together in (False, True) if inventory.binds else (False,):
            fleet = placed(mix, inventory, together=together)
            if fleet is None or (together and fleet == placed(mix, inventory)):
                continue
            per_s = judge.goodput(fleet, best.per_s if best else 0.0)
            if per_s > 0:
                name = name_of(mix) + (", on each node" if together else "")
                best = Candidate(name, mix, fleet, per_s)
    return best


def search(judge: Judge, bounds: Bounds) -> Candidate | None:
    """The best fleet of prefill and decode engines; None if none keeps the promise."""
    inventory, mixes = bounds.inventory, front(bounds)
    tried = set(mixes)
    best = best_of(mixes, judge, inventory)
    while best is not None:
        near = set(neighbours(best.mix, inventory)) - tried
        tried |= near
        better = best_of(bounds.best_first(near), judge, inventory, best)
        if better is best:
            break
        best = better
    return best


def neighbours(mix: Mix, inventory: Inventory) -> Iterator[Mix]:
    """Mixes that are one swap away, and fit."""
    for change in _swaps(mix, inventory):
        counts = counts_of(mix)
        for engine, n in change.items():
            counts[engine] += n
        if min(counts.values()) >= 0 and fits(new := mix_of(counts), inventory):
            yield new


def _swaps(mix: Mix, inventory: Inventory) -> Iterator[dict[tuple[str, Role], int]]:
    for kind, role, _ in mix:
        other = SIDES[role is Role.PREFILL]
        yield {(kind, role): -1, (kind, other): 1}
        device, gpus = device_of(kind), inventory.kinds[kind].gpus
        for second, profile in inventory.of(device).items():
            for its in SIDES:
                if profile.gpus == 2 * gpus:
                    yield {(kind, role): -2, (second, its): 1}
                    # Two engines of unlike roles, joined
                    yield {(kind, role): -1, (kind, other): -1, (second, its): 1}
                if 2 * profile.gpus == gpus:
                    yield {(kind, role): -1, (second, its): 2}
                    yield {
                        (kind, role): -1,
                        (second, its): 1,
                        (second, SIDES[its is Role.PREFILL]): 1,
                    }
        for second, its, _ in mix:
            if its is other and device_of(second) != device:
                yield {(kind, role): -1, (kind, other): 1, (second, other): -1, (second, role): 1}
