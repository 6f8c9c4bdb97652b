# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests gain when a block is cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence

from scheduler_plugins.order.request import BlockHash
from scheduler_plugins.queue.place import Place


class Prefixes:
    """Looks up cached prefixes, and files each place under its first block that is not cached.

    A block that is cached makes the places filed under it `stale`, which costs nothing per place;
    they are looked up again when the order is next needed. A prefill that fills 1,000 blocks in ten
    steps thus costs its waiters one look-up each, not 1,000.
    """

    def __init__(self, cached: Container[BlockHash]) -> None:
        self._cached = cached
        self._under: dict[BlockHash, dict[Place, None]] = {}
        self._found: dict[BlockHash, int] = {}
        self.evictions = 0
        """How often blocks were evicted: a place that was looked up before may have lost some."""
        self._walked: dict[BlockHash, tuple[Sequence[BlockHash], int]] = {}
        self.stale: deque[Place] = deque()
        """Places whose cost may have fallen since they were looked up."""

    def added(self, blocks: Iterable[BlockHash]) -> None:
        """Blocks can be read from the cache now."""
        self._walked = {}
        under = self._under
        for block in blocks:
            if block in under:
                waiters = under.pop(block)
                for place in waiters:
                    place.missing = None
                self.stale.extend(waiters)

    def removed(self) -> None:
        """Blocks were evicted. Who lost by it is found when it comes to the head."""
        self._walked = {}
        self.evictions += 1

    def wanted(self, block: BlockHash) -> bool:
        """Whether the cached prefix of some place ends with this block."""
        return block in self._found

    def look_up(self, place: Place) -> None:
        """Set `place.cached` to what is cached now, and file it if something is missing."""
        hashes, usable = place.request.block_hashes, place.usable
        start = 0 if place.evictions != self.evictions else place.cached
        end = self._walk(hashes, start, usable)
        place.cached = end
        place.evictions = self.evictions
        self.forget(place)
        if end:
            found = hashes[end - 1]
            place.found = found
            self._found[found] = self._found.get(found, 0) + 1
        if end < usable:
            missing = hashes[end]
            place.missing = missing
            self._under.setdefault(missing, {})[place] = None

    def forget(self, place: Place) -> None:
        """Take a place out of the files."""
        if place.found is not None:
            count = self._found.pop(place.found) - 1
            if count:
                self._found[place.found] = count
            place.found = None
        if place.missing is not None:
            waiters = self._under[place.missing]
            del waiters[place]
            if not waiters:
                del self._under[place.missing]
            place.missing = None

    def count(self, request_hashes: Sequence[BlockHash], usable: int) -> int:
        """How many leading blocks are cached, out of the first `usable`."""
        return self._walk(request_hashes, 0, usable)

    def stale_all(self, places: Iterable[Place]) -> None:
        """Everything has to be evaluated anew."""
        self.stale = deque(places)

    def drain(self, most: int) -> Sequence[Place]:
        """Take up to `most` places from `stale`; those that wait no more are dropped."""
        stale = self.stale
        drained: list[Place] = []
        while stale and len(drained) < most:
            place = stale.popleft()
            if place.push:
                drained.append(place)
        return drained

    def _walk(self, hashes: Sequence[BlockHash], start: int, usable: int) -> int:
        """Index of the first block at or after `start` that is not cached.

        Requests that share a prefix walk the same blocks: the way of the first is remembered until
        the cache changes, and equal hashes mean equal ways, so the others need one comparison.
        """
        if start >= usable:
            return start
        known = self._walked.get(hashes[start])
        end = _common(hashes, known[0], start, min(known[1], usable)) if known else start
        cached = self._cached
        while end < usable and hashes[end] in cached:
            end += 1
        if known is None or end > known[1]:
            self._walked[hashes[start]] = (hashes, end)
        return end


def _common(a: Sequence[BlockHash], b: Sequence[BlockHash], low: int, high: int) -> int:
    """The largest end in `low..high` up to which both are equal; up to `low` they are."""
    if low < high and a[high - 1] == b[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
