# SPDX-License-Identifier: Apache-2.0
"""The waiting requests of one class, ordered by key and by arrival."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import count
from operator import attrgetter
from typing import Generic, TypeVar

from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.queue.work import WorkHistogram, bucket_of

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


_numbers = count(1)
_KEY_NODE = attrgetter("key_node")
_ARRIVAL_NODE = attrgetter("arrival_node")


class QueueEntry:
    """A request and its place in the queue. Only the queue changes it."""

    __slots__ = (
        "arrival_node",
        "bucket",
        "cached",
        "class_name",
        "cost_s",
        "evictions",
        "group",
        "key",
        "key_node",
        "last_cached",
        "missing",
        "request",
        "resumed",
        "seq",
        "usable",
    )

    def __init__(self, request: Waiting, page_size: int) -> None:
        self.request = request
        self.usable = min(len(request.block_hashes), max(0, request.tokens - 1) // page_size)
        """Blocks whose KV can come from the cache. The last token is always computed."""
        self.class_name = ""
        self.seq = 0
        """Arrival number within the class."""
        self.group = 0
        self.key = 0.0
        self.cost_s = 0.0
        self.cached = 0
        """Leading blocks that were cached at the last evaluation."""
        self.missing: BlockHash | None = None
        """The first block that is not cached. `PrefixIndex` files the entry under it."""
        self.last_cached: BlockHash | None = None
        """The last block of the cached prefix at the last evaluation."""
        self.evictions = -1
        """`PrefixIndex.evictions` at the last look-up of the blocks."""
        self.resumed = False
        """The request was preempted. It goes first, and its class has already paid for it."""
        self.bucket = 0
        """Bucket of its cost in `WorkHistogram`."""
        self.key_node = 0
        """Number of the live node in the heap by key; 0 if the request does not wait."""
        self.arrival_node = 0
        """Number of the live node in the heap by arrival; 0 if the request does not wait."""


class ClassQueue:
    """A priority queue that also knows the oldest entry. Every operation is O(log n)."""

    def __init__(self) -> None:
        self.work = WorkHistogram()
        self.tokens = 0
        """Prompt tokens of all entries."""
        self._by_key: dict[int, LazyHeap[QueueEntry]] = {}  # one heap per group
        self._by_arrival: LazyHeap[QueueEntry] = LazyHeap(_ARRIVAL_NODE)
        self._oldest: QueueEntry | None = None  # known until it leaves or an older entry comes
        self._size = 0
        self._next_seq = 0
        self._group: int | None = None
        self._aside: list[int] = []
        """Arrival numbers of entries taken in this scan and not started, in order."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueueEntry]:
        """The entries by key, then by arrival."""
        nodes = (node for heap in self._by_key.values() for node in heap)
        yield from (node[3] for node in sorted(nodes))

    def append(self, entry: QueueEntry) -> None:
        """Add an entry as the newest. Its key and cost are set."""
        entry.seq = self._next_seq
        self._next_seq += 1
        self._enter(entry)

    def put_first(self, entry: QueueEntry) -> None:
        """Add an entry as the oldest."""
        oldest = self.oldest()
        entry.seq = (oldest.seq if oldest else self._next_seq) - 1
        self._oldest = None
        self._enter(entry)

    def put_back(self, entry: QueueEntry) -> None:
        """Add an entry again at its old place, with its old key and `seq`."""
        self._oldest = None
        place = bisect_left(self._aside, entry.seq)
        if place < len(self._aside) and self._aside[place] == entry.seq:
            del self._aside[place]
        self._enter(entry)

    def set_aside(self, entry: QueueEntry) -> None:
        """Note that an entry was taken and not started. It comes back (`put_back`) before the next scan."""
        insort(self._aside, entry.seq)

    def move(self, entry: QueueEntry, key: float, cost_s: float) -> None:
        """Give an entry a new key and cost."""
        if cost_s != entry.cost_s:
            self.work.add(entry.bucket, -entry.cost_s)
            entry.cost_s, entry.bucket = cost_s, bucket_of(cost_s)
            self.work.add(entry.bucket, cost_s)
        if key != entry.key:
            entry.key = key
            self._push(entry)

    def remove(self, entry: QueueEntry) -> None:
        """Take an entry out."""
        if entry is self._oldest:
            self._oldest = None
        self._size -= 1
        entry.key_node = entry.arrival_node = 0
        self.tokens -= entry.request.tokens
        self.work.add(entry.bucket, -entry.cost_s)

    def oldest(self) -> QueueEntry | None:
        """The entry that arrived first."""
        if self._oldest is None and self._size:
            node = self._by_arrival.first()
            self._oldest = node[3] if node else None
        return self._oldest

    def overtaken(self) -> int:
        """The number of requests that arrived after the oldest entry and left before it.

        Arrival numbers have no gaps. So this counts the numbers above the oldest's that no longer wait, except for
        entries that were only set aside. No other entry was overtaken more often, because every request that overtook
        it arrived after the oldest too.
        """
        oldest = self._oldest or self.oldest()
        if oldest is None:
            return 0
        aside = len(self._aside) - bisect_right(self._aside, oldest.seq)
        return self._next_seq - oldest.seq - self._size - aside

    def first(self) -> QueueEntry | None:
        """The entry with the smallest key in the current group.

        A group is served until it is empty, or until `begin_scan`. After `begin_scan`, the next group is the oldest
        entry's group. Otherwise it is the nearest by number.
        """
        if self._group is None and (oldest := self._oldest or self.oldest()):
            self._group = oldest.group
        while self._group is not None:
            heap = self._by_key.get(self._group)
            node = heap.first() if heap else None
            if node:
                return node[3]
            self._by_key.pop(self._group, None)
            here = self._group
            self._group = min(self._by_key, key=lambda other: abs(other - here), default=None)
        return None

    def upcoming(self) -> Iterator[QueueEntry]:
        """The entries of the current group, by key; see `LazyHeap.in_order`."""
        heap = self._by_key.get(self._group) if self._group is not None else None
        return (node[3] for node in heap.in_order()) if heap else iter(())

    def begin_scan(self) -> None:
        """Let `first` choose a group again. Entries that were set aside and are not back have left."""
        self._group = None
        self._aside = []

    def _enter(self, entry: QueueEntry) -> None:
        self._size += 1
        self.tokens += entry.request.tokens
        entry.bucket = bucket_of(entry.cost_s)
        self.work.add(entry.bucket, entry.cost_s)
        self._push(entry)
        entry.arrival_node = next(_numbers)
        self._by_arrival.push((0.0, entry.seq, entry.arrival_node, entry), self._size)

    def _push(self, entry: QueueEntry) -> None:
        entry.key_node = next(_numbers)
        heap = self._by_key.get(entry.group)
        if heap is None:
            heap = self._by_key[entry.group] = LazyHeap(_KEY_NODE)
        heap.push((entry.key, entry.seq, entry.key_node, entry), self._size)
