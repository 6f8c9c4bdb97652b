# SPDX-License-Identifier: Apache-2.0
"""What the live router shows a policy: its own counts, and an index of what engines have cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from scheduler_plugins.router.policies.base import BlockHash, EngineView, Role


class PrefixView(Protocol):
    """Knows which engine has which blocks."""

    def match(self, hashes: Sequence[BlockHash], names: Sequence[str]) -> Sequence[int]:
        """Leading blocks that each of the engines with these names has cached."""


class NoIndex:
    """Knows of no cached block: engines are told apart by load only."""

    def match(self, hashes: Sequence[BlockHash], names: Sequence[str]) -> Sequence[int]:
        return [0] * len(names)


class LiveView:
    """`View` of one attempt of one request."""

    def __init__(self, engines: Mapping[Role, Sequence[EngineView]], index: PrefixView) -> None:
        """`engines`: those that may serve this attempt, by the part they may do."""
        self._engines = engines
        self._index = index

    def engines(self, role: Role) -> Sequence[EngineView]:
        return self._engines.get(role, ())

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[EngineView]) -> Sequence[int]:
        if not hashes:
            return [0] * len(engines)
        return self._index.match(hashes, [engine.name for engine in engines])

    def transfer_s(self, source: EngineView, target: EngineView, tokens: int) -> float:
        """Engines do not tell how fast their links are, and none fetches prefixes yet."""
        return 0.0
