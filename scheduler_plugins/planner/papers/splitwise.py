# SPDX-License-Identifier: Apache-2.0
"""Splitwise (ISCA '24): one class of machine for each phase, within the GPUs and a budget of price or power."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from scheduler_plugins.planner.bound import Bounds
from scheduler_plugins.planner.goodput import Judge
from scheduler_plugins.planner.inventory import Inventory, device_of
from scheduler_plugins.planner.mix import Mix, fits, mix_of
from scheduler_plugins.planner.search import Candidate, best_of
from scheduler_plugins.router.policies.base import Role


def splitwise(judge: Judge, bounds: Bounds) -> Candidate | None:
    """The best fleet with one kind of engine a phase."""
    mixes = bounds.best_first(_mixes(bounds.inventory))
    return best_of(mixes, judge, bounds.inventory)


def _mixes(inventory: Inventory) -> Iterator[Mix]:
    """For every pair of kinds: as many engines as GPUs and budget allow, in every division."""
    for prefill, decode in product(inventory.kinds, inventory.kinds):
        for p in range(1, inventory.gpus(device_of(prefill)) // inventory.kinds[prefill].gpus + 1):
            d = _most(inventory, prefill, p, decode)
            mix = mix_of({(prefill, Role.PREFILL): p, (decode, Role.DECODE): d})
            if d > 0 and fits(mix, inventory):
                yield mix


def _most(inventory: Inventory, prefill: str, p: int, decode: str) -> int:
    """The most decode engines beside `p` prefill engines."""
    left = inventory.gpus(device_of(decode))
    if device_of(prefill) == device_of(decode):
        left -= p * inventory.kinds[prefill].gpus
    number = left // inventory.kinds[decode].gpus
    if cost := inventory.cost(decode):
        room = inventory.most_cost - p * inventory.cost(prefill)
        number = int(min(number, max(0.0, room) // cost))
    return number
