# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of a simulated engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, KeysView, Sequence

from scheduler_plugins.order.request import BlockHash


class LruBlocks:
    """Block hashes with room for `capacity`; the one unused for longest is evicted.

    As in vLLM the last blocks of a prompt are evicted before its first ones.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be at least 1 block")
        self._capacity = capacity
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self.on_added: Callable[[list[BlockHash]], None] = _ignore
        """Called after blocks were added."""
        self.on_removed: Callable[[], None] = _nothing
        """Called after blocks were evicted, before `on_added`."""

    @property
    def hashes(self) -> KeysView[BlockHash]:
        """What is cached, as it changes: for a queue."""
        return self._blocks.keys()

    def prefix(self, hashes: Sequence[BlockHash], usable: int) -> int:
        """How many leading blocks are cached, out of the first `usable`."""
        for n in range(usable):
            if hashes[n] not in self._blocks:
                return n
        return usable

    def store(self, hashes: Sequence[BlockHash]) -> None:
        """All blocks of a prompt were used; those that were not cached are now.

        Of a prompt that is larger than the cache only the beginning is kept.
        """
        blocks, added = self._blocks, list[BlockHash]()
        for block in reversed(hashes[: self._capacity]):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
                added.append(block)
        evicted = len(blocks) - self._capacity
        for _ in range(evicted):
            blocks.popitem(last=False)
        if evicted > 0:
            self.on_removed()
        if added:
            self.on_added(added)


def _ignore(blocks: list[BlockHash]) -> None:
    pass


def _nothing() -> None:
    pass
