# SPDX-License-Identifier: Apache-2.0
"""What every process of a router has sent to every engine, in memory that all of them read.

Each process writes a row of its own and sums up the others'. So a count is seen by all at once, and nobody waits for anybody.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from struct import Struct

from scheduler_plugins.router.engines.others import Count

MOST_ENGINES = 1024
"""Engines whose counts are shared. Any more are known to each process by its own counts only."""
_FIELDS = len(Count)
_COUNTS = Struct(f"={_FIELDS}d")
_ROW = MOST_ENGINES * _FIELDS
FELLOWS_ROW = 0
"""The row for what other routers have sent; workers have those after it."""


def words_for(workers: int) -> int:
    """64-bit words that the counts of so many workers take."""
    return (1 + workers) * _ROW


class SharedCounts:
    """The table, as one process uses it: shape (rows, engines, counts), of doubles."""

    def __init__(self, memory: mmap.mmap | bytearray, own_row: int | None) -> None:
        """`own_row`: where this process writes; None: it only reads."""
        self._view = memoryview(memory).cast("B").cast("d")
        self._rows = range(len(self._view) // _ROW)
        self._own_row = own_row

    def engine(self, slot: int) -> EngineCounts | None:
        """The counts of one engine; None if there is no room for it."""
        if not 0 <= slot < MOST_ENGINES:
            return None
        others = [row for row in self._rows if row != self._own_row]
        starts = [row * _ROW + slot * _FIELDS for row in others]
        own = None if self._own_row is None else self._own_row * _ROW + slot * _FIELDS
        return EngineCounts(self._view, own, starts)

    def clear_row(self, row: int) -> None:
        """The process that wrote there has ended."""
        self._view[row * _ROW : (row + 1) * _ROW] = memoryview(bytes(8 * _ROW)).cast("d")

    def clear_engine(self, slot: int) -> None:
        """The engine has left."""
        for row in self._rows:
            self.put(row, slot, (0.0,) * _FIELDS)

    def put(self, row: int, slot: int, counts: Sequence[float]) -> None:
        """Write the counts of one row for one engine."""
        start = row * _ROW + slot * _FIELDS
        for n, value in enumerate(counts):
            self._view[start + n] = value

    def totals(self, slot: int, rows: Sequence[int]) -> list[float]:
        """The counts of one engine: the sums of these rows, and the latest of the times."""
        found = []
        for count in Count:
            values = [self._view[row * _ROW + slot * _FIELDS + count] for row in rows]
            found.append(max(values) if count is Count.BUSY_SINCE_S else sum(values))
        return found


class EngineCounts:
    """`others.Others` of one engine."""

    def __init__(self, view: memoryview[float], own: int | None, others: Sequence[int]) -> None:
        self._view = view
        self._own = own
        self._others = others

    def sum(self, count: Count) -> float:
        view, found = self._view, 0.0
        for start in self._others:
            found += view[start + count]
        return found

    def latest(self, count: Count) -> float:
        view, found = self._view, 0.0
        for start in self._others:
            found = max(found, view[start + count])
        return found

    def tell(self, counts: tuple[float, ...]) -> None:
        if self._own is not None:
            # At every change of every request: one call, not one for each count.
            _COUNTS.pack_into(self._view, self._own * _COUNTS.size // _FIELDS, *counts)
