# SPDX-License-Identifier: Apache-2.0
"""Guesses an engine's cache from its recent prompts, for engines without events."""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice
from typing import NamedTuple

from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.hashes import Hashes

TTL_S = 120.0
"""A block counts as evicted after this time without use."""
ASSUMED_BLOCKS = 16_384
"""Assumed capacity of an engine that does not report it, in blocks."""
_LONGEST_LOG = 4
"""Most blocks of all noted prompts together, as a multiple of the engine's capacity."""


class _Noted(NamedTuple):
    number: int
    at_s: float
    hashes: Hashes


class RecentBlocks:
    """The blocks of the prompts that an engine computed recently. The least recently used prompt is forgotten first.

    Prompts enter the index in groups, when the engine is looked up (`settle`). Most decode engines are never looked
    up, and cost only the list of prompts.
    """

    def __init__(self, index: BlockIndex, engine: str) -> None:
        index.add(engine)
        self.most_blocks = ASSUMED_BLOCKS
        """The engine's capacity in blocks."""
        self._index = index
        self._engine = engine
        self._noted: deque[_Noted] = deque()
        self._unsettled = 0  # number of last prompts that are not in the index yet
        self._noted_blocks = 0
        self._used: dict[int, int] = {}  # block -> number of the last noted prompt that has it
        self._number = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes, without the index and its hashes."""
        return sys.getsizeof(self._used) + 8 * self._noted_blocks

    def prefilled(self, hashes: Hashes, now_s: float) -> None:
        """Note that the engine has computed a prompt with these blocks, so they are cached."""
        hashes = hashes[: self.most_blocks]
        if not len(hashes):
            return
        self._number += 1
        self._noted.append(_Noted(self._number, now_s, hashes))
        self._noted_blocks += len(hashes)
        self._unsettled += 1
        self.forget(now_s)

    def settle(self) -> None:
        """Add the prompts noted since the last call to the index."""
        several = list(islice(reversed(self._noted), self._unsettled))[::-1]
        self._unsettled = 0
        for prompt in several:
            self._used.update(dict.fromkeys(prompt.hashes, prompt.number))
            self._index.store(self._engine, prompt.hashes)

    def forget(self, now_s: float) -> None:
        """Drop prompts that are too old, or exceed the capacity."""
        while self._noted and (
            now_s - self._noted[0].at_s > TTL_S
            or self._index.blocks(self._engine) > self.most_blocks
            or self._noted_blocks > _LONGEST_LOG * self.most_blocks
        ):
            oldest = self._noted.popleft()
            self._noted_blocks -= len(oldest.hashes)
            if len(self._noted) < self._unsettled:
                self._unsettled -= 1
                continue
            gone = {block for block in oldest.hashes if self._used.get(block) == oldest.number}
            for block in gone:
                del self._used[block]
            self._index.remove(self._engine, [*gone])

    def clear(self) -> None:
        """The engine's cache is gone."""
        self._index.clear(self._engine)
        self._noted.clear()
        self._noted_blocks = self._unsettled = 0
        self._used = {}
