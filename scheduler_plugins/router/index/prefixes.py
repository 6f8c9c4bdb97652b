# SPDX-License-Identifier: Apache-2.0
"""The index as the router uses it: matches of prompts, for engines with and without events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.events import Batch
from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.held import HeldBlocks
from scheduler_plugins.router.index.prompt_keys import NO_HASHES, PromptKeys
from scheduler_plugins.router.index.recent import ASSUMED_BLOCKS, RecentBlocks
from scheduler_plugins.router.index.stored import (
    InStore,
    StoredChunks,
    StorePlace,
    part_names,
)


class EngineKeys(Protocol):
    """The facts about an engine that the index needs."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...


class PartState(NamedTuple):
    """The state of one engine's part of the index, for `/health`."""

    source: str  # `events`; or `recent`: a guess from the prompts that the router sent
    blocks: int
    unknown: int  # reported blocks that could not be placed


class Prefixes:
    """The cached blocks of every engine: by its events if it sends any, else by the prompts it was sent.

    An engine with events may have a guess as well, because prompts without tokens are known only by their text.
    """

    def __init__(self) -> None:
        self._held_index, self._recent_index = BlockIndex(), BlockIndex()
        self._held: dict[str, dict[int, HeldBlocks]] = {}
        self._recent: dict[str, RecentBlocks] = {}
        self._stores: dict[str, StoredChunks] = {}
        self._looked_up = set[str]()  # engines whose guess was looked up

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        indexes = self._held_index.nbytes + self._recent_index.nbytes
        held = sum(part.nbytes for parts in self._held.values() for part in parts.values())
        return indexes + held + sum(part.nbytes for part in self._recent.values())

    def match(
        self, prompt: PromptKeys, engines: Sequence[EngineKeys], text_tokens: int, now_s: float
    ) -> list[int]:
        """Leading blocks of a prompt that each engine has, in blocks of that engine. For an engine with several
        data-parallel ranks, the best rank counts.

        Args:
            text_tokens: approximate number of tokens that one text hash covers.
        """
        most = [0] * len(engines)
        for index, hashes, which in self._questions(prompt, engines, now_s):
            parts = [(n, part) for n in which for part in self._parts(index, engines[n].name)]
            matched = index.match(hashes, [part for _, part in parts])
            for (n, _), blocks in zip(parts, matched, strict=True):
                if hashes is prompt.text:
                    blocks = blocks * text_tokens // max(1, engines[n].block_tokens)
                most[n] = max(most[n], blocks)
        return most

    def in_store(self, prompt: PromptKeys, place: StorePlace) -> InStore:
        """How much of a prompt a host's store has. `place` names the store and the model in it."""
        hashes = prompt.chunks(place)
        match = InStore(*self._held_index.match(hashes, part_names(place.store)))
        if match.chunks:
            self._stores[place.store].used(hashes[: match.chunks])
        return match

    def rank_with_most(
        self, prompt: PromptKeys, engine: EngineKeys, least_tokens: int
    ) -> int | None:
        """The data-parallel rank that has at least `least_tokens` more tokens of the prompt than any other rank. None
        if there is no such rank, or the engine has only one."""
        ranks = list(self._held.get(engine.name, ()))
        if len(ranks) < 2:
            return None
        names = [part_name(engine.name, rank) for rank in ranks]
        matched = self._held_index.match(prompt.blocks(engine.block_tokens), names)
        (second, _), (most, rank) = sorted(zip(matched, ranks, strict=True))[-2:]
        return rank if (most - second) * engine.block_tokens >= least_tokens else None

    def _parts(self, index: BlockIndex, engine: str) -> list[str]:
        if index is not self._held_index:
            return [engine]
        return [part_name(engine, rank) for rank in self._held.get(engine, ())]

    def _questions(
        self, prompt: PromptKeys, engines: Sequence[EngineKeys], now_s: float
    ) -> list[tuple[BlockIndex, Hashes, list[int]]]:
        """One look-up for each index and block size, so engines with the same size share a look-up."""
        grouped: dict[tuple[bool, int], list[int]] = {}
        for n, engine in enumerate(engines):
            held = prompt.tokens is not None and engine.name in self._held
            if not held:
                self._looked_up.add(engine.name)
                self._refresh(engine.name, now_s)
            size = engine.block_tokens if prompt.tokens is not None else 0
            grouped.setdefault((held, size), []).append(n)
        return [
            (
                self._held_index if held else self._recent_index,
                prompt.blocks(size) if size else prompt.text,
                which,
            )
            for (held, size), which in grouped.items()
        ]

    def apply_events(self, engine: str, batch: Batch, rank: int = 0) -> None:
        """Apply events of a data-parallel rank of the engine."""
        parts = self._held.setdefault(engine, {})
        held = parts.get(rank)
        if held is None:
            held = parts[rank] = HeldBlocks(self._held_index, part_name(engine, rank))
        held.apply(batch)

    def apply_journal(self, store: str, changes: Iterable[tuple[str, str]], *, whole: bool) -> None:
        """Apply a page of a store's journal; see `StoredChunks.apply`."""
        if store not in self._stores:
            self._stores[store] = StoredChunks(self._held_index, store)
        self._stores[store].apply(changes, whole=whole)

    def store_chunks(self, store: str) -> int:
        """Number of known chunks of a store."""
        return self._stores[store].chunks if store in self._stores else 0

    def forget_store(self, store: str) -> None:
        """No engine uses the store any more."""
        if chunks := self._stores.pop(store, None):
            chunks.drop()

    def prefilled(self, engine: EngineKeys, prompt: PromptKeys, now_s: float) -> Hashes:
        """Note that the engine has computed a prompt. Events take precedence over this guess.

        Returns the hashes that another router needs for `prefilled_blocks`; none if no policy looks up this engine.
        """
        if prompt.tokens is not None and engine.name in self._held:
            return NO_HASHES
        hashes = prompt.text if prompt.tokens is None else prompt.blocks(engine.block_tokens)
        self.prefilled_blocks(engine.name, hashes, now_s)
        return hashes if engine.name in self._looked_up else NO_HASHES

    def prefilled_blocks(self, engine: str, hashes: Hashes, now_s: float) -> None:
        """As `prefilled`, for a prompt that another router has sent."""
        recent = self._recent.get(engine)
        if recent is None:
            recent = self._recent[engine] = RecentBlocks(self._recent_index, engine)
        recent.prefilled(hashes, now_s)

    def has_room(self, engine: str, blocks: int) -> None:
        """Set the engine's capacity in blocks of the size that `prefilled` uses; 0: not known."""
        recent = self._recent.get(engine)
        if recent is None:
            recent = self._recent[engine] = RecentBlocks(self._recent_index, engine)
        recent.most_blocks = blocks or ASSUMED_BLOCKS

    def forget(self, engine: str) -> None:
        """The engine's cache is gone: it ended, restarted, or its events were lost."""
        for part in (*self._held.get(engine, {}).values(), self._recent.get(engine)):
            if part is not None:
                part.clear()

    def forget_rank(self, engine: str, rank: int) -> None:
        """The cache of one rank is gone. The guess covers all ranks together, so it is dropped as well."""
        for part in (self._held.get(engine, {}).get(rank), self._recent.get(engine)):
            if part is not None:
                part.clear()

    def remove(self, engine: str) -> None:
        """The engine left for good."""
        self.events_ended(engine)
        if self._recent.pop(engine, None) is not None:
            self._recent_index.drop(engine)

    def events_ended(self, engine: str) -> None:
        """The engine sends no events any more."""
        for rank in list(self._held.get(engine, ())):
            self.rank_events_ended(engine, rank)

    def rank_events_ended(self, engine: str, rank: int) -> None:
        """The rank sends no events any more."""
        parts = self._held.get(engine, {})
        if parts.pop(rank, None) is not None:
            self._held_index.drop(part_name(engine, rank))
        if not parts:
            self._held.pop(engine, None)

    def block_tokens(self, engine: str) -> int:
        """Tokens of one block of the engine, by its events; 0 if not reported."""
        return max((part.block_tokens for part in self._held.get(engine, {}).values()), default=0)

    def state_of_rank(self, engine: str, rank: int) -> PartState:
        """The state of one rank, by its events."""
        part = self._held.get(engine, {}).get(rank)
        return PartState("events", part.blocks if part else 0, part.unknown if part else 0)

    def state(self, engine: str) -> PartState:
        """The state of an engine."""
        if parts := self._held.get(engine, {}).values():
            blocks, unknown = (
                sum(of) for of in zip(*((p.blocks, p.unknown) for p in parts), strict=True)
            )
            return PartState("events", blocks, unknown)
        if recent := self._recent.get(engine):
            recent.settle()
        return PartState("recent", self._recent_index.blocks(engine) if recent else 0, 0)

    def _refresh(self, engine: str, now_s: float) -> None:
        if recent := self._recent.get(engine):
            recent.settle()
            recent.forget(now_s)


def part_name(engine: str, rank: int) -> str:
    """The index's name for the cache of one data-parallel rank."""
    return f"{engine} rank {rank}" if rank else engine
