# SPDX-License-Identifier: Apache-2.0
"""A hash table from 64-bit keys to rows of 64-bit words, many keys at a time, that grows while it is used.

A dictionary of Python integers takes over 100 bytes an entry. Here a slot takes 8 bytes plus 8 for each word, and
about half of the slots are used. A look-up of thousands of keys takes a few numpy calls.
"""

from __future__ import annotations

import secrets
from math import isqrt
from typing import Protocol

import numpy as np

from scheduler_plugins.router.index.fixed_table import FixedTable
from scheduler_plugins.router.index.retired import Retired, private_words
from scheduler_plugins.router.index.table_reader import BUCKET, Keys, Slots

_LOAD_AFTER = 0.5
"""Largest share of taken slots in a new table when the copy has ended."""
_LOAD_BEGIN = 0.6
"""A larger table is begun at this share of taken slots."""
_LOAD_MOST = 0.75
"""The copy has ended before this share of slots is taken: each new key copies `_COPIED` slots, so all are copied
after `1 / _COPIED` of the capacity."""
_COPIED = 8
"""Slots that are copied to the larger table per claimed key."""
_PIECE = 1024
"""Fewest slots that are copied at once: the dozen numpy calls cost the same for one slot."""
_AT_ONCE = 1 << 16
"""Most slots that are copied at once. It bounds the memory of the copy."""
_SMALL = 1 << 14
"""A table of at most this many slots is copied as a whole, in a few milliseconds."""
_SAMPLE = 1 << 16
"""Number of slots in the sample that estimates the share of rows that are not zero."""
_SMALLEST = 8 * BUCKET
_GIVEN_BACK = 512
"""Bytes of the previous table that are freed per claimed key. It is all freed long before the table grows again."""


class Memory(Protocol):
    """Provides the memory of a table. Other processes may read it."""

    def new(self, words: int) -> Keys:
        """`words` zero words. The table still uses the memory from earlier calls."""

    def adopted(self) -> None:
        """From now on, the table uses only the memory from the last call of `new`."""

    def renumbered(self) -> None:
        """The meaning of the bits in rows has changed."""


class PrivateMemory:
    """Private memory of this process."""

    def new(self, words: int) -> Keys:
        return private_words(words)

    def adopted(self) -> None:
        pass

    def renumbered(self) -> None:
        pass


class HashTable(FixedTable):
    """A table that grows. After a write to `rows`, call `changed`.

    A larger table is filled beside the old one, a piece with each `claim`, so no call takes longer in a large table.
    Until the larger table is complete, all reads and writes go to the old table. Writes to slots that are already
    copied go to both. Readers in other processes see one complete table at any time.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        """`memory`: None means private memory."""
        self._memory = memory or PrivateMemory()
        slots = _slots(_SMALLEST)
        # The factor is secret, so clients cannot choose keys that collide.
        block = self._memory.new(slots * 2)  # a key and a row of one word
        super().__init__(block, slots, 1, secrets.randbits(64) | 1)
        self._memory.adopted()
        self._larger: FixedTable | None = None
        self._copied = 0  # slots of this table that are copied to the larger one
        self._owed = 0  # slots that are due to be copied
        self._retired = Retired()

    def claim(self, keys: Keys) -> Slots:
        self._make_room(len(keys))
        return super().claim(keys)

    @property
    def grows(self) -> bool:
        """Whether a larger table is being filled."""
        return self._larger is not None

    def changed(self, slots: Slots) -> None:
        """Call after a write to the rows of these slots."""
        larger = self._larger
        if larger is None:
            return
        slots = slots[slots < self._copied]
        keys, there = self._keys.reshape(-1)[slots], self.rows[slots].any(axis=1)
        # A removed key may return in a slot that is not copied yet, so absent keys must leave the larger table.
        larger.forget(keys[~there])
        where = larger.claim(keys[there])
        larger.rows[where, : self.words] = self.rows[slots[there]]

    def put(self, keys: Keys, values: Keys | int) -> None:
        """Set the first word of each key's row. If a key comes twice, its last value counts."""
        slots = self.claim(keys)
        self.rows[slots, 0] = values
        self.changed(slots)

    def clear(self, slots: Slots) -> None:
        """Set the rows of these slots to zero: their keys are absent."""
        self.rows[slots] = 0
        self.changed(slots)

    def widen(self, words: int) -> None:
        """Give every row `words` words. New words are zero. The whole table is copied at once."""
        self._begin(0, words)
        self._finish()

    def _make_room(self, more: int) -> None:
        """Ensure that `more` keys fit, and copy a piece if a larger table is being filled."""
        self._retired.give_back(more * _GIVEN_BACK)
        if self._larger is None:
            if self.used + more <= _LOAD_BEGIN * self.capacity:
                return
            self._begin(more, self.words)
        self._owed += more * _COPIED
        if self._owed >= _PIECE:
            self._advance(self._owed)
            self._owed = 0
        # Copy a small table at once. Copy any table at once if too many keys come for a copy in pieces.
        if self.capacity <= _SMALL or self.used + more > _LOAD_MOST * self.capacity:
            self._finish()
        elif self._copied == self.capacity:
            self._adopt()
        if self.used + more > _LOAD_MOST * self.capacity:
            # The larger table was sized for fewer keys.
            self._begin(more, self.words)
            self._finish()

    def _begin(self, more: int, words: int) -> None:
        """Begin a larger table for the current keys and `more` new ones. The copy starts from the first slot."""
        sample = self.rows[:_SAMPLE]
        held = np.count_nonzero(sample.any(axis=1)) * self.capacity / len(sample)
        # Most keys that come until all slots are copied.
        meanwhile = self.capacity / _COPIED
        slots = _slots(int((held + more + meanwhile) / _LOAD_AFTER))
        block = self._memory.new(slots * (1 + words))
        self._larger = FixedTable(block, slots, words, self.mix)
        self._copied = self._owed = 0

    def finish(self) -> None:
        """Copy all remaining slots, if a larger table is being filled."""
        if self._larger is not None:
            self._finish()

    def _finish(self) -> None:
        self._advance(self.capacity)
        self._adopt()

    def _advance(self, slots: int) -> None:
        """Copy the next `slots` slots. Both tables are roughly in the order of the mixed keys, so the copy passes
        through memory once."""
        larger = self._larger
        assert larger is not None
        end = min(self.capacity, self._copied + slots)
        for first in range(self._copied, end, _AT_ONCE):
            last = min(end, first + _AT_ONCE)
            rows = self.rows[first:last]
            held = np.flatnonzero(rows[:, 0] if self.words == 1 else rows.any(axis=1))
            where = larger.place(self._keys.reshape(-1)[first:last][held])
            larger.rows[where, : self.words] = rows[held]
        self._copied = end

    def _adopt(self) -> None:
        """Switch to the larger table, which is complete."""
        larger, self._larger = self._larger, None
        assert larger is not None
        self._retired.add(self._taken)
        if isinstance(self._memory, PrivateMemory):
            self._retired.add(self.block)
        self._use(larger.block, larger.capacity, larger.words)
        self._taken, self.used = larger._taken, larger.used
        self._memory.adopted()


def _slots(least: int) -> int:
    """Number of slots of a table with at least `least`. The number of buckets is prime, so every step size visits
    every bucket."""
    return BUCKET * _prime_from(-(-max(_SMALLEST, least) // BUCKET))


def _prime_from(least: int) -> int:
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, isqrt(number) + 1, 2)):
        number += 2
    return number
