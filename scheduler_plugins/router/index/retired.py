# SPDX-License-Identifier: Apache-2.0
"""Memory that a table used before it grew, on its way back to the system."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 256 << 10
"""Bytes that are given back in one call, some 20 us. All at once would take 0.1 ms for each MiB, in the call that drops the last reference."""


def private_words(count: int) -> NDArray[np.uint64]:
    """So many words of this process's own memory, all zero.

    The system gives it in small pages. For numpy's own arrays it clears 2 MiB whenever a new piece is touched, and may move other
    memory to have so much in one place: up to 25 ms were seen for one look-up.
    """
    memory = mmap.mmap(-1, count * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint64)


class Retired:
    """Pieces from `private_words` that nobody reads or writes any more."""

    def __init__(self) -> None:
        self._maps: deque[mmap.mmap] = deque()
        self._given = 0  # bytes of the first one
        self._owed = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are still to be given back."""
        return sum(map(len, self._maps)) - self._given

    def add(self, words: NDArray[Any]) -> None:
        """`words`: as `private_words` returned them, or a view."""
        owner: object = words
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, memoryview)
        self._maps.append(owner.obj)  # type: ignore[arg-type]

    def give_back(self, count: int) -> None:
        """Give so many bytes more back, or some later if they are few."""
        self._owed += count if self._maps else 0
        while self._maps and self._owed >= _AT_ONCE:
            first = self._maps[0]
            size = min(_AT_ONCE, len(first) - self._given)
            first.madvise(mmap.MADV_DONTNEED, self._given, size)
            self._given += size
            self._owed -= _AT_ONCE
            if self._given == len(first):
                self._maps.popleft()
                self._given = 0
