# SPDX-License-Identifier: Apache-2.0
"""The waiting requests of one class, by key and by arrival."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from operator import attrgetter

from scheduler_plugins.queue.heap import LazyHeap
from scheduler_plugins.queue.place import Place
from scheduler_plugins.queue.work import WorkByCost, bucket_of

_numbers = count(1)
_PUSH = attrgetter("push")
_STAY = attrgetter("stay")


class Lane:
    """Every operation is O(log n): a place that moves or goes leaves its entries behind, see
    `LazyHeap`.
    """

    def __init__(self) -> None:
        self.work = WorkByCost()
        self.tokens = 0
        """Prompt tokens of all places."""
        self._by_key: dict[int, LazyHeap] = {}
        self._by_arrival = LazyHeap(_STAY)
        self._oldest: Place | None = None  # known until it leaves or an older one comes
        self._size = 0
        self._next_seq = 0
        self._group: int | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Place]:
        """The places by key, then by arrival."""
        entries = (entry for heap in self._by_key.values() for entry in heap)
        yield from (entry[3] for entry in sorted(entries))

    def append(self, place: Place) -> None:
        """Let a place in as the last to arrive. Its key and cost are set."""
        place.seq = self._next_seq
        self._next_seq += 1
        self._enter(place)

    def put_first(self, place: Place) -> None:
        """Let a place in as the first to have arrived."""
        oldest = self.oldest()
        place.seq = (oldest.seq if oldest else self._next_seq) - 1
        self._oldest = None
        self._enter(place)

    def put_back(self, place: Place) -> None:
        """Let a place in again where it was: its key and `seq` are what they were."""
        self._oldest = None
        self._enter(place)

    def move(self, place: Place, key: float, cost_s: float) -> None:
        """Give a place a new key and cost."""
        if cost_s != place.cost_s:
            self.work.add(place.bucket, -place.cost_s)
            place.cost_s, place.bucket = cost_s, bucket_of(cost_s)
            self.work.add(place.bucket, cost_s)
        if key != place.key:
            place.key = key
            self._push(place)

    def take(self, place: Place) -> None:
        """Let a place go."""
        if place is self._oldest:
            self._oldest = None
        self._size -= 1
        place.push = place.stay = 0
        self.tokens -= place.request.tokens
        self.work.add(place.bucket, -place.cost_s)

    def oldest(self) -> Place | None:
        """The place that arrived first."""
        if self._oldest is None and self._size:
            entry = self._by_arrival.first()
            self._oldest = entry[3] if entry else None
        return self._oldest

    def overtaken(self) -> int:
        """How many that arrived after the oldest place have left before it.

        Numbers were given without a gap, so it is those above the oldest's that wait no more. No
        other place has been overtaken by more: whoever overtook it arrived after the oldest too.
        """
        oldest = self._oldest or self.oldest()
        return self._next_seq - oldest.seq - self._size if oldest else 0

    def first(self) -> Place | None:
        """The place with the smallest key in the group that is being served.

        A group is served until it is empty, or `turn` ends its turn. The next is that of the oldest
        place when a turn begins, else the nearest by number.
        """
        if self._group is None and (oldest := self._oldest or self.oldest()):
            self._group = oldest.group
        while self._group is not None:
            heap = self._by_key.get(self._group)
            entry = heap.first() if heap else None
            if entry:
                return entry[3]
            self._by_key.pop(self._group, None)
            here = self._group
            self._group = min(self._by_key, key=lambda other: abs(other - here), default=None)
        return None

    def upcoming(self) -> Iterator[Place]:
        """The places of the group that is being served, by key; see `LazyHeap.in_order`."""
        heap = self._by_key.get(self._group) if self._group is not None else None
        return (entry[3] for entry in heap.in_order()) if heap else iter(())

    def turn(self) -> None:
        """End the turn of the group that is being served."""
        self._group = None

    def _enter(self, place: Place) -> None:
        self._size += 1
        self.tokens += place.request.tokens
        place.bucket = bucket_of(place.cost_s)
        self.work.add(place.bucket, place.cost_s)
        self._push(place)
        place.stay = next(_numbers)
        self._by_arrival.push((0.0, place.seq, place.stay, place), self._size)

    def _push(self, place: Place) -> None:
        place.push = next(_numbers)
        heap = self._by_key.get(place.group)
        if heap is None:
            heap = self._by_key[place.group] = LazyHeap(_PUSH)
        heap.push((place.key, place.seq, place.push, place), self._size)
