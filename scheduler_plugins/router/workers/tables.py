# SPDX-License-Identifier: Apache-2.0
"""The tables of the index in shared memory. The keeper writes, and workers read without a lock.

A worker that reads during a write may get a wrong answer, which costs time only. It never reads out of bounds: a
table that grows gets new memory, and the old memory stays mapped for its readers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from scheduler_plugins.router.index.blocks import BlockIndex, BlockReader
from scheduler_plugins.router.index.prefixes import PrefixReader
from scheduler_plugins.router.index.prompt_keys import NO_HASHES
from scheduler_plugins.router.index.table_reader import Keys, TableReader
from scheduler_plugins.router.peer_routers.memory import MemoryRef, SharedWords, attach, words_in
from scheduler_plugins.router.workers.messages import Engines, TableState

logger = logging.getLogger(__name__)


class TableMemory:
    """The shared memory of one table (`index.table.Memory`)."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change`: called when workers need the new location of the table."""
        self._words: SharedWords | None = None
        self._coming: SharedWords | None = None
        self._on_change = on_change

    def new(self, words: int) -> Keys:
        if self._coming is not None:
            self._coming.close()
        self._coming = SharedWords(words)
        return words_in(self._coming.map)

    def adopted(self) -> None:
        before, self._words, self._coming = self._words, self._coming, None
        if before is not None:
            before.close()
        self._on_change()

    def renumbered(self) -> None:
        self._on_change()

    def state(self, index: BlockIndex) -> TableState:
        """The location of the table in this memory, for workers."""
        assert self._words is not None, "the table has adopted memory"
        table = index.table
        return TableState(self._words.ref, table.capacity, table.words, table.mix, index.numbers)

    def close(self) -> None:
        for words in (self._words, self._coming):
            if words is not None:
                words.close()


class SharedTable:
    """One table, as a worker reads it."""

    def __init__(self) -> None:
        self._ref: MemoryRef | None = None
        self._table = TableReader(NO_HASHES, 0, 1, 1)
        self.reader = BlockReader(self._table, {})

    def use(self, state: TableState) -> None:
        """Attach to the table's current memory."""
        if state.memory != self._ref:
            try:
                block = words_in(attach(state.memory))
            except OSError as error:
                # The table has grown again; the next message has its new location.
                logger.debug("the index has moved: %s", error)
                return
            self._table = TableReader(block, state.slots, state.words, state.mix)
            self._ref = state.memory
        self.reader = BlockReader(self._table, state.numbers)


class SharedPrefixes:
    """The index of cached blocks, as a worker reads it."""

    def __init__(self) -> None:
        self._held, self._recent = SharedTable(), SharedTable()
        self.asked = set[str]()
        """Engines that the guess was asked about. Other engines need no guess."""
        self.reader = self._reader({})

    def use(self, told: Engines) -> None:
        """Apply the keeper's message with the locations of the tables."""
        self._held.use(told.held)
        self._recent.use(told.recent)
        self.reader = self._reader(told.by_events)

    def _reader(self, by_events: Mapping[str, Sequence[int]]) -> PrefixReader:
        return PrefixReader(self._held.reader, self._recent.reader, by_events, self.asked)
