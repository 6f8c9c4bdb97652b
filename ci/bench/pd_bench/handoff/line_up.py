# SPDX-License-Identifier: Apache-2.0
"""The contenders that `bench handoff` can compare on one kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_bench.handoff.contender import Contender, Contenders
from pd_bench.handoff.pair import Pair, PairSetup


@dataclass(frozen=True)
class LineUp:
    """Contenders on engines of one kind, in one place.

    Args:
        engine: the kind of engine.
        baselines: contenders that ours are compared with; over a link the first is measured first and last.
        ours: all contenders that can be chosen.
        default: contenders that are measured without a choice.
        pair: makes a pair of engines for a contender; they are not started.
        problem: why nothing can be measured here, with advice; empty if it can.
        measuring_model: whether the default model is the one with much KV, not the demo's.
    """

    engine: str
    baselines: Contenders
    ours: Contenders
    default: Sequence[str]
    pair: Callable[[Contender, PairSetup], Pair]
    problem: Callable[[], str]
    measuring_model: bool

    def baselines_of(self, chosen: Sequence[Contender]) -> list[Contender]:
        """The baselines with which any of these is compared."""
        names = {name for contender in chosen for name in contender.against}
        return [baseline for name, baseline in self.baselines.items() if name in names]
