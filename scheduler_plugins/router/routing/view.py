# SPDX-License-Identifier: Apache-2.0
"""The live router's view for policies: its own counts, an index of cached prefixes, and the KV pools of hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, inf

from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import FAR, MEMORY, StorePlace
from scheduler_plugins.router.policies.base import BlockHash, EngineView, PrefixSource, Role
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS


class LiveView:
    """`View` of one attempt of one request."""

    def __init__(
        self,
        engines: Mapping[Role, Sequence[EngineView]],
        prefixes: Prefixes,
        now_s: float,
        places: Mapping[str, StorePlace] | None = None,
    ) -> None:
        """Look nothing up yet.

        Args:
            engines: engines that may serve this attempt, by role.
            places: where engines use the KV pool of their host, by name.
        """
        self._engines = engines
        self._prefixes = prefixes
        self._now_s = now_s
        self._stores: Sequence[HostStore] = stores_of(places) if places else ()
        self._matched: dict[str, int] = {}  # engine -> matched blocks of the last prompt
        self._prompt: PromptKeys | None = None

    def engines(self, role: Role) -> Sequence[EngineView]:
        return self._engines.get(role, ())

    def pools(self) -> Sequence[HostStore]:
        """One for each host with a KV pool and for each far store, and for each model in it."""
        return self._stores

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[PrefixSource]) -> Sequence[int]:
        if not isinstance(hashes, PromptKeys):
            return [0] * len(engines)
        if hashes is not self._prompt:
            self._prompt, self._matched = hashes, {}
        unknown = [source for source in engines if source.name not in self._matched]
        for store in unknown:
            if isinstance(store, HostStore):
                self._matched[store.name] = store.match(self._prefixes, hashes)
        if others := [source for source in unknown if not isinstance(source, HostStore)]:
            blocks = self._prefixes.match(hashes, others, BLOCK_TOKENS, self._now_s)
            self._matched.update(zip((source.name for source in others), blocks, strict=True))
        return [self._matched[source.name] for source in engines]

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        """From a KV pool: by the speed of the engine's loads; infinite for engines that do not reach it. From an engine: 0,
        because engines do not report the speed of their links, and none fetches prefixes yet."""
        if isinstance(source, HostStore):
            return source.load_s(target.name, tokens)
        return 0.0


class HostStore:
    """`PrefixSource`: the chunks of one model in the store of one host, or in a far store.

    Attributes:
        name: name of the pool, in decisions.
        block_tokens: tokens of a chunk.
    """

    def __init__(
        self, name: str, places: Mapping[str, StorePlace], hosts: Mapping[str, StorePlace] = {}
    ) -> None:
        """Look nothing up yet.

        Args:
            places: by engine name, for each engine that may use these chunks.
            hosts: for a far store: the places of these engines in their hosts' stores. A chunk that a host has is not
                brought.
        """
        self.name = name
        self._places, self._hosts = places, hosts
        self._chunks = 0
        self._here: dict[
            str, int
        ] = {}  # of a far store, by host: leading chunks of the last prompt that the host has
        self._place = next(iter(places.values()))
        self.block_tokens = self._place.chunk_tokens
        self._slow = 0  # chunks of the last prompt that are not in memory

    def match(self, prefixes: Prefixes, prompt: PromptKeys) -> int:
        """Leading chunks of the prompt that are there."""
        chunks, in_memory = prefixes.in_store(prompt, self._place)
        self._chunks, self._slow = chunks, chunks - in_memory
        hosts = {place.store: place for place in self._hosts.values()}
        self._here = {
            store: prefixes.in_store(prompt, place).chunks for store, place in hosts.items()
        }
        return chunks

    def load_s(self, engine: str, tokens: int) -> float:
        """Predicted seconds to load the last `tokens` tokens of the match.

        Returns:
            Infinite for engines of other hosts and other models. A host's tier that is not measured yet counts as fast,
            because engines load from such a tier, too. A far store that is not measured counts as the slowest measured
            tier.
        """
        if engine not in self._places:
            return inf
        chunks = ceil(tokens / self.block_tokens)
        slow, others = self._slow, _is_disk
        if self._hosts:
            slow, others = self._chunks - self._here[self._hosts[engine].store], _is_far
        slow = max(0, min(chunks, slow))
        fast_s, slow_s = self._chunk_s(engine, _is_memory), self._chunk_s(engine, others)
        return (chunks - slow) * fast_s + slow * slow_s

    def _chunk_s(self, engine: str, counts: Callable[[str], bool]) -> float:
        """Seconds to load a chunk from the counted tiers: by this engine's loads, otherwise by another engine's."""
        for considered in (counts, _is_any) if counts is _is_far else (counts,):
            for place in (self._places[engine], *self._places.values()):
                speeds = [speed for tier, speed in place.bytes_per_s.items() if considered(tier)]
                if speeds and place.chunk_bytes:
                    return place.chunk_bytes / min(speeds)
        return 0.0


def _is_memory(tier: str) -> bool:
    return tier == MEMORY


def _is_disk(tier: str) -> bool:
    return tier not in (MEMORY, FAR)


def _is_far(tier: str) -> bool:
    return tier == FAR


def _is_any(tier: str) -> bool:
    return True


def stores_of(places: Mapping[str, StorePlace]) -> list[HostStore]:
    """The stores of these engines, in a steady order: those of hosts, and far ones. A model has its own part of a store."""
    far = {engine: in_far for engine, place in places.items() if (in_far := place.in_far)}
    return [
        *_grouped(places, {}),
        *_grouped(far, {engine: places[engine] for engine in far}),
    ]


def _grouped(
    places: Mapping[str, StorePlace], hosts: Mapping[str, StorePlace]
) -> Iterator[HostStore]:
    grouped: dict[tuple[str, str], dict[str, StorePlace]] = {}
    for engine, place in places.items():
        grouped.setdefault((place.store, place.model), {})[engine] = place
    shared = [store for store, _ in grouped]
    for (store, model), used in sorted(grouped.items()):
        name = used[next(iter(used))].name
        yield HostStore(
            f"{name} {model[:8]}" if shared.count(store) > 1 else name,
            used,
            {engine: hosts[engine] for engine in used if engine in hosts},
        )
