# SPDX-License-Identifier: Apache-2.0
"""A hash table of a fixed size, as its one writer has it."""

from __future__ import annotations

import numpy as np

from scheduler_plugins.router.index.retired import private_words
from scheduler_plugins.router.index.table_reader import BUCKET, FEW, WORD, Keys, Slots, TableReader

GONE = np.uint64(WORD)
"""Stands in the slot of a key that was taken out. Should somebody use it as a key, that one may be missed."""


class FixedTable(TableReader):
    """Gives keys their slots. A row of zeros counts as absent; its slot is used again.

    Whoever claims sees to it that there is room: a table without a free slot is searched for ever.
    """

    def __init__(self, block: Keys, slots: int, words: int, mix: int) -> None:
        """As `TableReader`. All of `block` is zero."""
        super().__init__(block, slots, words, mix)
        self.used = 0
        """Slots that were ever taken: they stay taken."""
        # slots that one call has given out
        self._taken = private_words(-(-slots // 8)).view(np.bool_)[:slots]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, without a larger one that is being filled."""
        return self._keys.nbytes + self.rows.nbytes + self._taken.nbytes

    def claim(self, keys: Keys) -> Slots:
        """The slots of these keys, new ones with a row of zeros. A key may come twice.

        The slots are valid until the next `claim`.
        """
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

    def place(self, keys: Keys) -> Slots:
        """As `claim`, several times faster, for keys that are distinct and absent, about in the order of their buckets."""
        first = self._first(keys * np.uint64(self.mix))
        order = np.argsort(first, kind="stable")
        buckets = first[order]
        numbers = np.arange(len(keys))
        begins = np.ones(len(keys), np.bool_)
        begins[1:] = buckets[1:] != buckets[:-1]
        # Those of one bucket take its free slots one after the other.
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
            self._taken[slots[fits]] = True  # their rows are zero, but they are wanted
            found[left] = self._insert(keys[left])
            self._taken[slots[fits]] = False
        return found

    def forget(self, keys: Keys) -> None:
        """Take these keys out, as if they had never come; their slots are used again."""
        slots = self.find(keys)
        slots = slots[slots >= 0]
        self._keys.reshape(-1)[slots] = GONE
        self.rows[slots] = 0

    def _claim_one(self, key: int, given: set[int]) -> int:
        """As `claim`, for one key. `given`: slots that this call has given out."""
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
        """The first slot of a bucket whose row is zero and that is not `given`; -1 if there is none."""
        words, start = self.words, self.capacity + first * self.words
        row = self.cells[start : start + BUCKET * words].tolist()
        for n in range(BUCKET):
            at = n * words
            zero = not row[at] and (words == 1 or not any(row[at : at + words]))
            if zero and first + n not in given:
                return first + n
        return -1

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
            self.used += int(np.count_nonzero(placed & (before == 0)))
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
