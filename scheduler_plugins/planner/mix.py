# SPDX-License-Identifier: Apache-2.0
"""How many engines of each kind do what, and where they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.planner.inventory import Inventory, device_of
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.fleet import Fleet, Part
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import CHUNK_TOKENS
from scheduler_plugins.sim.trace import PAGE_SIZE

Mix = tuple[tuple[str, Role, int], ...]
"""Kind of engine, role and number, in order. Equal mixes are equal tuples."""
_LETTERS = {Role.PREFILL: "P", Role.DECODE: "D", Role.WHOLE: "W"}


def mix_of(counts: Mapping[tuple[str, Role], int]) -> Mix:
    """The mix with these numbers."""
    return tuple(sorted((kind, role, n) for (kind, role), n in counts.items() if n))


def counts_of(mix: Mix) -> Counter[tuple[str, Role]]:
    """The numbers of a mix."""
    return Counter({(kind, role): n for kind, role, n in mix})


def gpus_of(mix: Mix, inventory: Inventory) -> int:
    """GPUs that it uses."""
    return sum(inventory.kinds[kind].gpus * n for kind, _, n in mix)


def cost_of(mix: Mix, inventory: Inventory) -> float:
    """What it takes of the budget."""
    return sum(inventory.cost(kind) * n for kind, _, n in mix)


def name_of(mix: Mix) -> str:
    """Such as `5P H100-tp1 + 3D H100-tp1`."""
    order = sorted(mix, key=lambda count: ("prefill", "decode", "whole").index(count[1]))
    return " + ".join(f"{n}{_LETTERS[role]} {kind}" for kind, role, n in order)


def fits(mix: Mix, inventory: Inventory) -> bool:
    """Whether GPUs and budget are enough, and requests can be answered."""
    used = Counter[str]()
    for kind, _, n in mix:
        used[device_of(kind)] += inventory.kinds[kind].gpus * n
    roles = {role for _, role, _ in mix}
    return (
        all(used[device] <= inventory.gpus(device) for device in used)
        and cost_of(mix, inventory) <= inventory.most_cost
        and (roles == {Role.WHOLE} or roles == {Role.PREFILL, Role.DECODE})
    )


def placed(
    mix: Mix,
    inventory: Inventory,
    *,
    together: bool = False,
    chunk_tokens: int = 0,
    cached: float = 0.0,
) -> Fleet | None:
    """The mix on the nodes; None if an engine does not fit into one node.

    Args:
        together: prefill and decode engines on each node (low affinity to the network), not on nodes of their own.
        chunk_tokens: most prompt tokens of a step; 0: as the profile says.
        cached: part of the room for KV that the prefix cache of an engine of role `WHOLE` has. Its sequences have the
            rest.
    """
    free = {node.place.node: node.gpus for node in inventory.nodes}
    on = Counter[tuple[str, Role]]()
    numbers = Counter[tuple[str, Role, str]]()
    engines = [(kind, role) for kind, role, n in mix for _ in range(n)]
    engines.sort(
        key=lambda engine: (-inventory.kinds[engine[0]].gpus, engine[1] is Role.DECODE, engine[0])
    )
    for kind, role in engines:
        gpus, device = inventory.kinds[kind].gpus, device_of(kind)
        able = [
            plan_node.place.node
            for plan_node in inventory.nodes
            if plan_node.device == device and free[plan_node.place.node] >= gpus
        ]
        if not able:
            return None
        if together:
            node = min(able, key=lambda name: (on[name, role], -free[name]))
        else:
            node = able[-1] if role is Role.DECODE else able[0]
        free[node] -= gpus
        on[node, role] += 1
        numbers[kind, role, node] += 1
    places = {node.place.node: node.place for node in inventory.nodes}
    parts = tuple(
        Part(
            role=Role.DECODE if role is Role.WHOLE else role,  # alone: see `ClusterView.update`
            profile=_profile(kind, role, inventory, chunk_tokens, cached),
            number=number,
            place=places[node],
        )
        for (kind, role, node), number in sorted(numbers.items())
    )
    return Fleet(parts=parts, network=_network(inventory))


def _profile(
    kind: str, role: Role, inventory: Inventory, chunk_tokens: int, cached: float
) -> EngineProfile:
    profile, whole = inventory.kinds[kind], role is Role.WHOLE
    costs = replace(
        profile.costs, chunk_tokens=chunk_tokens or profile.costs.chunk_tokens or CHUNK_TOKENS
    )
    return msgspec.structs.replace(
        profile,
        costs=costs,
        kv_tokens=profile.kv_tokens * (1 - cached) if whole else profile.kv_tokens,
        cache_blocks=max(1, int(profile.kv_tokens * (cached if whole else 1) / PAGE_SIZE)),
    )


def _network(inventory: Inventory) -> Network:
    profile = next(iter(inventory.kinds.values()))
    return Network(
        bytes_per_s=max(inventory.engine_bytes_per_s, inventory.other_bytes_per_s),
        node_bytes_per_s=inventory.node_bytes_per_s,
        rack_bytes_per_s=inventory.engine_bytes_per_s,
        other_bytes_per_s=inventory.other_bytes_per_s,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        layers=profile.layers or Network.layers,
    )
