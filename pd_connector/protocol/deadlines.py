# SPDX-License-Identifier: Apache-2.0
"""Finds the deadlines that have passed among many, without a look at each."""

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A deadline for each key. A change costs O(log n); at rest there is no cost.

    A deadline that moves to a later time need not be set again. When the earlier time comes, `due` returns the key, and
    its owner sets the later time.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._numbers = itertools.count()  # keys need not be comparable

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """Set the key's deadline to `at`, in seconds. If the key has an earlier deadline, that stays. Infinity sets
        nothing."""
        if at >= self._at.get(key, float("inf")):
            return
        self._at[key] = at
        heapq.heappush(self._heap, (at, next(self._numbers), key))
        if len(self._heap) > 64 + 2 * len(self._at):
            self._heap = [e for e in self._heap if self._at.get(e[2]) == e[0]]
            heapq.heapify(self._heap)

    def at(self, key: K) -> float:
        """The key's deadline; infinity if it has none."""
        return self._at.get(key, float("inf"))

    def discard(self, key: K) -> None:
        """Forget the key's deadline."""
        self._at.pop(key, None)

    def due(self, now: float) -> list[K]:
        """The keys whose deadlines have passed, the earliest first. Their deadlines are forgotten."""
        expired: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                expired.append(key)
        return expired
