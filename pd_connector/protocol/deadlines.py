# SPDX-License-Identifier: Apache-2.0
"""Which of many deadlines have passed, without looking at all of them."""

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A time at which to look at each key. Costs O(log n) a change, and nothing at rest.

    A deadline that moves to a later time need not be set again: when the earlier time comes, its
    owner looks at the key, and sets the later one.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._numbers = itertools.count()  # keys need not be comparable

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """Look at this key at time `at`, or at the time set before, if that is earlier. Infinity
        sets nothing."""
        if at >= self._at.get(key, float("inf")):
            return
        self._at[key] = at
        heapq.heappush(self._heap, (at, next(self._numbers), key))
        if len(self._heap) > 64 + 2 * len(self._at):
            self._heap = [e for e in self._heap if self._at.get(e[2]) == e[0]]
            heapq.heapify(self._heap)

    def at(self, key: K) -> float:
        """When this key will be looked at."""
        return self._at.get(key, float("inf"))

    def discard(self, key: K) -> None:
        """Look at this key no more."""
        self._at.pop(key, None)

    def due(self, now: float) -> list[K]:
        """Keys whose time has come, earliest first. They are forgotten here."""
        found: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                found.append(key)
        return found
