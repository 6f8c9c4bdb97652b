# SPDX-License-Identifier: Apache-2.0
"""Each process's counts for each engine, in shared memory.

Each process writes its own row and sums the rows of the others. So all processes see a count at once, without locks.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from struct import Struct

from scheduler_plugins.router.engines.others import Count

MOST_ENGINES = 1024
"""Most engines with shared counts. For further engines, each process sees its own counts only."""
_FIELDS = len(Count)
_COUNTS = Struct(f"={_FIELDS}d")
_ROW = MOST_ENGINES * _FIELDS
FELLOWS_ROW = 0
"""The row for the counts of other routers. The rows of workers follow."""


def words_for(workers: int) -> int:
    """Size of the counts of `workers` workers, in 64-bit words."""
    return (1 + workers) * _ROW


class SharedCounts:
    """The table of counts as one process uses it: doubles of shape (rows, engines, counts)."""

    def __init__(self, memory: mmap.mmap | bytearray, own_row: int | None) -> None:
        """`own_row`: the row that this process writes; None: it only reads."""
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
        """Clear the row of a process that has ended."""
        self._view[row * _ROW : (row + 1) * _ROW] = memoryview(bytes(8 * _ROW)).cast("d")

    def clear_engine(self, slot: int) -> None:
        """Clear the counts of an engine that has left."""
        for row in self._rows:
            self.put(row, slot, (0.0,) * _FIELDS)

    def put(self, row: int, slot: int, counts: Sequence[float]) -> None:
        """Write the counts of one row for one engine."""
        start = row * _ROW + slot * _FIELDS
        for n, value in enumerate(counts):
            self._view[start + n] = value

    def totals(self, slot: int, rows: Sequence[int]) -> list[float]:
        """The counts of one engine over these rows: sums, and the latest time."""
        totals = []
        for count in Count:
            values = [self._view[row * _ROW + slot * _FIELDS + count] for row in rows]
            totals.append(max(values) if count is Count.BUSY_SINCE_S else sum(values))
        return totals


class EngineCounts:
    """`others.Others` of one engine."""

    def __init__(self, view: memoryview[float], own: int | None, others: Sequence[int]) -> None:
        self._view = view
        self._own = own
        self._others = others

    def sum(self, count: Count) -> float:
        view, total = self._view, 0.0
        for start in self._others:
            total += view[start + count]
        return total

    def latest(self, count: Count) -> float:
        view, largest = self._view, 0.0
        for start in self._others:
            largest = max(largest, view[start + count])
        return largest

    def tell(self, counts: tuple[float, ...]) -> None:
        if self._own is not None:
            # This runs at every change of every request, so all counts go in one call.
            _COUNTS.pack_into(self._view, self._own * _COUNTS.size // _FIELDS, *counts)
