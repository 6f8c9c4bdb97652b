# SPDX-License-Identifier: Apache-2.0
"""Suffix KV discarding: the suffix blocks of prefill-only requests are evicted before shared blocks.

PrefillOnly (SOSP 2025) drops the KV of suffixes that no request will read. Here a block is *shared* if another request
found it in the cache, holds it, or waits and would find it. When a prefill-only request has ended, its blocks after the
last shared block are *spare*. Spare blocks stay readable. If a request finds a spare block, the block is no longer
spare.

Eviction is by time of last use, the oldest first. A block that is not spare gets a *bonus*, which is added to its time
of last use. So suffixes go before shared prefixes, but a prefix without use for a long time goes before a new suffix.
At first the bonus is one cache: the time in which a whole cache of blocks is stored. Then it is learnt, like the sizes
of ARC's two lists (Megiddo and Modha, FAST 2003). A miss of a block that was spare at its eviction shortens the bonus.
A miss of a block that was not spare lengthens it. With a bonus of 0 the order is vLLM's order, LRU.

This works for one KV cache group. Models with several groups evict like vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from scheduler_plugins.order.request import BlockHash
from scheduler_plugins.vllm.cache import CacheView

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_AHEAD = 4
"""The number of steps for which the eviction order is made in one go."""
_MOST_BONUS = 2
"""Longest bonus, in caches."""
_GHOSTS = 2
"""Divisor: the last evicted blocks are remembered, up to 1/2 of the cache's number of blocks."""


