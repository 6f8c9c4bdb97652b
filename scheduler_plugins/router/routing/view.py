# SPDX-License-Identifier: Apache-2.0
"""The live router's view for policies: its own counts, and an index of cached prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_plugins.router.index.prefixes import PrefixReader, PromptKeys
from scheduler_plugins.router.policies.base import BlockHash, EngineView, PrefixSource, Role
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS


class LiveView:
    """`View` of one attempt of one request."""

    def __init__(
        self,
        engines: Mapping[Role, Sequence[EngineView]],
        prefixes: PrefixReader,
        now_s: float,
    ) -> None:
        """`engines`: engines that may serve this attempt, by role."""
        self._engines = engines
        self._prefixes = prefixes
        self._now_s = now_s
        self._matched: dict[str, int] = {}  # engine -> matched blocks of the last prompt
        self._prompt: PromptKeys | None = None

    def engines(self, role: Role) -> Sequence[EngineView]:
        return self._engines.get(role, ())

    def pools(self) -> Sequence[PrefixSource]:
        """Empty: engines query their KV pools themselves."""
        return ()

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[PrefixSource]) -> Sequence[int]:
        if not isinstance(hashes, PromptKeys):
            return [0] * len(engines)
        if hashes is not self._prompt:
            self._prompt, self._matched = hashes, {}
        if unknown := [one for one in engines if one.name not in self._matched]:
            found = self._prefixes.match(hashes, unknown, BLOCK_TOKENS, self._now_s)
            self._matched.update(zip((one.name for one in unknown), found, strict=True))
        return [self._matched[one.name] for one in engines]

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        """0: engines do not report the speed of their links, and none fetches prefixes yet."""
        return 0.0
