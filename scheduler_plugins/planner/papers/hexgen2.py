# SPDX-License-Identifier: Apache-2.0
"""HexGen-2 (ICLR '25): groups, then roles by the flow between them, then swaps that raise the flow.

The flow is that of closed forms. While groups stay within a node it is min(prefill, decode), unless links between nodes
bind. One fleet comes out, which is played.
"""

from __future__ import annotations

from collections import Counter

from scheduler_plugins.planner.bound import Bounds
from scheduler_plugins.planner.goodput import Judge
from scheduler_plugins.planner.inventory import Inventory
from scheduler_plugins.planner.mix import Mix, fits, mix_of
from scheduler_plugins.planner.search import Candidate, best_of, neighbours
from scheduler_plugins.router.policies.base import Role


def hexgen2(judge: Judge, bounds: Bounds) -> Candidate | None:
    """The fleet that the three phases lead to."""
    inventory = bounds.inventory
    mix = _roles(_groups(inventory), bounds)
    if not fits(mix, inventory):
        return None
    while better := max(neighbours(mix, inventory), key=bounds.of, default=None):
        if bounds.of(better) <= bounds.of(mix) * (1 + 1e-9):
            break
        mix = better
    return best_of([mix], judge, inventory)


def _groups(inventory: Inventory) -> list[str]:
    """Phase 1: on each device the smallest groups that hold the model, as far as the budget goes."""
    groups, cost = list[str](), 0.0
    for device in inventory.devices:
        kinds = inventory.of(device)
        if not kinds:
            continue
        smallest = min(kinds, key=lambda kind: kinds[kind].gpus)
        for node in inventory.nodes:
            for _ in range(node.gpus // kinds[smallest].gpus if node.device == device else 0):
                cost += inventory.cost(smallest)
                if cost <= inventory.most_cost:
                    groups.append(smallest)
    return groups


def _roles(groups: list[str], bounds: Bounds) -> Mix:
    """Phase 2: each group, those that prefill relatively best first, gets the role that raises the flow more."""
    rates = bounds.rates
    order = sorted(groups, key=lambda kind: rates[kind].decode / rates[kind].prefill)
    best: Mix = ()
    for prefill in range(1, len(order)):
        counts = Counter[tuple[str, Role]]()
        for n, kind in enumerate(order):
            counts[kind, Role.PREFILL if n < prefill else Role.DECODE] += 1
        mix = mix_of(counts)
        if not best or bounds.of(mix) > bounds.of(best):
            best = mix
    return best
