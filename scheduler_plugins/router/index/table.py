# SPDX-License-Identifier: Apache-2.0
"""A hash table from 64-bit keys to rows of 64-bit words, many keys at a time.

A dictionary of Python's integers takes over 100 bytes an entry. Here an entry takes 8 bytes and 8 for each word, at a
load of a half or more, and a look-up of thousands of keys is a few calls of numpy.
"""

from __future__ import annotations

import secrets
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_LOAD_AFTER = 0.5
"""Share of the slots that are taken after the table was made anew."""
_LOAD_MOST = 0.72
_SMALLEST = 64
_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)

Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]


class HashTable:
    """Open addressing with double hashing. A row of zeros counts as absent; its slot is used again.

    Slots are valid until the next `claim`.
    """

    def __init__(self, words: int = 1) -> None:
        """`words`: 64-bit words of a row."""
        # Secret, so that nobody can choose keys that collide.
        self._mix = np.uint64(secrets.randbits(64) | 1)
        self._used = 0
        self._allocate(_SMALLEST, words)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._keys.nbytes + self.rows.nbytes + self._taken.nbytes

    @property
    def capacity(self) -> int:
        """Slots."""
        return len(self._keys)

    def find(self, keys: Keys) -> Slots:
        """The slots of these keys; -1 for those that never came. The row may be zero.

        Args:
            keys: shape (n,); none is 0.
        """
        mixed = keys * self._mix
        slots = self._first(mixed)
        at = self._keys[slots]
        same = at == keys
        found = np.where(same, slots, -1)
        pending = np.flatnonzero((at != 0) & ~same)
        slots, keys, steps = slots[pending], keys[pending], self._steps(mixed[pending])
        while len(pending):
            slots = (slots + steps) % self.capacity
            at = self._keys[slots]
            same = at == keys
            found[pending[same]] = slots[same]
            go_on = np.flatnonzero((at != 0) & ~same)
            pending, keys, steps, slots = pending[go_on], keys[go_on], steps[go_on], slots[go_on]
        return found

    def claim(self, keys: Keys) -> Slots:
        """The slots of these keys, new ones with a row of zeros. A key may come twice."""
        if self._used + len(keys) > _LOAD_MOST * self.capacity:
            self._rebuild(len(keys), self.words)
        slots = self.find(keys)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            present = slots[slots >= 0]
            self._taken[present] = True  # their rows may be zero, but they are wanted
            fresh, where = np.unique(keys[absent], return_inverse=True)
            slots[absent] = self._insert(fresh)[where]
            self._taken[present] = False
        return slots

    def put(self, keys: Keys, values: Keys | int) -> None:
        """Set the first words of these keys' rows. Of a key that comes twice, the last value stays."""
        slots = self.claim(keys)
        self.rows[slots, 0] = values

    @property
    def words(self) -> int:
        return int(self.rows.shape[1])

    def widen(self, words: int) -> None:
        """Give every row `words` words; those that are added are zero."""
        self._rebuild(0, words)

    def _insert(self, keys: Keys) -> Slots:
        """Slots for keys that are distinct and absent: the first on their way that is empty or has a row of zeros."""
        found = np.empty(len(keys), np.int64)
        pending = np.arange(len(keys))
        mixed = keys * self._mix
        slots, steps = self._first(mixed), self._steps(mixed)
        while len(pending):
            before = self._keys[slots]
            free = (before == 0) | ~self.rows[slots].any(axis=1)
            # Zero rows of keys that were placed in this very call are not free.
            free &= ~self._taken[slots]
            self._keys[slots[free]] = keys[free]
            # Of several keys that wanted one slot, the last one written has it.
            won = free & (self._keys[slots] == keys)
            self._used += int(np.count_nonzero(won & (before == 0)))
            self._taken[slots[won]] = True
            found[pending[won]] = slots[won]
            lost = ~won
            pending, keys, steps = pending[lost], keys[lost], steps[lost]
            slots = (slots[lost] + steps) % self.capacity
        self._taken[found] = False
        return found

    def _first(self, mixed: Keys) -> Slots:
        """Where to look first: the upper half of the mixed key, scaled to the capacity without a division."""
        scaled: Keys = (mixed >> _HALF) * np.uint64(self.capacity) >> _HALF
        return scaled.view(np.int64)

    def _steps(self, mixed: Keys) -> Slots:
        """How far to go from one slot to the next: at least 1."""
        scaled: Keys = (mixed & _LOWER) * np.uint64(self.capacity - 1) >> _HALF
        return scaled.view(np.int64) + 1

    def _rebuild(self, more: int, words: int) -> None:
        """Make the table anew for what it holds and `more` keys, without rows of zeros."""
        held = np.flatnonzero(self.rows.any(axis=1))
        keys, rows = self._keys[held], self.rows[held]
        self._allocate(int((len(held) + more) / _LOAD_AFTER), words)
        if len(keys):
            self.rows[self._insert(keys), : rows.shape[1]] = rows

    def _allocate(self, capacity: int, words: int) -> None:
        # A prime, so that every step visits every slot.
        capacity = _prime_from(max(_SMALLEST, capacity))
        self._keys = np.zeros(capacity, np.uint64)
        self.rows = np.zeros((capacity, words), np.uint64)
        """Shape (slots, words)."""
        self._taken = np.zeros(capacity, np.bool_)  # slots that one call has given out
        self._used = 0


def _prime_from(least: int) -> int:
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, isqrt(number) + 1, 2)):
        number += 2
    return number
