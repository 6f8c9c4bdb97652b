# SPDX-License-Identifier: Apache-2.0
"""A rank's loads from the pool, and which of their pages vLLM has to compute because a load broke off."""

from typing import TYPE_CHECKING

from pd_connector.pool.jobs import Fill
from pd_connector.protocol.consuming.incoming import Finished
from pd_connector.vllm.messages import Cut
from pd_connector.vllm.pages.windows import Windows

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PoolFills:
    """Called only by vLLM's model runner."""

    def __init__(self, cache: "KVCacheConfig") -> None:
        self._windows = Windows.of(group.kv_cache_spec for group in cache.kv_cache_groups)
        self._fills: dict[str, Fill] = {}
        self._cuts: dict[str, Cut] = {}
        self._invalid_pages: set[int] = set()

    def begin(self, fill: Fill) -> None:
        """A load was given to the agent."""
        self._fills[fill.request] = fill

    def ended(self, outcome: Finished) -> bool:
        """Note the end of a load, of the pool or a handoff. Returns whether vLLM can keep the load's first pages.

        vLLM accepts ids of invalid pages only for caches with one page table. With a sliding window, a load fills only
        the pages of its last window, so a request cannot go on from an earlier token.
        """
        fill = self._fills.pop(outcome.request, None)
        if fill is None or outcome.cause is None:
            return False
        stop = max(outcome.stop_token, fill.first_token)
        self._cuts[fill.request] = Cut(stop, outcome.cause, outcome.miss)
        (page_size, window), *others = self._windows.tables
        first_invalid = stop // page_size
        if others or window or first_invalid * page_size <= fill.first_token:
            return False
        pages = fill.pages[0][first_invalid : -(-fill.stop_token // page_size)]
        self._invalid_pages.update(page for page in pages if page >= 0)
        return True

    def take_cuts(self) -> dict[str, Cut]:
        """Loads that broke off since the last call."""
        cuts, self._cuts = self._cuts, {}
        return cuts

    def take_invalid_pages(self) -> set[int]:
        """Pages that loads have left unfilled since the last call."""
        invalid, self._invalid_pages = self._invalid_pages, set()
        return invalid
