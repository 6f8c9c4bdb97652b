# SPDX-License-Identifier: Apache-2.0
"""Pages that a load fills only in part, because a sliding window begins within them.

vLLM treats every page of a load as filled, and caches it when it schedules the request after the load. Other requests
must not find such a page in the prefix cache. vLLM caches while it schedules, and calls a connector soon afterwards.
If the request finds no room, vLLM calls only after the scheduling.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from pd_connector.vllm.pages.status import PageRule
from pd_connector.vllm.pages.windows import Windows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class PartialPages(PageRule):
    """The partly filled pages of all requests. A chunk with such a page is not saved.

    Args:
        windows: page sizes and windows of the engine's page tables.
    """

    cause = "unfilled"

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        # Removes pages from vLLM's prefix cache; ignores pages that are not in it.
        self._evict: Callable[[set[int]], None] = lambda _: None
        self._loading: dict[str, set[int]] = {}
        self._by_request: dict[str, set[int]] = {}  # of requests that have not ended
        self._loaded: dict[str, set[int]] = {}

    def bind(self, manager: "KVCacheManager") -> None:
        self._evict = manager.block_pool.evict_blocks

    def load(
        self, request_id: str, blocks: "KVCacheBlocks", first_token: int, stop_token: int
    ) -> None:
        """A load of tokens [first_token, stop_token) begins."""
        self._by_request.pop(request_id, None)
        tables = blocks.get_block_ids()
        if pages := set(self._windows.unfilled(tables, first_token, stop_token)):
            self._loading[request_id] = self._by_request[request_id] = pages

    def partial_pages(self, request_id: str) -> Collection[int]:
        return self._by_request.get(request_id, ())

    def admitted(self, request: "Request", blocks: "KVCacheBlocks", own_tokens: int) -> None:
        if not own_tokens:
            self._settle(request.request_id)

    def finished(self, request: "Request") -> None:
        self._settle(request.request_id)
        self._by_request.pop(request.request_id, None)

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        pages = self._loading.pop(request_id, None)
        if pages and not failed:  # vLLM caches no page of a failed load
            self._loaded[request_id] = pages

    def stepped(self) -> None:
        """vLLM may have cached pages of requests that found no room."""
        for pages in self._loaded.values():
            self._evict(pages)

    def _settle(self, request_id: str) -> None:
        """vLLM has cached this request's pages, or never will."""
        self._loading.pop(request_id, None)
        if pages := self._loaded.pop(request_id, None):
            self._evict(pages)
