# SPDX-License-Identifier: Apache-2.0
"""Pages that a load fills only in part, because a sliding window begins within them.

vLLM treats every page of a load as filled, and caches it when it schedules the request after the load. Other requests
must not find such a page in the prefix cache. vLLM caches while it schedules, and calls a connector soon afterwards.
If the request finds no room, vLLM calls only after the scheduling.
"""

from collections.abc import Callable, Collection, Iterable


def _nothing_cached(pages: set[int]) -> None:
    """Placeholder until vLLM hands over its prefix cache."""


class UnfilledPages:
    """The partly filled pages of all requests. Called only by vLLM's scheduler.

    Attributes:
        evict: removes pages from vLLM's prefix cache; ignores pages that are not in it.
    """

    def __init__(self) -> None:
        self.evict: Callable[[set[int]], None] = _nothing_cached
        self._loading: dict[str, set[int]] = {}
        self._by_request: dict[str, set[int]] = {}  # of requests that have not ended
        self._loaded: dict[str, set[int]] = {}

    def load(self, request: str, pages: Iterable[int]) -> None:
        """A load begins that fills only a part of these pages."""
        self._by_request.pop(request, None)
        if found := set(pages):
            self._loading[request] = self._by_request[request] = found

    def of(self, request: str) -> Collection[int]:
        """Pages of a request that its load has filled only in part."""
        return self._by_request.get(request, ())

    def finished(self, request: str) -> None:
        """The request has ended."""
        self.settle(request)
        self._by_request.pop(request, None)

    def load_ended(self, request: str, *, failed: bool) -> None:
        """The load has ended. vLLM caches no page of a failed load."""
        pages = self._loading.pop(request, None)
        if pages and not failed:
            self._loaded[request] = pages

    def scheduled(self) -> None:
        """A step has been scheduled: vLLM may have cached pages of requests that found no room."""
        for pages in self._loaded.values():
            self.evict(pages)

    def settle(self, request: str) -> None:
        """vLLM has cached this request's pages, or never will."""
        self._loading.pop(request, None)
        if pages := self._loaded.pop(request, None):
            self.evict(pages)
