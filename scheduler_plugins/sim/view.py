# SPDX-License-Identifier: Apache-2.0
"""What a simulated cluster shows a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_plugins.router.policies.base import BlockHash, EngineView, Role
from scheduler_plugins.sim.links import Links
from scheduler_plugins.sim.node import Node


class ClusterView:
    """`View` of a cluster: the counts that a live router would have, and caches as late as their events come."""

    def __init__(self, nodes: dict[str, Node], links: Links) -> None:
        self._nodes = nodes
        self._links = links
        self.now_s = 0.0
        """Set before each decision: what is cached depends on it."""
        self._by_role: dict[Role, Sequence[Node]] = {}
        self.update()

    def update(self) -> None:
        """Engines came, went, or changed their role."""
        able = [one for one in self._nodes.values() if one.up and not one.draining]

        def having(*roles: Role) -> list[Node]:
            return [one for one in able if one.role in roles]

        prefill, decode = having(Role.PREFILL, Role.BOTH), having(Role.DECODE, Role.BOTH)
        if not decode:
            # As the live router does: whoever is there serves alone.
            prefill, decode = [], prefill
        self._by_role = {
            Role.PREFILL: prefill,
            Role.DECODE: decode,
            Role.CPU_PREFILL: having(Role.CPU_PREFILL),
        }

    def engines(self, role: Role) -> Sequence[Node]:
        return self._by_role[role]

    def match(self, hashes: Sequence[BlockHash], engines: Iterable[EngineView]) -> list[int]:
        nodes, now_s = self._nodes, self.now_s
        return [nodes[one.name].cache.seen(hashes, now_s) for one in engines]

    def transfer_s(self, source: EngineView, target: EngineView, tokens: int) -> float:
        return self._links.estimate_s(source.name, target.name, tokens)
