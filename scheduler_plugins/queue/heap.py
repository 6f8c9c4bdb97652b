# SPDX-License-Identifier: Apache-2.0
"""A heap whose entries may die where they lie."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from scheduler_plugins.queue.place import Place

Entry = tuple[float, int, int, Place]
"""Key; place by arrival; a number that no other entry has; the place."""

_SLACK = 64
_MOVED_PER_PUSH = 4


class LazyHeap:
    """Dead entries are dropped when they surface, the others a few at a time.

    When more than half of the entries must be dead, the heap becomes the old one, and every push
    takes four entries off its end (what remains is still a heap) and moves those that live to the
    new one. So no operation takes more than O(log n), dead entries that surface apart, and each of
    those was pushed once.
    """

    def __init__(self, number: Callable[[Place], int]) -> None:
        """`number`: the number of a place's entry that lives; every other of its entries is dead."""
        self._number = number
        self._fresh: list[Entry] = []
        self._old: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        """The entries that live, in no order."""
        number = self._number
        for heap in (self._fresh, self._old):
            yield from (entry for entry in heap if number(entry[3]) == entry[2])

    def push(self, entry: Entry, size: int) -> None:
        """Add an entry; `size` is at least the number of entries that live."""
        heapq.heappush(self._fresh, entry)
        if self._old:
            for _ in range(min(_MOVED_PER_PUSH, len(self._old))):
                moved = self._old.pop()
                if self._number(moved[3]) == moved[2]:
                    heapq.heappush(self._fresh, moved)
        elif len(self._fresh) > 2 * size + _SLACK:
            self._fresh, self._old = [], self._fresh

    def in_order(self) -> Iterator[Entry]:
        """The entries that live, smallest first. Each step takes O(log n), dead entries apart; the
        heap must not change meanwhile."""
        heaps = (self._fresh, self._old)
        ahead = [(heap[0], n, 0) for n, heap in enumerate(heaps) if heap]
        heapq.heapify(ahead)
        while ahead:
            entry, n, index = heapq.heappop(ahead)
            if self._number(entry[3]) == entry[2]:
                yield entry
            heap = heaps[n]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(ahead, (heap[child], n, child))

    def first(self) -> Entry | None:
        """The smallest entry that lives."""
        first, number = None, self._number
        for heap in (self._fresh, self._old):
            while heap:
                entry = heap[0]
                if number(entry[3]) == entry[2]:
                    first = entry if first is None else min(first, entry)
                    break
                heapq.heappop(heap)
        return first
