# SPDX-License-Identifier: Apache-2.0
"""DistServe (OSDI '24), algorithms 1 and 2: one tensor parallelism for each side.

Devices count as alike: prefill takes GPUs in the order of the nodes. High affinity to the network: the sides are sized for
the whole. Low affinity: a pair of sides is sized within one node, and copied to each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from scheduler_plugins.planner.bound import Bounds
from scheduler_plugins.planner.goodput import Judge
from scheduler_plugins.planner.inventory import TPS, Inventory
from scheduler_plugins.planner.mix import Mix, fits, mix_of
from scheduler_plugins.planner.search import Candidate, best_of
from scheduler_plugins.router.policies.base import Role


def high(judge: Judge, bounds: Bounds) -> Candidate | None:
    """The best fleet with one tensor parallelism a side, over all nodes."""
    mixes = bounds.best_first(_mixes(bounds.inventory))
    return best_of(mixes, judge, bounds.inventory)


def low(judge: Judge, bounds: Bounds) -> Candidate | None:
    """The best pair of sides within a node, copied to each; None if nodes are unlike or there is one."""
    nodes = bounds.inventory.nodes
    if len(nodes) < 2 or len({(node.device, node.gpus) for node in nodes}) > 1:
        return None
    unit = replace(bounds.inventory, nodes=nodes[:1])
    mixes = bounds.best_first(_mixes(unit))
    best = best_of(mixes, judge, unit)
    if best is None:
        return None
    many = len(nodes)
    mix = mix_of(Counter({(kind, role): n * many for kind, role, n in best.mix}))
    return best._replace(
        name=f"{many} x ({best.name})", mix=mix, per_s=best.per_s * many, copies=many
    )


def _mixes(inventory: Inventory) -> Iterator[Mix]:
    """Every division of the GPUs, for every pair of tensor parallelisms."""
    for tp_p, tp_d in product(TPS, TPS):
        slots = [
            node.device for node in inventory.nodes for _ in range(node.gpus // max(tp_p, tp_d))
        ]
        for prefill in range(1, len(slots)):
            counts = Counter[tuple[str, Role]]()
            for n, device in enumerate(slots):
                role, tp = (Role.PREFILL, tp_p) if n < prefill else (Role.DECODE, tp_d)
                counts[f"{device}-tp{tp}", role] += max(tp_p, tp_d) // tp
            mix = mix_of(counts)
            # `best_of` leaves out mixes that have no place on the nodes.
            if all(kind in inventory.kinds for kind, _ in counts) and fits(mix, inventory):
                yield mix
