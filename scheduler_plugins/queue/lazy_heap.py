# SPDX-License-Identifier: Apache-2.0
"""A heap with lazy deletion: if an item leaves or moves, its old node stays until it reaches the top."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[float, int, int, T]
"""Key; arrival number; a number unique to the node; the item."""

_SLACK = 64
_MOVED_PER_PUSH = 4


class LazyHeap(Generic[T]):
    """Dead nodes are dropped when they reach the top. Other dead nodes are dropped a few at a time.

    When more than half of the nodes must be dead, the heap becomes the old heap. Every push then takes four nodes off
    the old heap's end, and moves the live nodes to the new heap. The rest of the old heap is still a heap. An operation
    takes O(log n), plus the dead nodes that reach the top. Each of these was pushed once.
    """

    def __init__(self, number: Callable[[T], int]) -> None:
        """`number`: gives the number of an item's live node. All other nodes of the item are dead."""
        self._number = number
        self._fresh: list[Node[T]] = []
        self._old: list[Node[T]] = []

    def __iter__(self) -> Iterator[Node[T]]:
        """The live nodes, in no order."""
        number = self._number
        for heap in (self._fresh, self._old):
            yield from (node for node in heap if number(node[3]) == node[2])

    def push(self, node: Node[T], size: int) -> None:
        """Add a node. `size` is at least the number of live nodes."""
        heapq.heappush(self._fresh, node)
        if self._old:
            for _ in range(min(_MOVED_PER_PUSH, len(self._old))):
                moved = self._old.pop()
                if self._number(moved[3]) == moved[2]:
                    heapq.heappush(self._fresh, moved)
        elif len(self._fresh) > 2 * size + _SLACK:
            self._fresh, self._old = [], self._fresh

    def in_order(self) -> Iterator[Node[T]]:
        """The live nodes, smallest first, O(log n) each. The heap must not change during the iteration."""
        heaps = (self._fresh, self._old)
        ahead = [(heap[0], n, 0) for n, heap in enumerate(heaps) if heap]
        heapq.heapify(ahead)
        while ahead:
            node, n, index = heapq.heappop(ahead)
            if self._number(node[3]) == node[2]:
                yield node
            heap = heaps[n]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(ahead, (heap[child], n, child))

    def first(self) -> Node[T] | None:
        """The smallest live node; None if there is none."""
        first, number = None, self._number
        for heap in (self._fresh, self._old):
            while heap:
                node = heap[0]
                if number(node[3]) == node[2]:
                    first = node if first is None else min(first, node)
                    break
                heapq.heappop(heap)
        return first
