# SPDX-License-Identifier: Apache-2.0
"""Pages that are kept until all ranks have copied them into the pool, or compared them with it.

A kept page has one reference more, so vLLM cannot reuse it, whatever becomes of its request.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pd_connector.kv.geometry import page_span
from pd_connector.pool.jobs import Save
from pd_connector.vllm.handoff.streaming import kept_pages
from pd_connector.vllm.pages.status import PageStatus
from pd_connector.vllm.pages.windows import NULL_PAGE, Windows
from pd_connector.vllm.pool.prompt import PoolPrompt

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
        status: says which pages hold only a part of a request's KV.
    """

    def __init__(self, windows: Windows, ranks: int, status: PageStatus) -> None:
        self._windows = windows
        self._status = status
        self._ranks = ranks
        self._blocks: BlockPool | None = None
        self._kept: dict[str, tuple[list[KVCacheBlock], int]] = {}  # with the ranks to answer
        self._saved: dict[str, bytes] = {}  # keys of the chunks that are being saved
        self._numbered = 0
        self._slides = any(window for _, window in windows.tables)
        self._handed_out: list[int] = []  # how often, by page

    @property
    def keys(self) -> list[bytes]:
        """Keys of the chunks that are being saved."""
        return list(self._saved.values())

    def __bool__(self) -> bool:
        return bool(self._kept)

    def bind(self, blocks: "BlockPool") -> None:
        """Attach vLLM's pages.

        vLLM resets its prefix cache only while no page is in use. Kept pages belong to no request, and their content
        stays right. So they count as free during a reset, and stay kept afterwards. `unpin_blocks` is not used: it
        allows one watcher for a page, which another connector, or another save of the page, would replace.
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
        if self._slides:
            self._watch(blocks)

    def _watch(self, blocks: "BlockPool") -> None:
        """Count how often vLLM allocates each page. vLLM does not report that a sliding window has freed a page of a
        running request. Such a page holds the request's KV until it is allocated again."""
        self._handed_out = [0] * blocks.num_gpu_blocks
        hand_out = blocks.get_new_blocks

        def get_new_blocks(count: int) -> "list[KVCacheBlock]":
            handed_out: list[KVCacheBlock] = hand_out(count)
            for block in handed_out:
                self._handed_out[block.block_id] += 1
            return handed_out

        blocks.get_new_blocks = get_new_blocks

    def note(self, prompt: PoolPrompt, *, moved: bool) -> None:
        """Record, for a scheduled step, how often each of this prompt's new pages was allocated.

        Args:
            moved: whether the prompt has other pages than before.
        """
        if not self._slides:
            return
        if moved:
            prompt.handed_out = [[] for _ in prompt.pages]
        for pages, counts in zip(prompt.pages, prompt.handed_out, strict=True):
            counts.extend(self._handed_out[page] for page in pages[len(counts) :])

    def present(
        self, prompt: PoolPrompt, tables_now: Sequence[Sequence[int]] = ()
    ) -> Sequence[Sequence[int]]:
        """A prompt's pages by table; `NULL_PAGE` for pages that no longer hold its KV, or hold only a part of it.

        Args:
            tables_now: all page ids of the prompt, if vLLM has just reported them.
        """
        if not self._slides:
            return tables_now or prompt.pages
        partly = self._status.partial_pages(prompt.request.request_id)
        times = self._handed_out
        tables = tables_now or [
            [page if times[page] == count else NULL_PAGE for page, count in zip(*both, strict=True)]
            for both in zip(prompt.pages, prompt.handed_out, strict=True)
        ]
        return [[NULL_PAGE if page in partly else page for page in table] for table in tables]

    def begin(
        self, model: bytes, prompt: PoolPrompt, numbers: range, pages: Sequence[Sequence[int]]
    ) -> list[Save]:
        """Keep the pages of chunks, and return the commands that copy them; fewer if too many saves are under way.

        Args:
            numbers: numbers of the chunks.
            pages: all page ids of the prompt, by table.
        """
        saves: list[Save] = []
        for number in numbers[: MOST_SAVES - len(self._kept) if self._blocks else 0]:
            chunk, tables = prompt.chunk(number), []
            for table, size in zip(pages, self._windows.page_sizes, strict=True):
                span = page_span(chunk.first_token, chunk.stop_token, size)
                tables.append(list(table[span.start : span.stop]))
            name = self.keep("save", tables)
            self._saved[name] = chunk.key
            saves.append(Save(name, model, chunk, kept_pages(tables), prompt.ask.tenant))
        return saves

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
            self._saved.pop(name, None)
            assert self._blocks is not None
            self._blocks.free_blocks(reversed(blocks))
