# SPDX-License-Identifier: Apache-2.0
"""SlowProbes keys up in a hash table of 64-bit words. `table.HashTable` writes it, in this process or in another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BUCKET = 8
"""Slots of a bucket. A bucket fills one cache line of the processor, so it is read as a whole."""
FEW = 24
"""At most this many keys are looked up one by one, which is faster than a dozen numpy calls."""
WORD = (1 << 64) - 1
_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)

Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]


class TableReader:
    """SlowProbes keys up in a table. The table may belong to another process, which writes to it at any time.

    A key is searched in one bucket, then in further buckets (double hashing). The slots of a bucket are taken in
    order and stay taken, so the search ends at a bucket whose last slot is free.
    """

    def __init__(self, block: Keys, slots: int, words: int, mix: int) -> None:
        """Read the memory of a `HashTable`.

        Args:
            block: the table's memory: the keys of all slots, then their rows.
            slots, words, mix: `capacity`, `words` and `mix` of the writer.
        """
        self.mix = mix
        self._use(block, slots, words)

    def _use(self, block: Keys, slots: int, words: int) -> None:
        self.block = block
        self.cells = block.data.cast("B").cast("Q") if len(block) else memoryview(b"").cast("Q")
        """The same memory: the keys, then the rows, word by word."""
        self._keys = block[:slots].reshape(-1, BUCKET)
        self.rows = block[slots : slots * (1 + words)].reshape(slots, words)
        """Shape (slots, words)."""

    @property
    def capacity(self) -> int:
        """Slots."""
        return int(self._keys.size)

    @property
    def words(self) -> int:
        """64-bit words of a row."""
        return int(self.rows.shape[1])

    def find(self, keys: Keys) -> Slots:
        """The slots of these keys; -1 for a key that never came. The row may be zero.

        Args:
            keys: shape (n,); none is 0.
        """
        if len(keys) <= FEW:
            return np.array([self._find_one(key) for key in keys.tolist()], np.int64)
        mixed = keys * np.uint64(self.mix)
        buckets = self._first(mixed)
        found = np.full(len(keys), -1, np.int64)
        pending: Slots | None = None
        while len(keys):
            lines = self._keys[buckets]
            (hits,) = (lines == keys[:, None]).ravel().nonzero()
            which = hits // BUCKET
            slots = buckets[which] * BUCKET + hits % BUCKET
            full = lines[:, -1] != 0
            full[which] = False
            (go_on,) = full.nonzero()
            if pending is None:
                found[which], pending = slots, go_on
            else:
                found[pending[which]], pending = slots, pending[go_on]
            keys, mixed = keys[go_on], mixed[go_on]
            buckets = (buckets[go_on] + self._steps(mixed)) % len(self._keys)
        return found

    def row_of(self, key: int) -> int:
        """The row of one key as a number, the first word lowest; 0 if the key never came."""
        slot, words, row = self._find_one(key), self.words, 0
        if slot >= 0:
            first = self.capacity + slot * words
            for n, word in enumerate(self.cells[first : first + words].tolist()):
                row |= word << 64 * n
        return row

    def _find_one(self, key: int) -> int:
        """As `find`, for one key."""
        cells, buckets, bucket = self.cells, len(self._keys), -1
        mixed = key * self.mix & WORD
        while buckets:
            bucket = self._next(bucket, mixed, buckets)
            first = bucket * BUCKET
            line = cells[first : first + BUCKET].tolist()
            if key in line:
                return first + line.index(key)
            if not line[-1]:
                break
        return -1

    def _next(self, bucket: int, mixed: int, buckets: int) -> int:
        """The next bucket on a key's way; the first bucket if `bucket` is -1."""
        if bucket < 0:
            return (mixed >> 32) * buckets >> 32
        return (bucket + ((mixed & 0xFFFFFFFF) * (buckets - 1) >> 32) + 1) % buckets

    def _first(self, mixed: Keys) -> Slots:
        """The first bucket of each key: the upper half of the mixed key, scaled to the number of buckets without a
        division."""
        scaled: Keys = (mixed >> _HALF) * np.uint64(len(self._keys)) >> _HALF
        return scaled.view(np.int64)

    def _steps(self, mixed: Keys) -> Slots:
        """The step from one bucket to the next, at least 1."""
        scaled: Keys = (mixed & _LOWER) * np.uint64(len(self._keys) - 1) >> _HALF
        return scaled.view(np.int64) + 1
