# SPDX-License-Identifier: Apache-2.0
"""Blocks by engine: which engine has which blocks, and how much of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isqrt

import numpy as np

from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.table import HashTable, Memory, PrivateMemory
from scheduler_plugins.router.index.table_reader import FEW, TableReader

_WORD = 64
_ALL = (1 << _WORD) - 1
_UNKNOWN = -1
_AT_ONCE = 1024
"""Prompts of at most this many blocks are looked up as a whole."""
_LOOKS = 192
"""A longer prompt is looked up at this many places first, and then where engines differ."""
_FINE = 40
"""A stretch of at most this many blocks is looked up as a whole. In a longer stretch, every `_FINE`-th block is
looked up first."""
_SWEPT = 64
"""For each stored block, this many rows are swept of the bits of cleared engines."""


class BlockReader:
    """Tells how much of a prompt each engine has. The table may belong to another process, which writes to it at any
    time.

    Answers may be wrong, because the table's writer may be late or wrong. A wrong answer costs time only.
    """

    def __init__(self, table: TableReader, numbers: dict[str, int]) -> None:
        """`numbers`: each engine's bit in a row of the table."""
        self._reader = table
        self._numbers = numbers

    def match(self, hashes: Hashes, engines: Sequence[str]) -> list[int]:
        """Leading blocks of a prompt that each engine has.

        In a long prompt, only some blocks are looked up. Caches evict the end of a prompt first, so an engine with a
        block has the blocks before it. If that does not hold, the number may be too large.

        Args:
            hashes: hashes of the prompt's blocks, in order.
            engines: names. An engine that was never added has nothing.
        """
        numbers = [self._numbers.get(engine, _UNKNOWN) for engine in engines]
        count, found = len(hashes), dict.fromkeys(numbers, 0)
        unknown = found.pop(_UNKNOWN, None) is not None
        if count and found and count <= FEW:
            found = self._in_turn(hashes.tolist(), list(found))
        elif count and found:
            span, stride = count, 1 if count <= _AT_ONCE else -(-count // _LOOKS)
            found = self._further(hashes, found, span, stride)
            while stride > 1:
                span, stride = stride, 1 if stride <= _FINE else isqrt(stride)
                found = self._further(hashes, found, span, stride)
        if unknown:
            found[_UNKNOWN] = 0
        return [found[number] for number in numbers]

    def _in_turn(self, hashes: list[int], numbers: list[int]) -> dict[int, int]:
        """As `match`, for few blocks: looks at one block after the other until no engine is left. Most prompts are
        new, and the first block tells."""
        reader, found = self._reader, dict.fromkeys(numbers, len(hashes))
        left = _bits(numbers)
        for n, key in enumerate(hashes):
            has = reader.row_of(key)
            lost = left & ~has
            while lost:
                lowest = lost & -lost
                found[lowest.bit_length() - 1] = n
                lost ^= lowest
            left &= has
            if not left:
                break
        return found

    def _further(
        self, hashes: Hashes, known: dict[int, int], span: int, stride: int
    ) -> dict[int, int]:
        """Look at every `stride`-th block of the `span` blocks after each engine's known blocks."""
        by_blocks: dict[int, list[int]] = {}
        for number, blocks in known.items():
            by_blocks.setdefault(blocks, []).append(number)
        parts = [
            np.arange(at + stride - 1, min(at + span, len(hashes)), stride) for at in by_blocks
        ]
        where = np.concatenate(parts)
        which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        fallen = self._fallen(hashes[where], which, list(map(_bits, by_blocks.values())))
        found = {
            number: at + stride * len(part)
            for (at, several), part in zip(by_blocks.items(), parts, strict=True)
            for number in several
        }
        begins = (where - (stride - 1)).tolist()
        found.update((number, begins[row]) for number, row in fallen.items())
        return found

    def _fallen(
        self, hashes: Hashes, which: np.ndarray[tuple[int], np.dtype[np.int64]], wanted: list[int]
    ) -> dict[int, int]:
        """For each engine, the first of these blocks that it lacks. Engines that have all blocks are left out.

        Args:
            which: for each block, the index in `wanted` of the engines that it is looked up for.
            wanted: disjoint sets of engines, as bits.
        """
        reader = self._reader
        slots = reader.find(hashes)
        absent = slots < 0
        rows = reader.rows
        found: dict[int, int] = {}
        for word in range(reader.words):
            masks = np.array([one >> _WORD * word & _ALL for one in wanted], np.uint64)
            lacking = ~rows[slots, word]
            lacking[absent] = _ALL
            lacking &= masks[which]
            lacked = np.bitwise_or.accumulate(lacking)
            # The first row with an engine's bit is the first block that the engine lacks.
            (changes,) = (lacked[1:] != lacked[:-1]).nonzero()
            before = 0
            for row in (0, *(changes + 1).tolist()) if len(lacked) else ():
                bits = int(lacked[row])
                fresh, before = bits & ~before, bits
                while fresh:
                    lowest = fresh & -fresh
                    found[word * _WORD + lowest.bit_length() - 1] = row
                    fresh ^= lowest
        return found


class BlockIndex(BlockReader):
    """One table for all engines: the row of a block has one bit for each engine that has the block.

    So the blocks of a prompt are looked up once, not once per engine.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        """`memory`: holds the table; other processes may read it. None: private memory."""
        self._memory = memory or PrivateMemory()
        self.table = HashTable(memory=self._memory)
        super().__init__(self.table, {})
        self._counts: dict[str, int] = {}
        self._free: list[int] = []
        self._ever = 0  # numbers from this one on were never used
        self._cleared: list[int] = []  # numbers whose bits in rows are void
        self._sweeping: list[int] = []  # cleared numbers whose bits are being removed
        self._swept = 0  # rows that are done
        self._swept_table = self.table.block

    @property
    def numbers(self) -> dict[str, int]:
        """Each engine's bit in a row of the table."""
        return dict(self._numbers)

    @property
    def engines(self) -> Sequence[str]:
        """Names of the added engines."""
        return list(self._numbers)

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return self.table.nbytes

    def add(self, engine: str) -> None:
        """Add an engine without blocks. Does nothing if the engine is known."""
        if engine in self._numbers:
            return
        self._numbers[engine] = self._number()
        self._counts[engine] = 0

    def drop(self, engine: str) -> None:
        """Forget an engine."""
        number, blocks = self._numbers.pop(engine), self._counts.pop(engine)
        (self._cleared if blocks else self._free).append(number)

    def clear(self, engine: str) -> None:
        """Remove all blocks of an engine.

        The engine gets a new number. The bits of the old number are removed in pieces as blocks come (`_sweep`),
        because one pass over a large table takes too long.
        """
        if self._counts[engine]:
            self.drop(engine)
            self.add(engine)
            self._memory.renumbered()

    def blocks(self, engine: str) -> int:
        """Number of blocks that the engine has."""
        return self._counts[engine]

    def store(self, engine: str, hashes: Hashes) -> None:
        """Add these blocks to the engine. Blocks that it has already stay."""
        if len(hashes):
            self._set(engine, self.table.claim(hashes), had=False)
            self._sweep(_SWEPT * len(hashes))

    def remove(self, engine: str, hashes: Hashes) -> None:
        """Remove these blocks from the engine. Blocks that it lacks are ignored."""
        slots = self.table.find(hashes)
        self._set(engine, slots[slots >= 0], had=True)

    def _set(
        self, engine: str, slots: np.ndarray[tuple[int], np.dtype[np.int64]], *, had: bool
    ) -> None:
        """Flip the engine's bit in each of these rows in which the bit equals `had`."""
        word, bit = self._place(engine)
        if len(slots) <= FEW:
            self._set_few(engine, slots.tolist(), word, int(bit), had=had)
        else:
            column = self.table.rows[:, word]
            changed = slots[((column[slots] & bit) != 0) == had]
            if len(changed) > 1:
                changed = np.unique(changed)
            column[changed] ^= bit
            self._counts[engine] += -len(changed) if had else len(changed)
        self.table.changed(slots)

    def _set_few(self, engine: str, slots: list[int], word: int, bit: int, *, had: bool) -> None:
        table, changed = self.table, 0
        cells, rows, words = table.cells, table.capacity, table.words
        for slot in slots:
            at = rows + slot * words + word
            if bool(cells[at] & bit) is had:
                cells[at] ^= bit
                changed += 1
        self._counts[engine] += -changed if had else changed

    def _number(self) -> int:
        """A number that no engine and no row uses."""
        if not self._free and self._ever == _WORD * self.table.words:
            self._sweep_all()
        if self._free:
            return self._free.pop()
        self._ever += 1
        if self._ever > _WORD * self.table.words:
            self.table.widen(self.table.words + 1)
        return self._ever - 1

    def _sweep(self, rows: int) -> None:
        """Remove the bits of cleared engines from the next `rows` rows. Their numbers are free after the last row."""
        table = self.table
        if table.grows or not (self._sweeping or self._cleared):
            return  # rows that are already in the larger table would keep their bits
        if not self._sweeping:
            self._sweeping, self._cleared = self._cleared, []
            self._swept = 0
        if self._swept_table is not table.block:
            self._swept, self._swept_table = 0, table.block
        bits, first = _bits(self._sweeping), self._swept
        self._swept = min(table.capacity, first + rows)
        for word in range(table.words):
            if gone := bits >> _WORD * word & _ALL:
                table.rows[first : self._swept, word] &= np.uint64(_ALL ^ gone)
        if self._swept == table.capacity:
            self._free += self._sweeping
            self._sweeping = []

    def _sweep_all(self) -> None:
        self.table.finish()
        while self._sweeping or self._cleared:
            self._sweep(self.table.capacity)

    def _place(self, engine: str) -> tuple[int, np.uint64]:
        number = self._numbers[engine]
        return number // _WORD, np.uint64(1 << number % _WORD)


def _bits(numbers: Iterable[int]) -> int:
    """One set bit for each number."""
    bits = 0
    for number in numbers:
        if number != _UNKNOWN:
            bits |= 1 << number
    return bits
