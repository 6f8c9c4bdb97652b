# SPDX-License-Identifier: Apache-2.0
"""Requests whose load failed, while another part of vLLM's MultiConnector could load them, too.

vLLM adds the pages that the failed load would need and the pages of the other part's load: it waits for room for
twice the prompt. Requests behind it wait for the same time, even those whose loads have ended. In a cache with fewer pages they
wait for ever. Such a request is computed here instead, and nothing is loaded for it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pd_connector.kv.geometry import pages_for
from pd_connector.vllm.handoff.fetch import Fetch

if TYPE_CHECKING:
    from vllm.v1.request import Request


def _not_told() -> int:
    """Placeholder until vLLM hands over its pages."""
    return 0


class Recomputed:
    """Called by vLLM's scheduler only.

    Attributes:
        free_pages: returns the number of free pages in vLLM's cache.

    Args:
        page_sizes: tokens of a page, by table.
    """

    def __init__(self, page_sizes: tuple[int, ...]) -> None:
        self.free_pages: Callable[[], int] = _not_told
        self._page_sizes = page_sizes

    def looks_for_room(self, request: "Request", fetch: Fetch) -> None:
        """vLLM looks for room for a request whose load failed.

        If vLLM asks again although there was room, the other part's load keeps the request waiting. vLLM is then
        told to read no cache for it, so that neither part loads.
        """
        if fetch.had_room:
            request.skip_reading_prefix_cache = True
        needed = sum(pages_for(request.num_tokens, size) for size in self._page_sizes)
        fetch.had_room = needed <= self.free_pages()
