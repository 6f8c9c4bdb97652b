# SPDX-License-Identifier: Apache-2.0
"""Suffix KV discarding: what a prefill-only request leaves is evicted before what others share.

PrefillOnly (SOSP 2025) drops the KV of suffixes that nobody will read. Here a block is *shared* if
another request found it in the cache, holds it, or waits and would find it. When a prefill-only
request ends, its blocks after the last shared one are *spare*. They stay readable; but where a step
needs more than the blocks that hold nothing, it takes spare ones first, the oldest first, and only
then the least recently used of the others. A spare block that is found by a request is spare no more.

For one KV cache group; models with several evict as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scheduler_plugins.policy.queue.request import BlockHash
from scheduler_plugins.vllm.cache import CacheView

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_AHEAD = 4

Spare = Sequence[tuple["KVCacheBlock", "BlockHashWithGroupId"]]
"""Blocks, the last of a prompt first, and the hashes that they have."""


class SuffixDiscard:
    """Keeps `BlockPool.free_block_queue` in that order. Holds no blocks: vLLM frees them.

    A hash stands for the whole prefix, so whoever finds a block has found all before it: it is
    enough to note the last one found.
    """

    def __init__(self, cache: CacheView, wanted: Callable[[BlockHash], bool]) -> None:
        """`wanted`: whether a waiting request's cached prefix ends with a block."""
        self._cache = cache
        self._pool = cache.pool
        self._wanted = wanted
        self._found: dict[int, BlockHashWithGroupId] = {}
        self._spare: dict[int, BlockHashWithGroupId] = {}
        """By number of the block, the oldest first."""
        self._front: dict[int, BlockHashWithGroupId] = {}
        """Those that lie at the front of the free queue already."""
        self._ready = 0  # blocks at the front that hold nothing or are spare, at least

    def found(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A request started with these blocks from the cache, in the order of its prompt."""
        if not blocks or blocks[-1].block_hash is None:
            return
        self._found[blocks[-1].block_id] = blocks[-1].block_hash
        for block in reversed(blocks):
            if self._spare.pop(block.block_id, None) is not None:
                continue
            if self._front.pop(block.block_id, None) is None:
                break
            self._ready -= 1

    def suffix(self, blocks: Sequence[KVCacheBlock]) -> Spare:
        """The cached blocks of a request after the last shared one. Call before they are freed."""
        suffix = []
        for block in reversed(blocks):
            key = block.block_hash
            if key is not None and self._shared(block, key):
                break
            if key is not None:
                suffix.append((block, key))
        return suffix

    def freed(self, suffix: Spare) -> None:
        """vLLM has freed what `suffix` returned, or will when a step under way has ended."""
        for block, key in suffix:
            self._front.pop(block.block_id, None)
            self._spare.pop(block.block_id, None)
            self._spare[block.block_id] = key

    @property
    def pending(self) -> bool:
        """Whether there is anything spare that does not lie at the front yet."""
        return bool(self._spare)

    def took(self, blocks: int | None) -> None:
        """A step took at most so many blocks from the front; None: it is not known."""
        self._ready = 0 if blocks is None else self._ready - blocks

    def make_room(self, blocks: int) -> None:
        """A step may take `blocks` blocks: let it take none that is shared while one is spare.

        Does so for `_AHEAD` such steps, by a walk over their blocks, and then nothing until they
        may be used up.
        """
        if not self._spare or self._ready >= blocks:
            return
        queue = self._pool.free_block_queue
        free = min(_AHEAD * blocks, queue.num_free_blocks)
        leading = self._leading(free)
        taken: list[KVCacheBlock] = []
        evicted = []
        for block_id, key in self._spare.items():
            if leading + len(taken) == free:
                break
            block = self._pool.blocks[block_id]
            if block.block_hash != key:
                evicted.append(block_id)
            elif block.ref_cnt == 0:
                taken.append(block)
        for block_id in evicted:
            del self._spare[block_id]
        self._ready = leading + len(taken)
        if not taken:
            return
        for block in taken:
            self._front[block.block_id] = self._spare.pop(block.block_id)
            queue.remove(block)
        queue.prepend_n(queue.popleft_n(leading) + taken)

    def _leading(self, most: int) -> int:
        """How many blocks at the front of the free queue hold nothing, or are spare."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for n in range(most):
            key = block.block_hash
            if key is not None and self._front.get(block.block_id) != key:
                return n
            block = block.next_free_block
        return most

    def _shared(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> bool:
        return (
            block.ref_cnt > 1
            or self._found.get(block.block_id) == key
            or self._wanted(self._cache.block_hash(block))
        )
