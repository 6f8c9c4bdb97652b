# SPDX-License-Identifier: Apache-2.0
"""A hash table from 64-bit keys to rows of 64-bit words, many keys at a time.

A dictionary of Python's integers takes over 100 bytes an entry. Here an entry takes 8 bytes and 8 for each word, at a
load of a half or more, and a look-up of thousands of keys is a few calls of numpy.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

BUCKET = 8
"""Slots of a bucket: one line of the processor's cache, so that a bucket is looked at as a whole."""
FEW = 24
"""So many keys are looked up one by one, which is faster than a dozen calls of numpy."""
_WORD = (1 << 64) - 1
_LOAD_AFTER = 0.5
"""Share of the slots that are taken after the table was made anew."""
_LOAD_MOST = 0.72
_SMALLEST = 8 * BUCKET
_AT_ONCE = 1 << 16
"""Keys that are placed together when the table is made anew: it bounds the memory that this takes."""
_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)

Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]
Allocate = Callable[[int], Keys]
"""Gives an array of so many zeros."""


def private_words(count: int) -> Keys:
    """Words in this process's own memory."""
    return np.zeros(count, np.uint64)


class TableReader:
    """Looks keys up in a table that may belong to another process, which changes it meanwhile.

    A key's slots are those of its bucket, then those of another bucket, and so on (double hashing). The slots of a
    bucket are taken in order, and a taken slot stays taken, so a bucket whose last slot is free ends the search.
    """

    def __init__(self, block: Keys, slots: int, words: int, mix: int) -> None:
        """Read where `HashTable` writes.

        Args:
            block: the table's memory: the keys of all slots, then their rows.
            slots, words, mix: as the writer's `capacity`, `words` and `mix`.
        """
        self.mix = mix
        self._use(block, slots, words)

    def _use(self, block: Keys, slots: int, words: int) -> None:
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
        """The slots of these keys; -1 for those that never came. The row may be zero.

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

    def _find_one(self, key: int) -> int:
        """As `find`, for one key."""
        cells, buckets, bucket = self.cells, len(self._keys), -1
        mixed = key * self.mix & _WORD
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
        """The bucket after this one on a key's way; the first one after -1."""
        if bucket < 0:
            return (mixed >> 32) * buckets >> 32
        return (bucket + ((mixed & 0xFFFFFFFF) * (buckets - 1) >> 32) + 1) % buckets

    def _first(self, mixed: Keys) -> Slots:
        """The bucket to look at first: the upper half of the mixed key, scaled to the buckets without a division."""
        scaled: Keys = (mixed >> _HALF) * np.uint64(len(self._keys)) >> _HALF
        return scaled.view(np.int64)

    def _steps(self, mixed: Keys) -> Slots:
        """How far to go from one bucket to the next: at least 1."""
        scaled: Keys = (mixed & _LOWER) * np.uint64(len(self._keys) - 1) >> _HALF
        return scaled.view(np.int64) + 1


