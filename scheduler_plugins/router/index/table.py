# SPDX-License-Identifier: Apache-2.0
"""A hash table from 64-bit keys to rows of 64-bit words, many keys at a time, that grows while it is used.

A dictionary of Python's integers takes over 100 bytes an entry. Here an entry takes 8 bytes and 8 for each word, at a
load of about a half, and a look-up of thousands of keys is a few calls of numpy.
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
"""Share of the slots of a new table that are taken when the copy has ended, at most."""
_LOAD_BEGIN = 0.6
"""Share of the slots that are taken when a larger table is begun."""
_LOAD_MOST = 0.75
"""The copy has ended by then: `_COPIED` slots for each new key are `1 / _COPIED` of all for all."""
_COPIED = 8
"""Slots that are copied to the larger table for each key that is claimed."""
_PIECE = 1024
"""Fewest slots that are copied at once: a dozen calls of numpy cost the same for one."""
_AT_ONCE = 1 << 16
"""Most slots that are copied at once: it bounds the memory that this takes."""
_SMALL = 1 << 14
"""A table of so many slots is copied as a whole, which takes some milliseconds."""
_SAMPLE = 1 << 16
"""Slots whose rows are looked at to tell how many of all are not zero."""
_SMALLEST = 8 * BUCKET
_GIVEN_BACK = 512
"""Bytes of the table before that are given back for each key that is claimed: all of it long before the table grows again."""


class Memory(Protocol):
    """Where a table lies. Other processes may read it there."""

    def new(self, words: int) -> Keys:
        """So many words, all zero. The table still uses those that were given before."""

    def adopted(self) -> None:
        """The table uses the words that `new` gave last, and no others."""

    def renumbered(self) -> None:
        """The bits of rows have another meaning."""


class PrivateMemory:
    """This process's own memory."""

    def new(self, words: int) -> Keys:
        return private_words(words)

    def adopted(self) -> None:
        pass

    def renumbered(self) -> None:
        pass


class HashTable(FixedTable):
    """A table that grows. Whoever writes to `rows` must say so (`changed`).

    A larger table is filled beside the old one, a piece with each `claim`, so that no call takes longer because the
    table is large. Until it is complete all reads and writes go to the old table, and writes to what was copied already go to
    both. Readers in other processes see one whole table at any time.
    """

    def __init__(self, words: int = 1, memory: Memory | None = None) -> None:
        """`words`: 64-bit words of a row. `memory`: None: this process's own."""
        self._memory = memory or PrivateMemory()
        slots = _slots(_SMALLEST)
        # The factor is secret, so that nobody can choose keys that collide.
        block = self._memory.new(slots * (1 + words))
        super().__init__(block, slots, words, secrets.randbits(64) | 1)
        self._memory.adopted()
        self._larger: FixedTable | None = None
        self._copied = 0  # slots of this table that the larger one has
        self._owed = 0  # slots that are to be copied
        self._retired = Retired()

    def claim(self, keys: Keys) -> Slots:
        self._make_room(len(keys))
        return super().claim(keys)

    @property
    def grows(self) -> bool:
        """Whether a larger table is being filled."""
        return self._larger is not None

    def changed(self, slots: Slots) -> None:
        """The rows of these slots were written."""
        larger = self._larger
        if larger is None:
            return
        slots = slots[slots < self._copied]
        keys, there = self._keys.reshape(-1)[slots], self.rows[slots].any(axis=1)
        # A key may come back in a slot that is yet to be copied, so one that is absent must not stay there.
        larger.forget(keys[~there])
        where = larger.claim(keys[there])
        larger.rows[where, : self.words] = self.rows[slots[there]]

    def put(self, keys: Keys, values: Keys | int) -> None:
        """Set the first words of these keys' rows. Of a key that comes twice, the last value stays."""
        slots = self.claim(keys)
        self.rows[slots, 0] = values
        self.changed(slots)

    def clear(self, slots: Slots) -> None:
        """Set the rows of these slots to zero: their keys are absent."""
        self.rows[slots] = 0
        self.changed(slots)

    def widen(self, words: int) -> None:
        """Give every row `words` words; those that are added are zero. The whole table is copied at once."""
        self._begin(0, words)
        self._finish()

    def _make_room(self, more: int) -> None:
        """See to it that `more` keys fit, and copy a piece if a larger table is being filled."""
        self._retired.give_back(more * _GIVEN_BACK)
        if self._larger is None:
            if self.used + more <= _LOAD_BEGIN * self.capacity:
                return
            self._begin(more, self.words)
        self._owed += more * _COPIED
        if self._owed >= _PIECE:
            self._advance(self._owed)
            self._owed = 0
        # A small table is copied at once, and so is any if so many come that there is no time for pieces.
        if self.capacity <= _SMALL or self.used + more > _LOAD_MOST * self.capacity:
            self._finish()
        elif self._copied == self.capacity:
            self._adopt()
        if self.used + more > _LOAD_MOST * self.capacity:
            # The larger one was begun for fewer.
            self._begin(more, self.words)
            self._finish()

    def _begin(self, more: int, words: int) -> None:
        """Begin a table for what this one holds and `more` keys. What was copied already is copied again."""
        sample = self.rows[:_SAMPLE]
        held = np.count_nonzero(sample.any(axis=1)) * self.capacity / len(sample)
        # As many as this may come until all is copied.
        meanwhile = self.capacity / _COPIED
        slots = _slots(int((held + more + meanwhile) / _LOAD_AFTER))
        block = self._memory.new(slots * (1 + words))
        self._larger = FixedTable(block, slots, words, self.mix)
        self._copied = self._owed = 0

    def finish(self) -> None:
        """Copy all that is left, if a larger table is being filled."""
        if self._larger is not None:
            self._finish()

    def _finish(self) -> None:
        self._advance(self.capacity)
        self._adopt()

    def _advance(self, slots: int) -> None:
        """Copy the next so many slots. Both tables are in the order of the mixed keys, about, so memory is gone through
        once."""
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
        """Use the larger table, which has everything."""
        larger, self._larger = self._larger, None
        assert larger is not None
        self._retired.add(self._taken)
        if isinstance(self._memory, PrivateMemory):
            self._retired.add(self.block)
        self._use(larger.block, larger.capacity, larger.words)
        self._taken, self.used = larger._taken, larger.used
        self._memory.adopted()


def _slots(least: int) -> int:
    """Slots of a table of so many at least: a prime number of buckets, so that every step visits every bucket."""
    return BUCKET * _prime_from(-(-max(_SMALLEST, least) // BUCKET))


def _prime_from(least: int) -> int:
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, isqrt(number) + 1, 2)):
        number += 2
    return number
