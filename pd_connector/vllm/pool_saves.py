# SPDX-License-Identifier: Apache-2.0
"""Pages that are kept until all ranks have copied them into the pool, or compared them with it.

A kept page has one reference more, so vLLM cannot reuse it, whatever becomes of its request.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pd_connector.kv.geometry import page_span
from pd_connector.pool.jobs import PromptChunk, Save
from pd_connector.vllm.streaming import kept_pages
from pd_connector.vllm.windows import NULL_PAGE, Windows

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MOST_SAVES = 64
"""Saves under way. More chunks than that are not saved: their pages would be missed."""


class PoolSaves:
    """Used by the scheduler's thread only.

    Args:
        windows: page sizes of the engine's page tables.
        ranks: number of ranks of this engine.
    """

    def __init__(self, windows: Windows, ranks: int) -> None:
        self._windows = windows
        self._ranks = ranks
        self._blocks: BlockPool | None = None
        self._kept: dict[str, tuple[list[KVCacheBlock], int]] = {}  # with the ranks to answer
        self._numbered = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def bind(self, blocks: "BlockPool") -> None:
        """Attach vLLM's pages.

        vLLM resets its prefix cache only while no page is in use. Kept pages are no request's, and what is saved stays
        right. So they count as free during a reset, and are kept on afterwards. `unpin_blocks` is not used: a page has
        one watcher there, which another connector, or another save of the page, would replace.
        """
        self._blocks = blocks
        reset = blocks.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            kept = [block for pages, _ in self._kept.values() for block in pages]
            blocks.free_blocks(reversed(kept))
            try:
                return bool(reset())
            finally:
                blocks.touch(kept)

        blocks.reset_prefix_cache = reset_prefix_cache

    @property
    def full(self) -> bool:
        """Whether no other save may begin."""
        return self._blocks is None or len(self._kept) >= MOST_SAVES

    def begin(
        self, model: bytes, chunk: PromptChunk, pages: Sequence[Sequence[int]], tenant: str = ""
    ) -> Save:
        """Keep a chunk's pages, and return the command that copies them.

        Args:
            pages: all page ids of the request, by table.
            tenant: whose share of the pool the chunk takes.
        """
        tables = []
        for table, size in zip(pages, self._windows.page_sizes, strict=True):
            span = page_span(chunk.first_token, chunk.stop_token, size)
            tables.append(list(table[span.start : span.stop]))
        return Save(self.keep("save", tables), model, chunk, kept_pages(tables), tenant)

    def keep(self, what: str, tables: Sequence[Sequence[int]]) -> str:
        """Keep pages until all ranks have answered. Returns a name for it that no request has."""
        assert self._blocks is not None
        kept = dict.fromkeys(page for table in tables for page in table if page != NULL_PAGE)
        blocks = [self._blocks.blocks[page] for page in kept]
        self._blocks.touch(blocks)
        self._numbered += 1
        name = f"pool {what} {self._numbered}"
        self._kept[name] = blocks, self._ranks
        return name

    def answered(self, answers: Mapping[str, int]) -> None:
        """Ranks have copied pages. `answers`: their number by save."""
        for name, ranks in answers.items():
            if name not in self._kept:
                continue
            blocks, left = self._kept[name]
            if left > ranks:
                self._kept[name] = blocks, left - ranks
                continue
            del self._kept[name]
            assert self._blocks is not None
            self._blocks.free_blocks(reversed(blocks))
