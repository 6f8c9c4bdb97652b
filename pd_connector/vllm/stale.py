# SPDX-License-Identifier: Apache-2.0
"""Pages that hold KV of other weights than the present weights: of earlier weights, or of a producer with others.

vLLM keeps its prefix cache when weights change in place, unless it is told to reset the cache. So all pages are
evicted from it. Requests that run during the change have KV of both weights. vLLM continues to cache their pages, so
those are evicted as well.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput


class StalePages:
    """Called by vLLM's scheduler only.

    Attributes:
        changes: how often each rank's weights have changed, as far as reported.
    """

    def __init__(self) -> None:
        self.changes: dict[int, int] = {}
        self._evict: Callable[[set[int]], None] = lambda _: None
        self._pages = 0
        self._distrusted: dict[int, float] = {}  # by rank
        self._running: set[str] = set()
        self._mixed: dict[str, set[int]] = {}  # pages of requests that ran when weights changed

    def bind(self, pool: "BlockPool") -> None:
        """Attach vLLM's prefix cache."""
        self._evict, self._pages = pool.evict_blocks, pool.num_gpu_blocks

    def changed(self, changes: Mapping[int, int]) -> bool:
        """Record how often each rank's weights have changed. Returns whether a number is new."""
        if not changes or self.changes | dict(changes) == self.changes:
            return False
        self.changes |= changes
        self._evict_all()
        return True

    def distrusted(self, gauges: Mapping[int, Mapping[str, float]]) -> None:
        """Record how many producers each rank distrusts. KV that such a producer sent earlier is as wrong."""
        for rank, told in gauges.items():
            producers = told.get("distrusted_producers", 0.0)
            if producers > self._distrusted.get(rank, 0.0):
                self._evict_all()
            self._distrusted[rank] = producers

    def _evict_all(self) -> None:
        self._evict(set(range(self._pages)))
        self._mixed = {request: self._mixed.get(request, set()) for request in self._running}

    def step(self, output: "SchedulerOutput") -> None:
        """A step was scheduled: vLLM has cached pages that the step will fill."""
        self._running.update(new.req_id for new in output.scheduled_new_reqs)
        if not self._mixed:
            return
        cached = output.scheduled_cached_reqs
        for request, tables in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request in self._mixed:
                self._mixed[request].update(page for table in tables or () for page in table)
        for pages in self._mixed.values():
            self._evict(pages)

    def finished(self, request: str, tables: tuple[list[int], ...]) -> None:
        """A request has ended, with these pages."""
        self._running.discard(request)
        if self._mixed.pop(request, None) is not None:
            self._evict({page for table in tables for page in table})
