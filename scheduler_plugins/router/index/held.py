# SPDX-License-Identifier: Apache-2.0
"""Applies one engine's events to the index."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.events import (
    OWN_MEDIA,
    Batch,
    BlockName,
    Cleared,
    Removed,
    Stored,
)
from scheduler_plugins.router.index.hashes import (
    block_hashes,
    extra_bytes,
    token_bytes,
)

MOST_BLOCKS = 4_000_000
"""Most blocks that one engine can report. If it reports more, its whole part of the index is dropped as wrong."""

_64_BITS = (1 << 64) - 1


class HeldBlocks:
    """Translates an engine's block names into our hashes, and keeps its part of the index."""

    def __init__(self, index: BlockIndex, engine: str) -> None:
        index.add(engine)
        self.block_tokens = 0
        """Tokens of one block; 0 before the engine has reported it."""
        self.unknown = 0
        """Reported blocks that cannot be placed, because the block before them is unknown."""
        self._index = index
        self._engine = engine
        self._ours: dict[int, int] = {}  # the engine's name of a block -> our hash
        self._group: int | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks of the engine."""
        return self._index.blocks(self._engine)

    @property
    def nbytes(self) -> int:
        """Size of the names in bytes. The hashes are those of the index."""
        return sys.getsizeof(self._ours) + sys.getsizeof(1 << 63) * len(self._ours)

    def apply(self, batch: Batch) -> None:
        """Apply a batch to the index. Inconsistent events change nothing."""
        gone: list[BlockName] = []
        for event in batch.events:
            if isinstance(event, Removed):
                if event.medium in OWN_MEDIA and event.group_idx == self._group:
                    gone += event.block_hashes
                continue
            self._removed(gone)
            gone = []
            if isinstance(event, Cleared):
                self.clear()
            elif self._counts(event):
                self._stored(event)
        self._removed(gone)

    def clear(self) -> None:
        """Forget the engine's blocks."""
        self._index.clear(self._engine)
        self._ours = {}
        self._group = None
        self.unknown = 0

    def _counts(self, event: Stored) -> bool:
        """Whether these blocks count for prefix matches.

        Models with several kinds of attention report each block once per kind. The first kind that keeps all tokens
        stands for all kinds.
        """
        if event.medium not in OWN_MEDIA or event.kv_cache_spec_sliding_window is not None:
            return False
        if not self.blocks:
            self._group = event.group_idx
        return event.group_idx == self._group

    def _stored(self, event: Stored) -> None:
        names, size = event.block_hashes, event.block_size
        # In a sliding window, blocks in the middle may be missing. Then the tokens cannot be matched to blocks.
        if size < 1 or not names or len(event.token_ids) != size * len(names):
            return
        # Two names of one block count twice: the names take memory too.
        if max(self.blocks, len(self._ours)) + len(names) > MOST_BLOCKS:
            self.clear()
            return
        parent: int | None = None
        if event.parent_block_hash is not None:
            parent = self._ours.get(_name(event.parent_block_hash))
            if parent is None:
                self.unknown += len(names)
                return
        try:
            tokens = token_bytes(event.token_ids)
        except ValueError:
            return
        hashes = block_hashes(tokens, size, _extras(event), parent)
        self.block_tokens = size
        self._ours.update(zip(map(_name, names), hashes, strict=True))
        self._index.store(self._engine, hashes)

    def _removed(self, names: Sequence[BlockName]) -> None:
        gone = [self._ours.pop(_name(name), None) for name in names]
        self._index.remove(self._engine, [block for block in gone if block is not None])


def _name(name: BlockName) -> int:
    """64 bits of a name, which is enough to tell the blocks of one engine apart."""
    return int.from_bytes(name[:8], "big") if isinstance(name, bytes) else name & _64_BITS


def _extras(event: Stored) -> tuple[bytes, ...]:
    """The extras of the blocks: the same bytes that `prompt_extras` gives for a prompt.

    Every block names its adapter. The first block's name is enough, because all later hashes cover it.
    """
    given = [list(keys or ()) for keys in event.extra_keys or [None]]
    if event.lora_name:
        given = [[key for key in keys if key != event.lora_name] for keys in given]
        if event.parent_block_hash is None:
            given[0].insert(0, event.lora_name)
    return tuple(map(extra_bytes, given))
