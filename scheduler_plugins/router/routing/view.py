# SPDX-License-Identifier: Apache-2.0
"""The live router's view for policies: its own counts, and an index of cached prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import StorePlace
from scheduler_plugins.router.policies.base import BlockHash, EngineView, PrefixSource, Role
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS
from scheduler_plugins.router.routing.host_store import HostStore, stores_of


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
        """One for each host with a KV pool, and for each model in it."""
        return self._stores

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[PrefixSource]) -> Sequence[int]:
        if not isinstance(hashes, PromptKeys):
            return [0] * len(engines)
        if hashes is not self._prompt:
            self._prompt, self._matched = hashes, {}
        unknown = [one for one in engines if one.name not in self._matched]
        for store in unknown:
            if isinstance(store, HostStore):
                self._matched[store.name] = store.match(self._prefixes, hashes)
        if others := [one for one in unknown if not isinstance(one, HostStore)]:
            found = self._prefixes.match(hashes, others, BLOCK_TOKENS, self._now_s)
            self._matched.update(zip((one.name for one in others), found, strict=True))
        return [self._matched[one.name] for one in engines]

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        """From a host's KV pool: by the speed of the engine's loads; infinite for engines of other hosts. From an engine:
        0, because engines do not report the speed of their links, and none fetches prefixes yet."""
        if isinstance(source, HostStore):
            return source.load_s(target.name, tokens)
        return 0.0
