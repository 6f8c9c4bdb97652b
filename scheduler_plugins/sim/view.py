# SPDX-License-Identifier: Apache-2.0
"""What a simulated cluster shows a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_plugins.router.policies.base import BlockHash, EngineView, Role
from scheduler_plugins.sim.links import Links
from scheduler_plugins.sim.node import Node


class ClusterView:
    """`View` of a cluster: the counts that a live router would have, and caches as late as their
    events come."""

    def __init__(self, nodes: dict[str, Node], links: Links) -> None:
        self._nodes = nodes
        self._links = links
        self._now_s = 0.0
        self._by_role: dict[Role, Sequence[Node]] = {}
        self._matched: dict[str, int] = {}
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

    def begin(self, now_s: float) -> None:
        """A decision is made at `now_s`: what is cached depends on it."""
        self._now_s = now_s
        self._matched = {}

    def match(self, hashes: Sequence[BlockHash], engines: Iterable[EngineView]) -> list[int]:
        """As `View.match`. Within a decision all calls are for the same prompt."""
        matched, nodes, now_s, found = self._matched, self._nodes, self._now_s, []
        for one in engines:
            name = one.name
            count = matched.get(name)
            if count is None:
                count = matched[name] = nodes[name].cache.seen(hashes, now_s)
            found.append(count)
        return found

    def transfer_s(self, source: EngineView, target: EngineView, tokens: int) -> float:
        return self._links.estimate_s(source.name, target.name, tokens)
