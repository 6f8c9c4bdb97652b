# SPDX-License-Identifier: Apache-2.0
"""Blocks by engine: which blocks each engine has, and how much of a prompt."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from scheduler_plugins.router.index.hashes import Hashes

_EXACT = 64
"""A prompt of at most this many blocks is looked up block by block."""
_INTEGER_BYTES = sys.getsizeof(1 << 63)


class BlockIndex:
    """One set of blocks for each engine."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}

    def match(self, hashes: Hashes, engines: Sequence[str]) -> list[int]:
        """Leading blocks of a prompt that each engine has.

        In a long prompt, only some blocks are looked up. Caches evict the end of a prompt first, so an engine with a
        block has the blocks before it. If that does not hold, the number may be too large.

        Args:
            hashes: hashes of the prompt's blocks, in order.
            engines: names. An engine that was never added has nothing.
        """
        none = frozenset[int]()
        return [_leading(hashes, self._blocks.get(engine, none)) for engine in engines]

    @property
    def nbytes(self) -> int:
        """Size in bytes, with the hashes."""
        return sum(
            sys.getsizeof(blocks) + _INTEGER_BYTES * len(blocks) for blocks in self._blocks.values()
        )

    def add(self, engine: str) -> None:
        """Add an engine without blocks. Does nothing if the engine is known."""
        self._blocks.setdefault(engine, set())

    def drop(self, engine: str) -> None:
        """Forget an engine."""
        del self._blocks[engine]

    def clear(self, engine: str) -> None:
        """Remove all blocks of an engine."""
        self._blocks[engine] = set()

    def blocks(self, engine: str) -> int:
        """Number of blocks that the engine has."""
        return len(self._blocks[engine])

    def store(self, engine: str, hashes: Hashes) -> None:
        """Add these blocks to the engine. Blocks that it has already stay."""
        self._blocks[engine].update(hashes)

    def remove(self, engine: str, hashes: Hashes) -> None:
        """Remove these blocks from the engine. Blocks that it lacks are ignored."""
        self._blocks[engine].difference_update(hashes)


def _leading(hashes: Hashes, held: Collection[int]) -> int:
    """Number of leading blocks among those held."""
    count = len(hashes)
    if not count or hashes[0] not in held:
        return 0
    if count <= _EXACT:
        for n, block in enumerate(hashes):
            if block not in held:
                return n
        return count
    # Half the rest with each look.
    least, most = 1, count
    while least < most:
        middle = (least + most + 1) // 2
        if hashes[middle - 1] in held:
            least = middle
        else:
            most = middle - 1
    return least
