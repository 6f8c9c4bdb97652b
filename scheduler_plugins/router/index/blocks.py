# SPDX-License-Identifier: Apache-2.0
"""Blocks by engine: who has which, and how much of a prompt each has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.table import HashTable

_WORD = 64
_ALL = (1 << _WORD) - 1
_UNKNOWN = -1
_LOOKS = 128
"""A prompt of more than twice as many blocks is looked up at so many places first, and then where engines differ."""


class BlockIndex:
    """One table for all engines: a block's row has a bit for each engine that has it.

    So a prompt's blocks are looked up once, not once for each engine. Nothing here is promised to be true: whoever
    fills the index may be late or wrong, and a wrong answer costs time only.
    """

    def __init__(self) -> None:
        self._table = HashTable()
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._counts: dict[str, int] = {}

    @property
    def engines(self) -> Sequence[str]:
        """Engines that were added."""
        return list(self._numbers)

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes."""
        return self._table.nbytes

    def add(self, engine: str) -> None:
        """Know an engine. It has no blocks. One that is known already stays as it is."""
        if engine in self._numbers:
            return
        number = self._free.pop() if self._free else len(self._numbers)
        if number >= _WORD * self._table.words:
            self._table.widen(self._table.words + 1)
        self._numbers[engine] = number
        self._counts[engine] = 0

    def drop(self, engine: str) -> None:
        """Forget an engine."""
        self.clear(engine)
        self._free.append(self._numbers.pop(engine))
        del self._counts[engine]

    def clear(self, engine: str) -> None:
        """The engine has no blocks any more."""
        if self._counts[engine]:
            word, bit = self._place(engine)
            self._table.rows[:, word] &= ~bit
            self._counts[engine] = 0

    def blocks(self, engine: str) -> int:
        """How many blocks the engine has."""
        return self._counts[engine]

    def store(self, engine: str, hashes: Hashes) -> None:
        """The engine has these blocks now. Those that it had already stay."""
        if len(hashes):
            self._set(engine, self._table.claim(hashes), had=False)

    def remove(self, engine: str, hashes: Hashes) -> None:
        """The engine has these blocks no more. Those that it had not do not matter."""
        slots = self._table.find(hashes)
        self._set(engine, slots[slots >= 0], had=True)

    def match(self, hashes: Hashes, engines: Sequence[str]) -> list[int]:
        """Leading blocks of a prompt that each engine has.

        Of a long prompt not every block is looked up. Caches evict the end of a prompt first, so an engine that has a
        block has those before it. Where it has not, the number may be too large.

        Args:
            hashes: of the prompt's blocks, in order.
            engines: names; those that were never added have nothing.
        """
        numbers = [self._numbers.get(engine, _UNKNOWN) for engine in engines]
        count, wanted = len(hashes), _bits(numbers)
        if not count or not wanted:
            return [0] * len(numbers)
        stride = max(1, count // _LOOKS)
        looked = np.arange(stride - 1, count, stride)
        ends = dict.fromkeys(numbers, len(looked))
        ends.update(self._fallen(hashes[looked], np.zeros(len(looked), np.int64), [wanted]))
        if stride > 1:
            ends = self._refined(hashes, stride, ends)
        ends[_UNKNOWN] = 0
        return [ends[number] for number in numbers]

    def _refined(self, hashes: Hashes, stride: int, ends: dict[int, int]) -> dict[int, int]:
        """From the first look that an engine missed to its first block that is missing."""
        by_end: dict[int, list[int]] = {}
        for number, end in ends.items():
            by_end.setdefault(end * stride, []).append(number)
        parts = [np.arange(at, min(at + stride, len(hashes))) for at in by_end]
        where = np.concatenate(parts)
        which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        fallen = self._fallen(hashes[where], which, list(map(_bits, by_end.values())))
        found = {
            number: int(part[-1]) + 1 if len(part) else len(hashes)
            for part, several in zip(parts, by_end.values(), strict=True)
            for number in several
        }
        found.update({number: int(where[row]) for number, row in fallen.items()})
        return found

    def _fallen(
        self, hashes: Hashes, which: np.ndarray[tuple[int], np.dtype[np.int64]], wanted: list[int]
    ) -> dict[int, int]:
        """The first of these blocks that each engine has not; engines that have all are left out.

        Args:
            which: for each block the index of the engines in `wanted` that it is looked up for.
            wanted: sets of engines, no engine in two of them, as bits.
        """
        words = self._table.words
        masks = np.array(
            [[one >> _WORD * word & _ALL for word in range(words)] for one in wanted], np.uint64
        )
        slots = self._table.find(hashes)
        rows = self._table.rows[slots]
        rows[slots < 0] = 0
        rows |= ~masks[which]
        everyone = np.bitwise_or.reduce(masks, axis=0)
        having = np.bitwise_and.accumulate(np.concatenate((everyone[None], rows)), axis=0)
        fell = having[:-1] & ~having[1:]
        found: dict[int, int] = {}
        for row in np.flatnonzero(fell.any(axis=1)).tolist():
            for word, bits in enumerate(fell[row].tolist()):
                while bits:
                    lowest = bits & -bits
                    found[word * _WORD + lowest.bit_length() - 1] = row
                    bits ^= lowest
        return found

    def _set(
        self, engine: str, slots: np.ndarray[tuple[int], np.dtype[np.int64]], *, had: bool
    ) -> None:
        """Turn the engine's bit over in those of the rows that have it, or have it not."""
        word, bit = self._place(engine)
        column = self._table.rows[:, word]
        changed = slots[((column[slots] & bit) != 0) == had]
        if len(changed) > 1:
            changed = np.unique(changed)
        column[changed] ^= bit
        self._counts[engine] += -len(changed) if had else len(changed)

    def _place(self, engine: str) -> tuple[int, np.uint64]:
        number = self._numbers[engine]
        return number // _WORD, np.uint64(1 << number % _WORD)


def _bits(numbers: Iterable[int]) -> int:
    """A bit for each engine that is known."""
    bits = 0
    for number in numbers:
        if number != _UNKNOWN:
            bits |= 1 << number
    return bits
