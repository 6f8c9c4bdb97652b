# SPDX-License-Identifier: Apache-2.0
"""The KV pool of a host, as policies see it: a source of prefixes for the engines of that host."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import MEMORY, StorePlace


class HostStore:
    """`PrefixSource`: the chunks of one model in the store of one host.

    Attributes:
        name: of the pool, in decisions.
        block_tokens: tokens of a chunk.
    """

    def __init__(self, name: str, places: Mapping[str, StorePlace]) -> None:
        """`places`: those of the engines that may use these chunks, by the engines' names."""
        self.name = name
        self._places = places
        self._place = next(iter(places.values()))
        self.block_tokens = self._place.chunk_tokens
        self._slow = 0  # chunks of the last prompt that are not in memory

    def match(self, prefixes: Prefixes, prompt: PromptKeys) -> int:
        """Leading chunks of the prompt that are there."""
        chunks, in_memory = prefixes.in_store(prompt, self._place)
        self._slow = chunks - in_memory
        return chunks

    def load_s(self, engine: str, tokens: int) -> float:
        """Predicted seconds to load the last `tokens` tokens of the match.

        Returns:
            Infinite for engines of other hosts and other models. What was not measured yet counts as fast, as it does in
            engines: they load from it until they know better.
        """
        if engine not in self._places:
            return inf
        chunks = ceil(tokens / self.block_tokens)
        slow = min(chunks, self._slow)
        return (chunks - slow) * self._chunk_s(engine, fast=True) + slow * self._chunk_s(
            engine, fast=False
        )

    def _chunk_s(self, engine: str, *, fast: bool) -> float:
        """Seconds to load a chunk from memory, or from another tier: by this engine's loads, else by another's."""
        for place in (self._places[engine], *self._places.values()):
            speeds = [v for tier, v in place.bytes_per_s.items() if (tier == MEMORY) is fast]
            if speeds and place.chunk_bytes:
                return place.chunk_bytes / min(speeds)
        return 0.0


def stores_of(places: Mapping[str, StorePlace]) -> list[HostStore]:
    """The stores of these engines, in a steady order. A model has its own part of a store."""
    grouped: dict[tuple[str, str], dict[str, StorePlace]] = {}
    for engine, place in places.items():
        grouped.setdefault((place.store, place.model), {})[engine] = place
    shared = [store for store, _ in grouped]
    return [
        HostStore(
            used[next(iter(used))].name + (f" {model[:8]}" if shared.count(store) > 1 else ""), used
        )
        for (store, model), used in sorted(grouped.items())
    ]
