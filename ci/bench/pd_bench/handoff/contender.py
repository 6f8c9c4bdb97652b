# SPDX-License-Identifier: Apache-2.0
"""Contenders: connectors with their configs, and the bars that each must reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pd_bench.report import Param

Setting = str | int | float | bool | Sequence[str]
Bars = Mapping[int, float]
"""Bars by least prompt length: from this many tokens (key) on, a handoff may take at most this share (value) of the
other contender's time."""


@dataclass(frozen=True)
class Contender:
    """A connector with its config.

    Args:
        name: its name for users.
        connector: the engine's name for it.
        config: its own config.
        params: columns of the report that distinguish it from the others.
        against: names of the contenders to compare with, and the bars; empty for a baseline.
        together: whether both engines are asked at once, so that KV moves while the prefill computes.
        slowest: whether the bars hold only against the slowest of `against`.
    """

    name: str
    connector: str
    config: Mapping[str, Setting] = field(default_factory=dict)
    params: Mapping[str, Param] = field(default_factory=dict)
    against: Mapping[str, Bars] = field(default_factory=dict)
    together: bool = False
    slowest: bool = False

    @property
    def is_baseline(self) -> bool:
        """Whether it is only compared with, and not compared itself."""
        return not self.against

    def bar(self, other: str, tokens: int) -> float | None:
        """The bar against another contender for prompts of this length; None if there is no bar."""
        bars = self.against.get(other, {})
        reached = [start for start in bars if start <= tokens]
        return bars[max(reached)] if reached else None


Contenders = Mapping[str, Contender]
"""By name."""


def by_name(*contenders: Contender) -> Contenders:
    """Contenders by their names, read-only."""
    return MappingProxyType({contender.name: contender for contender in contenders})
