# SPDX-License-Identifier: Apache-2.0
"""Pages with KV of weights other than the present weights: of earlier weights, or of a producer with other weights.

vLLM keeps its prefix cache when weights change in place, unless it is told to reset the cache. So all pages are
evicted from it. Requests that have pages during the change have KV of both weights, or loaded KV of the earlier
weights. vLLM caches their pages later, so each of them is evicted as soon as vLLM has cached it, before vLLM looks at
another request.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.pages.status import PageRule, Use

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class StalePages(PageRule):
    """Keeps other requests from using KV of requests that had pages when weights changed, or when a producer was
    distrusted.

    Attributes:
        changes: how often each rank's weights have changed, as far as reported.
    """

    cause = "stale"
    forbids = tuple(Use)

    def __init__(self) -> None:
        self.changes: dict[int, int] = {}
        self._evict: Callable[[set[int]], None] = lambda _: None
        self._pages = 0
        self._distrusted: dict[int, float] = {}  # by rank
        self._admitted: set[str] = set()  # requests that may have pages
        self._mixed: set[str] = set()  # those that had pages when weights changed

    def bind(self, manager: "KVCacheManager") -> None:
        """Watch what vLLM puts into its prefix cache."""
        pool, coordinator = manager.block_pool, manager.coordinator
        self._evict, self._pages = pool.evict_blocks, pool.num_gpu_blocks
        cache = coordinator.cache_blocks

        def cache_blocks(request: "Request", *args: Any, **options: Any) -> None:
            cache(request, *args, **options)
            if request.request_id in self._mixed:
                tables = manager.get_block_ids(request.request_id)
                self._evict({page for table in tables for page in table})

        coordinator.cache_blocks = cache_blocks

    def changed(self, changes: Mapping[int, int]) -> bool:
        """Record how often each rank's weights have changed. Returns whether a number is new."""
        if not changes or self.changes | dict(changes) == self.changes:
            return False
        self.changes |= changes
        self._evict_all()
        return True

    def distrusted(self, gauges: Mapping[int, Mapping[str, float]]) -> None:
        """Record how many producers each rank distrusts. KV that such a producer sent earlier may be wrong, too."""
        for rank, values in gauges.items():
            producers = values.get("distrusted_producers", 0.0)
            if producers > self._distrusted.get(rank, 0.0):
                self._evict_all()
            self._distrusted[rank] = producers

    def _evict_all(self) -> None:
        self._evict(set(range(self._pages)))
        self._mixed |= self._admitted

    def admitted(self, request: "Request", blocks: "KVCacheBlocks", own_tokens: int) -> None:
        self._admitted.add(request.request_id)

    def finished(self, request: "Request") -> None:
        self._admitted.discard(request.request_id)
        self._mixed.discard(request.request_id)

    def holds(self, request: "Request") -> bool:
        return request.request_id in self._mixed
