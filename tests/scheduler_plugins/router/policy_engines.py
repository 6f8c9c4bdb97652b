# SPDX-License-Identifier: Apache-2.0
"""Engines and views that are what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import BlockHash, EngineView, PrefixSource, Role


@dataclass
class Known:
    """An `EngineView` of plain values."""

    name: str
    role: Role = Role.PREFILL
    open_requests: int = 0
    queued: float = 0.0
    queued_tokens: int = 0
    prefills: int = 0
    batch: int = 0
    context: int = 0
    heavy: int = 0
    free_kv: float = inf
    pull_prefix: bool = False
    has_room: bool = True
    block_tokens: int = 16
    costs: CostModel = field(default=CostModel(a=1e-3, d0=0.01, d1=1e-3, d2=1e-6))
    blocks: frozenset[BlockHash] = frozenset()

    def queued_s(self, now_s: float) -> float:
        return self.queued

    def accepts(self, now_s: float) -> bool:
        return self.has_room


class FixedView:
    """A `View` of such engines."""

    def __init__(
        self,
        prefill: Sequence[Known] = (),
        decode: Sequence[Known] = (),
        cpu: Sequence[Known] = (),
        transfer_s: float = 0.0,
        pools: Sequence[Known] = (),
    ) -> None:
        self._engines = {Role.PREFILL: prefill, Role.DECODE: decode, Role.CPU_PREFILL: cpu}
        self._transfer_s = transfer_s
        self._pools = pools

    def engines(self, role: Role) -> Sequence[Known]:
        return self._engines[role]

    def pools(self) -> Sequence[Known]:
        return self._pools

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[PrefixSource]) -> list[int]:
        found = []
        for engine in engines:
            assert isinstance(engine, Known)
            count = 0
            while count < len(hashes) and hashes[count] in engine.blocks:
                count += 1
            found.append(count)
        return found

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        return self._transfer_s
