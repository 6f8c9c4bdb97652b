# SPDX-License-Identifier: Apache-2.0
"""A hash table of a fixed size, with a single writer."""

from __future__ import annotations

import numpy as np

from scheduler_plugins.router.index.retired import private_words
from scheduler_plugins.router.index.table_reader import BUCKET, FEW, WORD, Keys, Slots, TableReader

GONE = np.uint64(WORD)
"""Marks the slot of a removed key. If this value is used as a key, look-ups may miss it."""


class FixedTable(TableReader):
    """Assigns slots to keys. A key with a row of zeros counts as absent, and its slot can be used again.

    Callers of `claim` must ensure that there is room: in a table without a free slot, the search never ends.
    """

    def __init__(self, block: Keys, slots: int, words: int, mix: int) -> None:
        """Arguments as for `TableReader`. All of `block` must be zero."""
        super().__init__(block, slots, words, mix)
        self.used = 0
        """Number of slots that were ever taken. A taken slot stays taken."""
        # slots that the current call has given out
        self._taken = private_words(-(-slots // 8)).view(np.bool_)[:slots]

    @property
    def nbytes(self) -> int:
        """Size in bytes, without the larger table that is being filled."""
        return self._keys.nbytes + self.rows.nbytes + self._taken.nbytes

    def claim(self, keys: Keys) -> Slots:
        """The slots of these keys. A new key gets a slot with a row of zeros. A key may come twice.

        The slots are valid until the next `claim`.
        """
        if len(keys) <= FEW:
            given = set[int]()
            return np.array([self._claim_one(key, given) for key in keys.tolist()], np.int64)
        slots = self.find(keys)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            present = slots[slots >= 0]
            self._taken[present] = True  # their rows may be zero, but they are in use
            wanted = keys[absent]
            if len(set(wanted.tolist())) == len(wanted):
                slots[absent] = self._insert(wanted)
            else:
                fresh, where = np.unique(wanted, return_inverse=True)
                slots[absent] = self._insert(fresh)[where]
            self._taken[present] = False
        return slots

    def place(self, keys: Keys) -> Slots:
        """As `claim`, but several times faster. The keys must be distinct, absent, and roughly in the order of their
        buckets."""
        first = self._first(keys * np.uint64(self.mix))
        order = np.argsort(first, kind="stable")
        buckets = first[order]
        numbers = np.arange(len(keys))
        begins = np.ones(len(keys), np.bool_)
        begins[1:] = buckets[1:] != buckets[:-1]
        # Keys of one bucket take its free slots in order.
        rank = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
        lane = np.count_nonzero(self._keys[buckets], axis=1) + rank
        fits = lane < BUCKET
        found = np.empty(len(keys), np.int64)
        found[order] = slots = buckets * BUCKET + lane
        flat = self._keys.reshape(-1)
        flat[slots[fits]] = keys[order[fits]]
        self.used += int(np.count_nonzero(fits))
        if not fits.all():
            left = order[~fits]
            self._taken[slots[fits]] = True  # their rows are zero, but they are in use
            found[left] = self._insert(keys[left])
            self._taken[slots[fits]] = False
        return found

    def forget(self, keys: Keys) -> None:
        """Remove these keys. Their slots can be used again."""
        slots = self.find(keys)
        slots = slots[slots >= 0]
        self._keys.reshape(-1)[slots] = GONE
        self.rows[slots] = 0

    def _claim_one(self, key: int, given: set[int]) -> int:
        """As `claim`, for one key. `given`: slots that the current call has given out."""
        cells, buckets, bucket, free = self.cells, len(self._keys), -1, -1
        mixed = key * self.mix & WORD
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
                self.used += not cells[slot]
                cells[slot] = key
                break
        given.add(slot)
        return slot

    def _free_in(self, first: int, given: set[int]) -> int:
        """The first slot of a bucket that has a row of zeros and is not in `given`; -1 if there is none."""
        words, start = self.words, self.capacity + first * self.words
        row = self.cells[start : start + BUCKET * words].tolist()
        for n in range(BUCKET):
            at = n * words
            zero = not row[at] and (words == 1 or not any(row[at : at + words]))
            if zero and first + n not in given:
                return first + n
        return -1

    def _insert(self, keys: Keys) -> Slots:
        """Slots for distinct, absent keys: the first slot on each key's way that is empty or has a row of zeros."""
        found = np.empty(len(keys), np.int64)
        pending = np.arange(len(keys))
        mixed = keys * np.uint64(self.mix)
        buckets, flat, lanes = self._first(mixed), self._keys.reshape(-1), np.arange(BUCKET)
        while len(pending):
            lines = buckets[:, None] * BUCKET + lanes
            # Slots that were never taken have a row of zeros, too.
            rows = self.rows[lines]
            used = rows[:, :, 0] != 0 if self.words == 1 else rows.any(axis=2)
            # Rows of keys from this call are still zero, but not free.
            used |= self._taken[lines]
            first = used.argmin(axis=1)
            slots = buckets * BUCKET + first
            fits = ~used[np.arange(len(first)), first]
            before = flat[slots]
            flat[slots[fits]] = keys[fits]
            # If several keys wanted one slot, the last key written has it.
            placed = fits & (flat[slots] == keys)
            self.used += int(np.count_nonzero(placed & (before == 0)))
            won = slots[placed]
            self._taken[won] = True
            found[pending[placed]] = won
            if len(won) == len(pending):
                break
            # A key without room goes on to the next bucket. A key that lost its slot tries this bucket again.
            moved = (buckets + self._steps(mixed)) % len(self._keys)
            buckets = np.where(fits, buckets, moved)
            left = ~placed
            pending, keys, mixed, buckets = pending[left], keys[left], mixed[left], buckets[left]
        self._taken[found] = False
        return found
