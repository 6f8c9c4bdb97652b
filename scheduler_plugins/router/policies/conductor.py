# SPDX-License-Identifier: Apache-2.0
"""`conductor`: Mooncake's algorithm 1; `conductor_2x` and `least_delay`, which mind others, too."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import (
    EngineView,
    PrefixSource,
    Request,
    View,
    cached_tokens,
)
from scheduler_plugins.router.policies.sides import Choice, Rule, least

THRESHOLD = 2.0
"""How many times an engine's own match the best one must be before the prefix is fetched. Mooncake
names no value."""


class Conductor(Rule):
    """The smallest predicted TTFT: what is queued, what this prompt costs there, and what fetching
    its prefix costs.

    An engine whose own match is near the best (`match * threshold >= best`) computes the rest
    itself. Any other could fetch the best prefix from the engine that has it, if it can
    (`pull_prefix`), or from a KV pool; it does where that is sooner. Where no engine can, a prefix
    that many want is computed again elsewhere once its engine's queue costs more, and so spreads.
    Source: Mooncake, FAST '25, algorithm 1.
    """

    def __init__(
        self,
        threshold: float = THRESHOLD,
        own_weight: float = 1.0,
        waiting_weight: float = 0.0,
    ) -> None:
        """Count the prompt's own time more than once, because others wait for it.

        Args:
            own_weight: how often it counts; above 1 for those that come later.
            waiting_weight: how often more for each prompt that waits at the engine already.
        """
        self._threshold = threshold
        self._own_weight = own_weight
        self._waiting_weight = waiting_weight

    @classmethod
    def twice(cls) -> Conductor:
        """`conductor_2x`: a prompt's own time counts twice, because whoever comes next waits for it
        too. Caches are used more, and on Mooncake's trace the mean TTFT falls by 4 %
        (docs/simulator.md)."""
        return cls(own_weight=2.0)

    @classmethod
    def least_delay(cls) -> Conductor:
        """`least_delay`: a prompt's own time counts four times for those that come later, and once for
        each that waits there already and may be overtaken by it. So a long prompt goes where few
        wait, and a cached one where it is cached: on Mooncake's trace the mean TTFT falls by 5 to 13 %
        (docs/simulator.md). The weights were chosen on that trace."""
        return cls(own_weight=4.0, waiting_weight=1.0)

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        matches = view.match(request.hashes, engines)
        best = max(matches)
        owner = engines[matches.index(best)]
        pools = view.pools()
        pooled = list(zip(pools, view.match(request.hashes, pools), strict=True)) if pools else []
        choices = list[tuple[bool, float, int, Choice]]()
        for engine, blocks in zip(engines, matches, strict=True):
            own = cached_tokens(request, engine, blocks)
            prefill_s = engine.costs.prefill_s(request.tokens, own)
            pull_from: PrefixSource | None = None
            others = [(owner, best), *pooled] if engine.pull_prefix else pooled
            for other, there in others:
                if blocks * self._threshold < there:
                    most = cached_tokens(request, other, there)
                    pulled_s = view.transfer_s(other, engine, most - own)
                    pulled_s += engine.costs.prefill_s(request.tokens, most)
                    if pulled_s < prefill_s:
                        prefill_s, pull_from = pulled_s, other
            queued_s = engine.queued_s(now_s)
            weight = self._own_weight + self._waiting_weight * engine.prefills
            choice = Choice(engine, queued_s + prefill_s, pull_from)
            late = choice.expected_s > request.ttft_slo_s
            cost_s = queued_s + weight * prefill_s
            choices.append((late, cost_s, engine.open_requests, choice))
        return least(choices, lambda one: one[:3], random)[3]
