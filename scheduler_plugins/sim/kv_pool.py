# SPDX-License-Identifier: Apache-2.0
"""KV pools of a simulated cluster: one that all engines share, or one for each host, with a far store behind them. Engines put
their computed KV into those that they reach, and get other engines' KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from scheduler_plugins.order.request import BlockHash
from scheduler_plugins.sim.cache import LruBlocks


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Properties of a pool."""

    blocks: int = 0
    """Capacity in blocks; 0: there is no pool."""
    bytes_per_s: float = 5e9
    """Bandwidth of all puts together, and of all gets together. The engines' links also limit each of them."""
    latency_s: float = 2e-3
    """Seconds that a put or a get takes in addition to the link's own latency."""

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the setting, the value found and the value wanted."""
        if self.blocks < 0:
            raise ValueError(f"pool_blocks {self.blocks}: must be 0 (no pool) or more")
        if not 0 < self.bytes_per_s < inf:
            raise ValueError(f"pool_bytes_per_s {self.bytes_per_s}: must be above 0, and a number")
        if not 0 <= self.latency_s < inf:
            raise ValueError(f"pool_latency_s {self.latency_s}: must be a number from 0 on")


class KvPool:
    """The pool's blocks, the least recently used one evicted first. Policies see it as a `PrefixSource`."""

    def __init__(
        self, settings: PoolSettings, block_tokens: int, name: str = "pool", host: str = ""
    ) -> None:
        """An empty pool.

        Args:
            host: whose engines alone reach it; empty: all engines do.
        """
        self.name, self.host = name, host
        self.settings = settings
        self.block_tokens = block_tokens
        self._cache = LruBlocks(settings.blocks)
        self.coming: dict[BlockHash, str] = {}
        """Blocks on their way, and the engines that send them."""

    @property
    def blocks(self) -> int:
        """The number of blocks in the pool."""
        return len(self._cache.hashes)

    def seen(self, hashes: Sequence[BlockHash], now_s: float) -> int:
        """The number of leading blocks in the pool."""
        return self._cache.seen(hashes, now_s)

    def missing(self, hashes: Sequence[BlockHash], engine: str) -> Sequence[BlockHash]:
        """The blocks of a prompt that an engine should put, because they are neither here nor on their way. They count
        as on their way from now on."""
        held, room = self._cache.hashes, hashes[: self.settings.blocks]
        fresh = [block for block in room if block not in held and block not in self.coming]
        self.coming.update(dict.fromkeys(fresh, engine))
        return fresh

    def put(self, hashes: Sequence[BlockHash], fresh: Sequence[BlockHash], now_s: float) -> None:
        """Add the `fresh` blocks of a prompt that have come."""
        for block in fresh:
            self.coming.pop(block, None)
        held, new = self._cache.hashes, set(fresh)
        self._cache.arrived([block for block in hashes if block in held or block in new], now_s)

    def got(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Note that an engine has got these blocks from the pool, so they are recently used."""
        held = self._cache.prefix(hashes, len(hashes))
        self._cache.arrived(hashes[:held], now_s)

    def lose_all(self) -> None:
        """Its memory is gone."""
        self._cache = LruBlocks(self.settings.blocks)
        self.coming = {}

    def drop(self, engine: str) -> None:
        """Forget the blocks that an engine was sending when it died."""
        self.coming = {block: name for block, name in self.coming.items() if name != engine}


FAR = "far"
"""Name of the far store."""


class Pools:
    """The pools of a cluster."""

    def __init__(self, pools: Sequence[KvPool] = ()) -> None:
        self.all = tuple(pools)

    def of(self, host: str) -> list[KvPool]:
        """Those that engines of a host reach, its own first."""
        return [pool for pool in self.all if pool.host in ("", host)]

    def named(self, name: str | None) -> KvPool | None:
        """The pool of this name."""
        return next((pool for pool in self.all if pool.name == name), None)

    def brought(self, host: str, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Blocks came from the far store: they pass through the memory of the host."""
        for pool in self.of(host):
            if pool.host:
                pool.put(hashes, hashes[: pool.settings.blocks], now_s)
