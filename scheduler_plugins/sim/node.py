# SPDX-License-Identifier: Apache-2.0
"""An engine of a simulated cluster, and the cluster, as policies see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import create
from scheduler_plugins.qos.classes import ONLY, QosClass
from scheduler_plugins.queue.prefix_index import FixedCosts
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.router.engines.counted_load import EngineLoad, Loaded
from scheduler_plugins.router.policies.base import BlockHash, EngineView, PrefixSource, Role
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.engine import SimulatedEngine
from scheduler_plugins.sim.kv_pool import KvPool, Pools
from scheduler_plugins.sim.links import NOWHERE, Links, Place


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of a cluster's engines."""

    truth: CostModel
    """Durations of steps. `chunk_tokens` 0: whole prompts (level 1)."""
    cache_blocks: int = 8000
    block_tokens: int = 512
    kv_tokens: float = inf
    """Room for the KV of sequences that decode."""
    order: str = "srjf_calibrated"
    """Policy of the engine's queue."""
    classes: tuple[QosClass, ...] = ONLY
    lag_s: float = 0.0
    """Delay until the router knows of cached blocks."""
    pull_prefix: bool = False
    """Whether an engine fetches cached prefixes from others."""
    place: Place = NOWHERE
    host: str = ""
    """Whose pool it uses; empty: it has no host of its own."""


class Node(Loaded):
    """An engine, its cache, and the router's knowledge of it."""

    def __init__(self, name: str, role: Role, settings: NodeSettings) -> None:
        self.name = name
        self.role = role
        self.place = settings.place
        self.host = settings.host
        self.settings = settings
        self.up = True
        self.draining = False
        self.costs = settings.truth
        self.block_tokens = settings.block_tokens
        self.pull_prefix = settings.pull_prefix
        self.cache = LruBlocks(settings.cache_blocks, lag_s=settings.lag_s)
        queue = WaitingQueue(
            create(settings.order),
            self.cache.hashes,
            page_size=settings.block_tokens,
            costs=FixedCosts(settings.truth),
            classes=settings.classes,
        )
        self.engine = SimulatedEngine(
            queue,
            self.cache,
            settings.truth,
            page_size=settings.block_tokens,
            decode_apart=False,
            kv_tokens=settings.kv_tokens,
        )
        self.load = load = EngineLoad()
        self.queued_s = load.queued_s
        self.accepts = load.accepts
        self.due: tuple[float, int] | None = None
        """Time of its next event, as the heap knows it."""
        self.ticket = 0
        """Number of its valid event. Events with other numbers are outdated."""

    @property
    def free_kv(self) -> float:
        return self.engine.free_kv

    @property
    def prefilling_s(self) -> float:
        """Time that it spent in steps with prompts."""
        return self.engine.busy_s

    @property
    def decoding_s(self) -> float:
        """Time that it spent in steps that only decode."""
        return self.engine.decode.busy_s

    @property
    def busy_s(self) -> float:
        """Time that it spent computing."""
        return self.prefilling_s + self.decoding_s


class ClusterView:
    """`View` of a cluster: the counts that a live router would have, and caches with the delay of their events."""

    def __init__(self, nodes: dict[str, Node], links: Links, pools: Pools | None = None) -> None:
        self._nodes = nodes
        self._pools = () if pools is None else pools.all
        self._links = links
        self._now_s = 0.0
        self._by_role: dict[Role, Sequence[Node]] = {}
        self._matched: dict[str, int] = {}
        self.update()

    def update(self) -> None:
        """Called after engines came, went, or changed their role."""
        able = [node for node in self._nodes.values() if node.up and not node.draining]

        def having(*roles: Role) -> list[Node]:
            return [node for node in able if node.role in roles]

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
        matched, nodes, now_s, counts = self._matched, self._nodes, self._now_s, []
        for source in engines:
            name = source.name
            count = matched.get(name)
            if count is None:
                cache = source if isinstance(source, KvPool) else nodes[name].cache
                count = matched[name] = cache.seen(hashes, now_s)
            counts.append(count)
        return counts

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        own_s = 0.0
        if isinstance(source, KvPool):
            if source.host not in ("", self._nodes[target.name].host):
                return inf
            own_s = source.settings.latency_s
        return own_s + self._links.estimate_s(source.name, target.name, tokens)
