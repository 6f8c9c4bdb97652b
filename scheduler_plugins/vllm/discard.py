# SPDX-License-Identifier: Apache-2.0
"""Suffix KV discarding: what a prefill-only request leaves is evicted before what others share.

PrefillOnly (SOSP 2025) drops the KV of suffixes that nobody will read. Here a block is *shared* if
another request found it in the cache, holds it, or waits and would find it. When a prefill-only
request has ended, its blocks after the last shared one are *spare*. They stay readable; but where a
step needs more than the blocks that hold nothing, it takes spare ones first, the oldest first, and
only then the least recently used of the others. A spare block that is found by a request is spare no
more.

For one KV cache group; models with several evict as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scheduler_plugins.order.request import BlockHash
from scheduler_plugins.vllm.cache import CacheView

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_AHEAD = 4


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
        self._ended: list[tuple[Sequence[KVCacheBlock], Sequence[BlockHash]]] = []
        """Requests whose blocks have not been looked at; see `ended`."""
        self._spare: dict[int, BlockHashWithGroupId] = {}
        """What is spare and does not lie at the front yet, by number of the block, the oldest first."""
        self._front: dict[int, BlockHashWithGroupId] = {}
        """What is spare and lies at the front of the free queue."""
        self._ready = 0  # blocks at the front that hold nothing or are spare, at least

    def found(self, blocks: Sequence[KVCacheBlock], count: int) -> None:
        """A request started with the first `count` of its blocks, in the order of its prompt, from
        the cache."""
        count = min(count, len(blocks))
        last = blocks[count - 1] if count else None
        key = last.block_hash if last else None
        if last is None or key is None:
            return
        self._found[last.block_id] = key
        for n in range(count - 1, -1, -1):
            block = blocks[n]
            if self._spare.pop(block.block_id, None) is not None:
                continue
            if self._front.pop(block.block_id, None) is None:
                break
            self._ready -= 1

    def ended(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash]) -> None:
        """A prefill-only request has ended, and vLLM frees its blocks now or when a step under way
        has ended. They are looked at when there is need of room.

        Args:
            blocks: that it holds, in the order of its prompt.
            hashes: which the full ones of them have.
        """
        self._ended.append((tuple(blocks), hashes))

    def took(self, blocks: int | None) -> None:
        """A step took at most so many blocks from the front; None: it is not known."""
        self._ready = 0 if blocks is None else self._ready - blocks

    def lacks(self, blocks: int) -> bool:
        """Whether a step that takes `blocks` blocks may take one that is shared while one is spare."""
        return self._ready < blocks and bool(self._spare or self._ended)

    def make_room(self, blocks: int) -> None:
        """A step may take `blocks` blocks: let it take none that is shared while one is spare.

        Does so for `_AHEAD` such steps, by a walk over their blocks, so that room is lacking again
        only when they may be used up.
        """
        self._sort_out()
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

    def _sort_out(self) -> None:
        """Find out which blocks of the requests that have ended are spare."""
        ended, self._ended = self._ended, []
        for blocks, hashes in ended:
            for n in range(min(len(blocks), len(hashes)) - 1, -1, -1):
                block, hashed = blocks[n], hashes[n]
                key = block.block_hash
                if key is None or self._cache.block_hash(block) != hashed:
                    continue  # was never cached, or holds something else by now
                if (
                    block.ref_cnt > 1
                    or self._found.get(block.block_id) == key
                    or self._wanted(hashed)
                ):
                    break
                self._front.pop(block.block_id, None)
                self._spare.pop(block.block_id, None)
                self._spare[block.block_id] = key

    def _leading(self, most: int) -> int:
        """How many blocks at the front of the free queue hold nothing, or are spare."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for n in range(most):
            key = block.block_hash
            if key is not None and self._front.get(block.block_id) != key:
                return n
            block = block.next_free_block
        return most