class HashTable(TableReader):
    """The table, as its one writer has it. A row of zeros counts as absent; its slot is used again.

    Slots are valid until the next `claim`.
    """

    def __init__(self, words: int = 1, allocate: Allocate = private_words) -> None:
        """`words`: 64-bit words of a row."""
        # Secret, so that nobody can choose keys that collide.
        self.mix = secrets.randbits(64) | 1
        self._memory = allocate
        self._used = 0
        self._allocate(_SMALLEST, words)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._keys.nbytes + self.rows.nbytes + self._taken.nbytes

    def claim(self, keys: Keys) -> Slots:
        """The slots of these keys, new ones with a row of zeros. A key may come twice."""
        if self._used + len(keys) > _LOAD_MOST * self.capacity:
            self._rebuild(len(keys), self.words)
        if len(keys) <= FEW:
            given = set[int]()
            return np.array([self._claim_one(key, given) for key in keys.tolist()], np.int64)
        slots = self.find(keys)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            present = slots[slots >= 0]
            self._taken[present] = True  # their rows may be zero, but they are wanted
            wanted = keys[absent]
            if len(set(wanted.tolist())) == len(wanted):
                slots[absent] = self._insert(wanted)
            else:
                fresh, where = np.unique(wanted, return_inverse=True)
                slots[absent] = self._insert(fresh)[where]
            self._taken[present] = False
        return slots

    def _claim_one(self, key: int, given: set[int]) -> int:
        """As `claim`, for one key. `given`: slots that this call has given out."""
        cells, buckets, bucket, free = self.cells, len(self._keys), -1, -1
        mixed = key * self.mix & _WORD
        while True:
            bucket = self._next(bucket, mixed, buckets)
            first = bucket * BUCKET
            line = cells[first : first + BUCKET].tolist()
            if key in line:
                slot = first + line.index(key)
                break
            if free < 0:
                free = self._free_in(first, given)
            if not line[-1]:
                slot = free
                self._used += not cells[slot]
                cells[slot] = key
                break
        given.add(slot)
        return slot

    def _free_in(self, first: int, given: set[int]) -> int:
        """The first slot of a bucket whose row is zero and that is not `given`; -1 if there is none."""
        words, start = self.words, self.capacity + first * self.words
        row = self.cells[start : start + BUCKET * words].tolist()
        for n in range(BUCKET):
            at = n * words
            zero = not row[at] and (words == 1 or not any(row[at : at + words]))
            if zero and first + n not in given:
                return first + n
        return -1

    def put(self, keys: Keys, values: Keys | int) -> None:
        """Set the first words of these keys' rows. Of a key that comes twice, the last value stays."""
        slots = self.claim(keys)
        self.rows[slots, 0] = values

    def widen(self, words: int) -> None:
        """Give every row `words` words; those that are added are zero."""
        self._rebuild(0, words)

    def _insert(self, keys: Keys) -> Slots:
        """Slots for keys that are distinct and absent: the first on their way that is empty or has a row of zeros."""
        found = np.empty(len(keys), np.int64)
        pending = np.arange(len(keys))
        mixed = keys * np.uint64(self.mix)
        buckets, flat, lanes = self._first(mixed), self._keys.reshape(-1), np.arange(BUCKET)
        while len(pending):
            lines = buckets[:, None] * BUCKET + lanes
            # A slot that was never taken has a row of zeros as well.
            rows = self.rows[lines]
            used = rows[:, :, 0] != 0 if self.words == 1 else rows.any(axis=2)
            # Zero rows of keys that were placed in this very call are not free.
            used |= self._taken[lines]
            first = used.argmin(axis=1)
            slots = buckets * BUCKET + first
            fits = ~used[np.arange(len(first)), first]
            before = flat[slots]
            flat[slots[fits]] = keys[fits]
            # Of several keys that wanted one slot, the last one written has it.
            placed = fits & (flat[slots] == keys)
            self._used += int(np.count_nonzero(placed & (before == 0)))
            won = slots[placed]
            self._taken[won] = True
            found[pending[placed]] = won
            if len(won) == len(pending):
                break
            # Whoever found no room goes on to the next bucket; whoever lost a slot looks at this one again.
            moved = (buckets + self._steps(mixed)) % len(self._keys)
            buckets = np.where(fits, buckets, moved)
            left = ~placed
            pending, keys, mixed, buckets = pending[left], keys[left], mixed[left], buckets[left]
        self._taken[found] = False
        return found

    def _rebuild(self, more: int, words: int) -> None:
        """Make the table anew for what it holds and `more` keys, without rows of zeros."""
        held = np.flatnonzero(self.rows.any(axis=1))
        keys, rows = self._keys.reshape(-1)[held], self.rows[held]
        self._allocate(int((len(held) + more) / _LOAD_AFTER), words)
        for at in range(0, len(keys), _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            self.rows[self._insert(keys[part]), : rows.shape[1]] = rows[part]

    def _allocate(self, capacity: int, words: int) -> None:
        # A prime, so that every step visits every bucket.
        slots = BUCKET * _prime_from(-(-max(_SMALLEST, capacity) // BUCKET))
        self._use(self._memory(slots * (1 + words)), slots, words)
        self._taken = np.zeros(slots, np.bool_)  # slots that one call has given out
        self._used = 0


def _prime_from(least: int) -> int:
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, isqrt(number) + 1, 2)):
        number += 2
    return number
