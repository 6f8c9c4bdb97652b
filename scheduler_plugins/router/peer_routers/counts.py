# SPDX-License-Identifier: Apache-2.0
"""Requests that other senders have sent to an engine: other workers' counts in shared memory, other routers' from their
messages.

Each worker writes its own row of a table, and sums the others' rows when a policy asks. So all workers see a count at
once, without locks and without waking each other. With messages alone, workers that decide within the same 50 ms would
choose the same idle engine.
"""

from __future__ import annotations

import logging
import mmap
from array import array
from collections.abc import Collection, Sequence

from xxhash import xxh3_64_intdigest

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.others import Count, NoOthers

logger = logging.getLogger(__name__)

MOST_ENGINES = 1024
"""Most engines with shared counts. For further engines, each worker sees its own counts only."""
WORD_BYTES = 8
_FIELDS = len(Count)
_ROW = 1 + MOST_ENGINES * (1 + _FIELDS)  # a version, keys of engines, and their counts


def new_table(workers: int) -> mmap.mmap:
    """Memory for the counts of `workers` workers. Processes that are forked later share it."""
    return mmap.mmap(-1, WORD_BYTES * _ROW * workers)


def clear_row(table: mmap.mmap, worker: int) -> None:
    """Forget the counts of a worker that has ended."""
    first = WORD_BYTES * _ROW * worker
    version = int.from_bytes(table[first : first + WORD_BYTES], "little")
    table[first : first + WORD_BYTES * _ROW] = bytes(WORD_BYTES * _ROW)
    table[first : first + WORD_BYTES] = (version + 1).to_bytes(WORD_BYTES, "little")


class OtherSenders:
    """`others.Others` of one engine."""

    def __init__(self, view: memoryview[float]) -> None:
        """`view`: the table's memory, as doubles; empty: there are no other workers."""
        self.routers: Sequence[float] = (0.0,) * _FIELDS
        """Sums over other routers, in the order of `Count`."""
        self.own: int | None = None
        """The place of this worker's counts in the table; None: there is none."""
        self.workers: Sequence[int] = ()
        """The places of the other workers' counts."""
        self._view = view

    def sum(self, count: Count) -> float:
        return self.routers[count] + self.of_workers(count)

    def of_workers(self, count: Count) -> float:
        """As `sum`, over other workers only."""
        view, total = self._view, 0.0
        for first in self.workers:
            total += view[first + count]
        return total

    def latest(self, count: Count) -> float:
        return max(self.routers[count], self.latest_of_workers(count))

    def latest_of_workers(self, count: Count) -> float:
        """As `latest`, over other workers only."""
        view, total = self._view, 0.0
        for first in self.workers:
            total = max(total, view[first + count])
        return total

    def tell(self, counts: tuple[float, ...]) -> None:
        if self.own is not None:
            # This runs at every change of every request, so all counts go in one call. It copies whole words: readers in
            # other processes must not see half a number.
            self._view[self.own : self.own + _FIELDS] = array("d", counts)


class SenderCounts:
    """Connects engines with the counts of other senders."""

    def __init__(self, table: mmap.mmap | None, worker: int = 0) -> None:
        """`table`: of `new_table`, in which this process writes the row `worker`; None: there are no other workers."""
        memory = memoryview(b"" if table is None else table).cast("B")
        self._numbers, self._words = memory.cast("d"), memory.cast("Q")
        self._own = worker
        self._rows = [row for row in range(len(self._words) // _ROW) if row != worker]
        self._senders: dict[BackendEngine, OtherSenders] = {}
        self._slots: dict[BackendEngine, int] = {}
        self._versions: list[int] = []

    def of(self, engine: BackendEngine) -> OtherSenders:
        """The other senders of an engine that `follow` was called with."""
        return self._senders[engine]

    def follow(self, engines: Collection[BackendEngine]) -> None:
        """Use these engines from now on, and find them in the rows of the other workers."""
        wanted_engines = dict.fromkeys(engines)
        changed = wanted_engines.keys() != self._senders.keys()
        for engine in self._senders.keys() - wanted_engines.keys():
            del self._senders[engine]
            engine.load.others = NoOthers()
            if (slot := self._slots.pop(engine, None)) is not None:
                self._words[self._key(self._own, slot)] = 0
        for engine in wanted_engines.keys() - self._senders.keys():
            self._senders[engine] = engine.load.others = OtherSenders(self._numbers)
            self._claim(engine)
        if changed and len(self._words):
            self._words[_ROW * self._own] += 1
        versions = [self._words[_ROW * row] for row in self._rows]
        if changed or versions != self._versions:
            self._versions = versions
            self._find()

    def _claim(self, engine: BackendEngine) -> None:
        """Give an engine a place in this worker's row."""
        if not len(self._words):
            return
        taken = set(self._slots.values())
        slot = next((n for n in range(MOST_ENGINES) if n not in taken), None)
        if slot is None:
            logger.warning(
                "%s: what other workers send to it is not counted, because there are more than %d engines",
                *(engine.url, MOST_ENGINES),
            )
            return
        self._slots[engine] = slot
        self._senders[engine].own = self._counts(self._own, slot)
        self._senders[engine].tell(engine.load.counts())
        self._words[self._key(self._own, slot)] = _key_of(engine)

    def _find(self) -> None:
        """Find all engines in the other workers' rows."""
        places: dict[int, list[int]] = {}
        for row in self._rows:
            first = self._key(row, 0)
            for slot, key in enumerate(self._words[first : first + MOST_ENGINES].tolist()):
                if key:
                    places.setdefault(key, []).append(self._counts(row, slot))
        for engine, senders in self._senders.items():
            senders.workers = places.get(_key_of(engine), ())

    @staticmethod
    def _key(row: int, slot: int) -> int:
        return _ROW * row + 1 + slot

    @staticmethod
    def _counts(row: int, slot: int) -> int:
        return _ROW * row + 1 + MOST_ENGINES + _FIELDS * slot


def _key_of(engine: BackendEngine) -> int:
    return xxh3_64_intdigest(engine.url.encode()) or 1
