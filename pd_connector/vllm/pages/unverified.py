# SPDX-License-Identifier: Apache-2.0
"""Pages with KV that another connector has loaded, and pages with KV that was computed on it.

A MultiConnector asks its parts in turn for each prompt, and the first part that has KV loads it. PDConnector has not
verified that KV, and it may fill a page only in part. So it is neither saved for other engines nor used in comparisons.
vLLM reports to a connector only its own loads, so this module watches vLLM's allocations.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.pages.status import PageRule, Use
from pd_connector.vllm.pages.windows import NULL_PAGE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class UnverifiedPages(PageRule):
    """Forbids saving and comparing KV that another connector has loaded, and KV that was computed from it.

    Args:
        page_sizes: tokens of a page, by table.
    """

    cause = "unverified"
    forbids = (Use.COMPARE, Use.SAVE)

    def __init__(self, page_sizes: Sequence[int]) -> None:
        self._page_sizes = page_sizes
        self._pages: set[int] = set()
        self._requests: set[str] = set()
        # The request that vLLM has just admitted: tokens that some connector loads, tokens before them, pages found.
        self._admitted: tuple[int, int, KVCacheBlocks | None] = 0, 0, None

    def holds(self, request: "Request") -> bool:
        return request.request_id in self._requests

    def bind(self, manager: "KVCacheManager") -> None:
        """Watch vLLM's allocations. A page that is allocated again is no longer unverified."""
        blocks = manager.block_pool
        hand_out, allocate = blocks.get_new_blocks, manager.allocate_slots

        def get_new_blocks(count: int) -> "list[KVCacheBlock]":
            handed_out: list[KVCacheBlock] = hand_out(count)
            if self._pages:
                self._pages.difference_update(block.block_id for block in handed_out)
            return handed_out

        def allocate_slots(
            request: "Request", *args: Any, **options: Any
        ) -> "KVCacheBlocks | None":
            new: KVCacheBlocks | None = allocate(request, *args, **options)
            if "num_external_computed_tokens" in options:  # it was waiting
                external, before = (
                    options["num_external_computed_tokens"],
                    "num_new_computed_tokens",
                )
                self._admitted = (
                    external,
                    options.get(before, 0),
                    options.get("new_computed_blocks"),
                )
            elif new is not None and request.request_id in self._requests:
                self._add(new.get_block_ids(), 0)
            return new

        blocks.get_new_blocks = get_new_blocks
        manager.allocate_slots = allocate_slots

    def admitted(self, request: "Request", blocks: "KVCacheBlocks", own_tokens: int) -> None:
        (external, before, cached), self._admitted = self._admitted, (0, 0, None)
        firsts = [before] if external and not own_tokens else []
        if self._pages:
            firsts += self._firsts(blocks.get_block_ids())
            firsts += self._firsts(cached.get_block_ids()) if cached else []
        if not firsts:
            self._requests.discard(request.request_id)
            return
        self._requests.add(request.request_id)
        self._add(blocks.get_block_ids(), min(firsts))

    def finished(self, request: "Request") -> None:
        self._requests.discard(request.request_id)  # vLLM may keep its pages for other requests

    def _firsts(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """The first token of the first unverified page, of each table that has one."""
        return [
            next(place for place, page in enumerate(table) if page in self._pages) * size
            for table, size in zip(tables, self._page_sizes, strict=True)
            if not self._pages.isdisjoint(table)
        ]

    def _add(self, tables: Sequence[Sequence[int]], first_token: int) -> None:
        for table, size in zip(tables, self._page_sizes, strict=True):
            self._pages.update(table[first_token // size :])
        self._pages.discard(NULL_PAGE)
