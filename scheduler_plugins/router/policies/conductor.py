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
        """Mind others, too: what an engine computes that another one has cached delays those behind it.

        Args:
            own_weight: how often that extra time counts; above 1 for those that come later.
            waiting_weight: how often more for each prompt that waits at the engine already.
        """
        self._threshold = threshold
        self._own_weight = own_weight
        self._waiting_weight = waiting_weight

    @classmethod
    def twice(cls) -> Conductor:
        """`conductor_2x`: extra time counts twice, because those that come next wait for it too. Caches
        are used more, and on Mooncake's trace the mean TTFT falls by 4 % (docs/simulator.md)."""
        return cls(own_weight=2.0)

    @classmethod
    def least_delay(cls) -> Conductor:
        """`least_delay`: extra time counts four times for those that come later, and twice for each
        that waits there already. So a cached prompt goes where it is cached, the more so the more
        there is to do, and all else goes by the smallest TTFT. The weights were chosen on Mooncake's
        trace (docs/simulator.md)."""
        return cls(own_weight=4.0, waiting_weight=2.0)

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        matches = view.match(request.hashes, engines)
        prefills = self._prefills(request, engines, matches, view)
        most = max(cached_tokens(request, *one) for one in zip(engines, matches, strict=True))
        choices = list[tuple[bool, float, int, Choice]]()
        for engine, (prefill_s, source) in zip(engines, prefills, strict=True):
            choice = Choice(engine, engine.queued_s(now_s) + prefill_s, source)
            weight = self._own_weight - 1 + self._waiting_weight * engine.prefills
            extra_s = max(0.0, prefill_s - engine.costs.prefill_s(request.tokens, most))
            cost_s = choice.expected_s + weight * extra_s
            late = choice.expected_s > request.ttft_slo_s
            choices.append((late, cost_s, engine.open_requests, choice))
        return least(choices, lambda one: one[:3], random)[3]

    def _prefills(
        self,
        request: Request,
        engines: Sequence[EngineView],
        matches: Sequence[int],
        view: View,
    ) -> list[tuple[float, PrefixSource | None]]:
        """For each engine the seconds that this prompt takes there, and where its prefix is fetched from."""
        best = max(matches)
        owner = engines[matches.index(best)]
        pools = view.pools()
        pooled = list(zip(pools, view.match(request.hashes, pools), strict=True)) if pools else []
        found = list[tuple[float, PrefixSource | None]]()
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
            found.append((prefill_s, pull_from))
        return found
