# SPDX-License-Identifier: Apache-2.0
"""The content of vLLM's prefix cache, as a container of hashes, and its changes.

Hybrid models have several KV cache groups. Only one group is watched: the first group with full attention, otherwise
the first group that can be cached. Its leading run of cached blocks is at least as long as vLLM's hit, because vLLM
counts the blocks that all groups have. With one group of full attention both are equal, except that vLLM drops the last
block of a hit for EAGLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.kv_cache_interface import FullAttentionSpec

from scheduler_plugins.order.request import BlockHash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.request import Request


class Listener(Protocol):
    """The receiver of changes from `CacheView.tell`: `WaitingQueue`."""

    def added(self, blocks: Iterable[BlockHash]) -> None: ...

    def removed(self) -> None: ...


class WatchedMap(BlockHashToBlockMap):
    """vLLM's map from hash to block. It also notes new hashes, and whether any hash was lost.

    vLLM adds and evicts only through `insert` and `pop`, so no change is missed. If a hash is cached twice and evicted
    once, it is not lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gained: list[BlockHashWithGroupId] = []
        self.lost = False
        self.stored = 0  # number of keys added since the start
        self.on_evicted: Callable[[BlockHashWithGroupId, int], None] = _ignore

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        if key not in self._cache:
            self.gained.append(key)
            self.stored += 1
        super().insert(key, block)

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        block = super().pop(key, block_id)
        if block is not None and key not in self._cache:
            self.lost = True
            self.on_evicted(key, block_id)
        return block

    def adopt(self, other: BlockHashToBlockMap) -> None:
        """Take over the content of another map."""
        self._cache = other._cache
        self.gained, self.lost = list(self._cache), True

    def __contains__(self, key: object) -> bool:
        return key in self._cache


class CacheView:
    """The hashes that a request would find if it started now. `in` costs two dictionary look-ups."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Watch a manager's pool from now on. The pool must be empty."""
        managers = manager.coordinator.single_type_managers
        cacheable = [
            single_manager
            for single_manager in managers
            if single_manager.kv_cache_spec.prefix_cacheable
        ]
        whole = [
            single_manager
            for single_manager in cacheable
            if isinstance(single_manager.kv_cache_spec, FullAttentionSpec)
        ]
        counted = next(iter(whole or cacheable), None)
        self.enabled = manager.enable_caching and counted is not None
        self.page_size = counted.block_size if counted else manager.block_pool.hash_block_size
        self.group = counted.kv_cache_group_id if counted else 0
        self._held: Mapping[str, Sequence[KVCacheBlock]] = counted.req_to_blocks if counted else {}
        self.pool: BlockPool = counted.block_pool if counted else manager.block_pool
        self._scale = self.page_size // self.pool.hash_block_size
        self._suffix = self.group.to_bytes(4, "big")
        self._map = WatchedMap()
        self._adopt()

    def __contains__(self, block: object) -> bool:
        return block + self._suffix in self._map  # type: ignore[operator]

    @property
    def stored_blocks(self) -> int:
        """Number of blocks stored since the start. It is a clock that runs as fast as the cache fills."""
        return self._map.stored

    def watch_evictions(self, on_evicted: Callable[[BlockHashWithGroupId, int], None]) -> None:
        """Call `on_evicted` with the key and the number of each evicted block."""
        self._map.on_evicted = on_evicted

    def keys_from(self, request: Request, first: int) -> Iterator[BlockHashWithGroupId]:
        """The keys under which vLLM stores the request's full blocks, from number `first` on."""
        scale, suffix = self._scale, self._suffix
        for n in range((first + 1) * scale - 1, len(request.block_hashes), scale):
            yield request.block_hashes[n] + suffix

    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """The hashes under which vLLM would look for the request's blocks; none if vLLM would not look."""
        if not self.enabled or request.skip_reading_prefix_cache:
            return ()
        return self.stored(request)

    def stored(self, request: Request) -> Sequence[BlockHash]:
        """The hashes under which the request's full blocks are stored.

        The result is a copy, because vLLM changes its list while the request runs.
        """
        return tuple(request.block_hashes[self._scale - 1 :: self._scale])

    def blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The blocks that a request holds in the watched group, in the order of its prompt."""
        return self._held.get(request_id, ())

    def block_hash(self, block: KVCacheBlock) -> BlockHash:
        """The hash of a cached block of the watched group, as `hashes` gives it."""
        return bytes(block.block_hash[: -len(self._suffix)])

    def tell(self, listener: Listener) -> None:
        """Report all changes since the last call. Costs two comparisons if there are none."""
        if self.pool.cached_block_hash_to_block is not self._map:
            self._adopt()
        watched = self._map
        if watched.lost:
            watched.lost = False
            listener.removed()
        if watched.gained:
            gained, watched.gained = watched.gained, []
            suffix = self._suffix
            listener.added([key[:-4] for key in gained if key.endswith(suffix) and key in watched])

    def _adopt(self) -> None:
        """Replace vLLM's map by our map. A reset of the cache makes a new map of vLLM's."""
        watched = WatchedMap()
        watched.stored, watched.on_evicted = self._map.stored, self._map.on_evicted
        watched.adopt(self.pool.cached_block_hash_to_block)
        self._map = self.pool.cached_block_hash_to_block = watched


def _ignore(key: BlockHashWithGroupId, block_id: int) -> None:
    pass
