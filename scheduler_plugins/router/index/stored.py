# SPDX-License-Identifier: Apache-2.0
"""Chunks of KV in the stores of hosts (`pd_connector.pool`), learnt from the stores' journals, which engines pass
on."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from pd_connector.pool.keys import chain
from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.hashes import HASH_BYTES, Hashes, unpacked

MEMORY = "memory"
"""Name of the fastest tier. All others are about as slow as a disk."""
MOST_CHUNKS = 1 << 20
"""Chunks of a store that are noted, in about 70 MB. If a host's store has more, later ones are not noted: its journal tells what it
drops. A far store does not tell that, so the chunks that were noted or looked for longest ago are dropped, in about 40 MB more."""
_DROPPED_AT_ONCE = 16
"""Divisor: a sixteenth of the chunks is dropped, so that few pages have to look for the oldest."""
FAR = "far"
"""Name of the tier of a far store."""
_FAR_STORE = "far "
_NAME_DIGITS = 12


class StorePlace(msgspec.Struct, frozen=True):
    """An engine's place in a store, by its own report."""

    store: str
    """Id of the store, the same for all engines of the host."""
    model: str
    """The model's part of the keys, in hexadecimal digits."""
    chunk_tokens: int
    chunk_bytes: int = 0
    """0: not known."""
    bytes_per_s: dict[str, float] = {}
    """Speed of the engine's loads by tier, as far as it is known."""
    far: str = ""
    """Id of the far store that the host's carrier reaches, the same at every host; empty: none."""

    @property
    def name(self) -> str:
        """Name of the store, for people."""
        return name_of(self.store)

    @property
    def in_far(self) -> StorePlace | None:
        """The engine's place in the far store; None if it reaches none."""
        return (
            msgspec.structs.replace(self, store=far_store(self.far), far="") if self.far else None
        )


class InStore(NamedTuple):
    """How much of a prompt a store has, in leading chunks."""

    chunks: int
    in_memory: int
    """Leading chunks that the fastest tier has."""


class StoredChunks:
    """One store's part of the index."""

    def __init__(self, index: BlockIndex, store: str) -> None:
        self._index = index
        self._all, self._fast = part_names(store)
        self._order: dict[int, None] | None = {} if store.startswith(_FAR_STORE) else None
        index.add(self._all)
        index.add(self._fast)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self._index.blocks(self._all)

    def apply(self, changes: Iterable[tuple[str, str]], *, whole: bool) -> None:
        """Apply a page of the journal.

        Args:
            changes: key in hexadecimal digits, and the fastest tier that has the chunk (empty: none), in their order.
            whole: the page begins the whole journal.
        """
        if whole:
            self._index.clear(self._all)
            self._index.clear(self._fast)
            if self._order is not None:
                self._order.clear()
        latest = dict(changes)
        gone = [key for key, tier in latest.items() if not tier]
        self._index.remove(self._all, _hashes(gone))
        there = [key for key, tier in latest.items() if tier]
        if self._order is None:
            there = there[: max(0, MOST_CHUNKS - self.chunks)]
        self._index.store(self._all, _hashes(there))
        if self._order is not None:
            self._drop_oldest(self._order, _hashes(gone), _hashes(there))
        fast = [key for key in there if latest[key] == MEMORY]
        self._index.remove(self._fast, _hashes([key for key in latest if latest[key] != MEMORY]))
        self._index.store(self._fast, _hashes(fast))

    def used(self, hashes: Hashes) -> None:
        """Note that a prompt uses these chunks: in a far store's index, they are dropped later than others."""
        if self._order is not None and 2 * len(self._order) > MOST_CHUNKS:
            _renew(self._order, hashes)

    def _drop_oldest(self, order: dict[int, None], gone: Hashes, there: Hashes) -> None:
        """If a far store has too many chunks."""
        for block in gone:
            order.pop(block, None)
        _renew(order, there)
        if (over := len(order) - MOST_CHUNKS) > 0:
            oldest = list(islice(order, max(over, MOST_CHUNKS // _DROPPED_AT_ONCE)))
            self._index.remove(self._all, oldest)
            for block in oldest:
                del order[block]

    def drop(self) -> None:
        """Forget the store."""
        self._index.drop(self._all)
        self._index.drop(self._fast)


def part_names(store: str) -> tuple[str, str]:
    """The index's names for all chunks of a store, and for those in memory. No engine has such a name."""
    return f"pool {store}", f"pool {store} {MEMORY}"


def name_of(store: str) -> str:
    """A store's name in decisions, on the page and in metrics."""
    if store.startswith(_FAR_STORE):
        return store[: len(_FAR_STORE) + _NAME_DIGITS]
    return f"pool {store[:_NAME_DIGITS]}"


def far_store(far: str) -> str:
    """The index's name of a far store. No host's store has such an id."""
    return _FAR_STORE + far


def chunk_hashes(model: bytes, tokens: bytes, salt: str) -> Hashes:
    """Hashes of a prompt's whole chunks: 64 bits of each key.

    Args:
        tokens: token ids, as `hashes.token_bytes` gives them.
    """
    words = array("i")
    words.frombytes(tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return unpacked(b"".join(key[:HASH_BYTES] for key in chain(model, words, salt=salt)))


def _renew(order: dict[int, None], hashes: Hashes) -> None:
    """Move chunks to the end of an eviction order. A chain's first chunk goes last, because the others are not found
    without it."""
    for block in reversed(hashes):
        order.pop(block, None)
        order[block] = None


def _hashes(keys: list[str]) -> Hashes:
    return unpacked(b"".join(bytes.fromhex(key[: 2 * HASH_BYTES]) for key in keys))
