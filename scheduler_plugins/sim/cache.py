# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of a simulated engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, KeysView, Sequence
from math import inf

from scheduler_plugins.order.request import BlockHash


class LruBlocks:
    """Block hashes with room for `capacity`. The least recently used block is evicted.

    As in vLLM, the last blocks of a prompt are evicted before its first blocks. The engine sees a block at once. Others
    see the block `lag_s` after it is computed, and its eviction with the same delay.
    """

    def __init__(self, capacity: int, *, lag_s: float = 0.0) -> None:
        """`lag_s`: delay until others know of a block, in seconds."""
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be at least 1 block")
        self._capacity = capacity
        self._lag_s = lag_s
        self._notes_evictions = lag_s > 0.0
        self._blocks: OrderedDict[BlockHash, float] = OrderedDict()
        self._computing: list[BlockHash] = []
        self._evicted: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()
        self.on_added: Callable[[list[BlockHash]], None] = _ignore
        """Called after blocks were added."""
        self.on_removed: Callable[[], None] = _nothing
        """Called after blocks were evicted, before `on_added`."""

    @property
    def hashes(self) -> KeysView[BlockHash]:
        """The cached hashes, as a live view for a queue."""
        return self._blocks.keys()

    def prefix(self, hashes: Sequence[BlockHash], usable: int) -> int:
        """The number of leading blocks that are cached, out of the first `usable`."""
        for n in range(usable):
            if hashes[n] not in self._blocks:
                return n
        return usable

    def seen(self, hashes: Sequence[BlockHash], now_s: float) -> int:
        """The number of leading blocks that others believe to be cached at `now_s`."""
        get, known_s, count, late = self._blocks.get, now_s - self._lag_s, 0, self._lag_s > 0.0
        for block in hashes:
            if get(block, inf) > known_s and not (late and self._evicted_late(block, known_s)):
                return count
            count += 1
        return count

    def store(self, hashes: Sequence[BlockHash], now_s: float = 0.0) -> None:
        """Note that all blocks of a prompt were used. Uncached blocks become cached.

        If a prompt is larger than the cache, only its beginning is kept. Others see the new blocks only after
        `computed`.
        """
        blocks, added = self._blocks, list[BlockHash]()
        move = blocks.move_to_end
        for block in reversed(hashes[: self._capacity]):
            if block in blocks:
                move(block)
            else:
                blocks[block] = inf
                added.append(block)
        self._computing += added
        evicted = len(blocks) - self._capacity
        for _ in range(evicted):
            gone, since_s = blocks.popitem(last=False)
            if self._notes_evictions:
                self._evict(gone, since_s, now_s)
        if evicted > 0:
            self.on_removed()
        if added:
            self.on_added(added)

    def arrived(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Add whole blocks that came from another engine. Others see them too."""
        computing, self._computing = self._computing, []
        self.store(hashes, now_s)
        self.computed(now_s)
        self._computing = computing

    def computed(self, now_s: float) -> None:
        """Note that the step that computes the last stored blocks has ended."""
        blocks = self._blocks
        for block in self._computing:
            if block in blocks:
                blocks[block] = now_s
        self._computing = []

    def _evict(self, block: BlockHash, since_s: float, now_s: float) -> None:
        """Note that a block computed at `since_s` is gone at `now_s`."""
        self._evicted[block] = (since_s, now_s)
        while self._evicted:
            first, (_, gone_s) = next(iter(self._evicted.items()))
            if gone_s > now_s - self._lag_s:
                break
            del self._evicted[first]

    def _evicted_late(self, block: BlockHash, known_s: float) -> bool:
        since_s, gone_s = self._evicted.get(block, (inf, -inf))
        return since_s <= known_s < gone_s


def _ignore(blocks: list[BlockHash]) -> None:
    pass


def _nothing() -> None:
    pass
