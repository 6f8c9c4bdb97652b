# SPDX-License-Identifier: Apache-2.0
"""The view of a simulated cluster for a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_plugins.router.policies.base import BlockHash, EngineView, PrefixSource, Role
from scheduler_plugins.sim.kv_pool import KvPool
from scheduler_plugins.sim.links import Links
from scheduler_plugins.sim.node import Node


class ClusterView:
    """`View` of a cluster: the counts that a live router would have, and caches with the delay of their events."""

    def __init__(self, nodes: dict[str, Node], links: Links, pool: KvPool | None = None) -> None:
        self._nodes = nodes
        self._pools = () if pool is None else (pool,)
        self._links = links
        self._now_s = 0.0
        self._by_role: dict[Role, Sequence[Node]] = {}
        self._matched: dict[str, int] = {}
        self.update()

    def update(self) -> None:
        """Called after engines came, went, or changed their role."""
        able = [one for one in self._nodes.values() if one.up and not one.draining]

        def having(*roles: Role) -> list[Node]:
            return [one for one in able if one.role in roles]

        prefill = having(Role.PREFILL, Role.BOTH, Role.WHOLE)
        decode = having(Role.DECODE, Role.BOTH, Role.WHOLE)
        if not decode:
            # As in the live router: without decode engines, the others serve alone.
            prefill, decode = [], prefill
        self._by_role = {
            Role.PREFILL: prefill,
            Role.DECODE: decode,
            Role.CPU_PREFILL: having(Role.CPU_PREFILL),
        }

    def engines(self, role: Role) -> Sequence[Node]:
        return self._by_role[role]

    def begin(self, now_s: float) -> None:
        """Set the time of the next decision, on which cached blocks depend."""
        self._now_s = now_s
        self._matched = {}

    def pools(self) -> Sequence[KvPool]:
        return self._pools

    def match(self, hashes: Sequence[BlockHash], engines: Iterable[PrefixSource]) -> list[int]:
        """See `View.match`. Within a decision all calls are for the same prompt."""
        matched, nodes, now_s, found = self._matched, self._nodes, self._now_s, []
        for one in engines:
            name = one.name
            count = matched.get(name)
            if count is None:
                cache = one if isinstance(one, KvPool) else nodes[name].cache
                count = matched[name] = cache.seen(hashes, now_s)
            found.append(count)
        return found

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        own_s = source.settings.latency_s if isinstance(source, KvPool) else 0.0
        return own_s + self._links.estimate_s(source.name, target.name, tokens)
