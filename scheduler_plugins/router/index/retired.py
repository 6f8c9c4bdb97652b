# SPDX-License-Identifier: Apache-2.0
"""Returns the memory of a table that has grown to the system, in pieces."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 256 << 10
"""Bytes that are freed in one call, in about 20 us. Freeing all at once would block the caller for 0.1 ms per MiB."""


def private_words(count: int) -> NDArray[np.uint64]:
    """`count` zero words of private memory.

    The memory uses small pages. For numpy's own arrays the system uses pages of 2 MiB. It clears each at its first touch,
    and can move other memory first to get a contiguous one. One look-up took up to 25 ms that way.
    """
    memory = mmap.mmap(-1, count * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint64)


class Retired:
    """Pieces from `private_words` that are no longer in use."""

    def __init__(self) -> None:
        self._maps: deque[mmap.mmap] = deque()
        self._given = 0  # freed bytes of the first piece
        self._owed = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are not freed yet."""
        return sum(map(len, self._maps)) - self._given

    def add(self, words: NDArray[Any]) -> None:
        """Take over a piece. `words`: the result of `private_words`, or a view of it."""
        owner: object = words
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, memoryview)
        self._maps.append(owner.obj)  # type: ignore[arg-type]

    def give_back(self, count: int) -> None:
        """Free `count` more bytes. A small count is saved up for a later call."""
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
