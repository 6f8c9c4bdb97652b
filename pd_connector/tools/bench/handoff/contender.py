# SPDX-License-Identifier: Apache-2.0
"""Who is compared: connectors with their configs, and what is asked of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pd_connector.tools.bench.report import Param

Setting = str | int | float | bool | Sequence[str]
Bars = Mapping[int, float]
"""From this many prompt tokens on (key), a handoff may take at most this share of the other's
(value)."""


@dataclass(frozen=True)
class Contender:
    """A connector with its config.

    Args:
        name: what a person calls it.
        connector: the engine's name of it.
        config: its own config.
        params: what tells it from the others, for the report.
        against: contenders that it is compared with, by name, and the bars; empty for a baseline.
        together: both engines are asked at once, so that KV moves while the prefill computes.
        slowest: the bars hold against the slowest of `against`, and not against the others.
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
        """Whether others are compared with it, and it with none."""
        return not self.against

    def bar(self, other: str, tokens: int) -> float | None:
        """The bar against another contender for prompts of this length; None where nothing is asked."""
        bars = self.against.get(other, {})
        reached = [start for start in bars if start <= tokens]
        return bars[max(reached)] if reached else None


Contenders = Mapping[str, Contender]
"""By name."""


def by_name(*contenders: Contender) -> Contenders:
    """Contenders by their names, for good."""
    return MappingProxyType({contender.name: contender for contender in contenders})
