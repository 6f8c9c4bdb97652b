# SPDX-License-Identifier: Apache-2.0
"""Pages that a load has filled in part, because a sliding window begins within them.

vLLM takes every page of a load for filled, and puts it into its prefix cache when it schedules the request
after the load. Other requests must not find it there. vLLM caches within its scheduling, where a connector is
called soon afterwards, or, where the request finds no room, when the scheduling has ended.
"""

from collections.abc import Callable, Iterable


def _nothing_cached(pages: set[int]) -> None:
    """vLLM has not told its prefix cache yet."""


class UnfilledPages:
    """Those of all requests. Called by vLLM's scheduler only.

    Attributes:
        evict: takes pages out of vLLM's prefix cache; those that are not in it are passed over.
    """

    def __init__(self) -> None:
        self.evict: Callable[[set[int]], None] = _nothing_cached
        self._loading: dict[str, set[int]] = {}
        self._loaded: dict[str, set[int]] = {}

    def load(self, request: str, pages: Iterable[int]) -> None:
        """A load begins that fills these pages in part."""
        if found := set(pages):
            self._loading[request] = found

    def load_ended(self, request: str, *, failed: bool) -> None:
        """The load has ended. vLLM caches no page of one that failed."""
        pages = self._loading.pop(request, None)
        if pages and not failed:
            self._loaded[request] = pages

    def scheduled(self) -> None:
        """A step has been scheduled: vLLM may have cached pages of requests that found no room."""
        for pages in self._loaded.values():
            self.evict(pages)

    def settle(self, request: str) -> None:
        """vLLM has cached the pages of this request, if it ever does."""
        self._loading.pop(request, None)
        if pages := self._loaded.pop(request, None):
            self.evict(pages)