class SuffixDiscard:
    """Puts the front of vLLM's `BlockPool.free_block_queue` into the eviction order. vLLM frees the blocks.

    A hash stands for the whole prefix. So a request that finds a block has found all blocks before it, and it is enough
    to note the last block found. Time is counted in stored blocks (`CacheView.stored_blocks`).
    """

    def __init__(self, cache: CacheView, ends_prefix: Callable[[BlockHash], bool]) -> None:
        """`ends_prefix`: whether a waiting request's cached prefix ends with a block."""
        self._cache = cache
        self._pool = cache.pool
        self._ends_prefix = ends_prefix
        self._blocks: int = cache.pool.num_gpu_blocks
        self._bonus = self._blocks
        self._evicted: dict[BlockHashWithGroupId, bool] = {}
        """For each recently evicted block, whether it was spare; oldest first."""
        self._last_hits: dict[int, BlockHashWithGroupId] = {}
        self._used: dict[int, int] = {}
        """The time when a request that held the block ended, by number of the block."""
        self._freed: list[tuple[Sequence[KVCacheBlock], Sequence[BlockHash], int]] = []
        """Requests that ended since `catch_up`, with the time."""
        self._ended: list[tuple[Sequence[KVCacheBlock], Sequence[BlockHash], int]] = []
        """Prefill-only requests that ended, with the time. Their blocks have not been examined yet."""
        self._spare: dict[int, tuple[BlockHashWithGroupId, int]] = {}
        """Spare blocks by number, with their content and the time since when; oldest first."""
        self._ready = 0  # least number of blocks at the front of the free queue that are in order

    def started(
        self,
        blocks: Sequence[KVCacheBlock],
        count: int,
        missing: Iterable[BlockHashWithGroupId] = (),
    ) -> None:
        """Note that a request started.

        Args:
            blocks: the request's blocks, in the order of its prompt.
            count: the number of leading blocks that were cached.
            missing: the keys of the request's full blocks after these.
        """
        self._learn(missing)
        count = min(count, len(blocks))
        last = blocks[count - 1] if count else None
        key = last.block_hash if last else None
        if last is None or key is None:
            return
        self._last_hits[last.block_id] = key
        for n in range(count - 1, -1, -1):
            if self._spare.pop(blocks[n].block_id, None) is None:
                break
            self._ready -= 1

    def evicted(self, key: BlockHashWithGroupId, block_id: int) -> None:
        """Note that a block is no longer cached."""
        spare = self._spare.get(block_id)
        self._evicted[key] = spare is not None and spare[0] == key

    def ended(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash]) -> None:
        """Note that a request has ended. vLLM frees its blocks now, or when the running step has ended.

        Args:
            blocks: the request's blocks, in the order of its prompt.
            hashes: the keys of its full blocks; empty unless the request was prefill-only.
        """
        self._freed.append((tuple(blocks), hashes, self._cache.stored_blocks))

    def catch_up(self) -> None:
        """Process the requests that ended. Call once between two steps."""
        freed, self._freed = self._freed, []
        for blocks, hashes, now in freed:
            self._used.update(dict.fromkeys([block.block_id for block in blocks], now))
            if hashes:
                self._ended.append((blocks, hashes, now))
        for _ in range(len(self._evicted) - self._blocks // _GHOSTS):
            del self._evicted[next(iter(self._evicted))]

    def took(self, blocks: int | None) -> None:
        """Note that a step took at most `blocks` blocks from the front; None: the number is unknown."""
        self._ready = 0 if blocks is None else self._ready - blocks

    def lacks(self, blocks: int) -> bool:
        """Whether a step that takes `blocks` blocks could take a block out of order."""
        return self._ready < blocks and bool(self._spare or self._ended)

    def make_room(self, blocks: int) -> None:
        """Put the front of the free queue in order, for `_AHEAD` steps that take `blocks` blocks each."""
        self.catch_up()
        self._sort_out()
        queue = self._pool.free_block_queue
        count = min(_AHEAD * blocks, queue.num_free_blocks)
        front = list(islice(self._in_order(), count))
        if front != list(islice(self._as_they_lie(), count)):
            for block in front:
                queue.remove(block)
            queue.prepend_n(front)
        self._ready = count

    def _learn(self, missing: Iterable[BlockHashWithGroupId]) -> None:
        """Adapt the bonus to the blocks that this request missed because they were evicted."""
        for key in missing:
            was_spare = self._evicted.pop(key, None)
            if was_spare is None:
                break
            moved = self._bonus + (-1 if was_spare else 1)
            self._bonus = max(0, min(_MOST_BONUS * self._blocks, moved))

    def _in_order(self) -> Iterator[KVCacheBlock]:
        """All free blocks in the order in which they should be evicted."""
        spare = self._free_spare()
        next_spare = next(spare, None)
        for block in self._as_they_lie():
            if block.block_id in self._spare:
                continue
            while (
                next_spare is not None
                and block.block_hash is not None
                and self._spare[next_spare.block_id][1]
                <= self._used.get(block.block_id, 0) + self._bonus
            ):
                yield next_spare
                next_spare = next(spare, None)
            yield block
        while next_spare is not None:
            yield next_spare
            next_spare = next(spare, None)

    def _free_spare(self) -> Iterator[KVCacheBlock]:
        """The spare blocks that are free, oldest first. Evicted blocks are forgotten."""
        for block_id, (key, _) in list(self._spare.items()):
            block = self._pool.blocks[block_id]
            if block.block_hash != key:
                del self._spare[block_id]
            elif block.ref_cnt == 0:
                yield block

    def _as_they_lie(self) -> Iterator[KVCacheBlock]:
        """The free blocks in vLLM's order of eviction."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def _sort_out(self) -> None:
        """Find the spare blocks of the requests that have ended."""
        ended, self._ended = self._ended, []
        for blocks, hashes, ended_at in ended:
            for n in range(min(len(blocks), len(hashes)) - 1, -1, -1):
                block, hashed = blocks[n], hashes[n]
                key = block.block_hash
                if key is None or self._cache.block_hash(block) != hashed:
                    continue  # was never cached, or holds other KV by now
                if (
                    block.ref_cnt > 1
                    or self._last_hits.get(block.block_id) == key
                    or self._ends_prefix(hashed)
                ):
                    break
                self._spare.pop(block.block_id, None)
                self._spare[block.block_id] = key, ended_at
