# SPDX-License-Identifier: Apache-2.0
"""`conductor`: Mooncake's algorithm 1. `conductor_2x` and `least_delay` also count the delay of
other requests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import (
    EngineView,
    Request,
    View,
    cached_tokens,
)
from scheduler_plugins.router.policies.prefix import Prefill, pool_matches, prefill
from scheduler_plugins.router.policies.sides import Choice, Rule, least

THRESHOLD = 2.0
"""An engine fetches the best prefix only if it is more than this many times its own match. Mooncake
names no value."""


class Conductor(Rule):
    """Chooses the smallest predicted TTFT: queued prefill, plus this prompt's prefill, plus the
    fetch of its prefix.

    An engine whose own match is near the best (`match * THRESHOLD >= best`) computes the rest
    itself. Any other engine fetches the best prefix if that is sooner: from the engine that has it
    (`pull_prefix`), or from a KV pool. If no engine can fetch, a popular prefix still spreads: once
    the queue of its engine costs more, another engine computes the prefix again. Source: Mooncake,
    FAST '25, algorithm 1.
    """

    def __init__(self, own_weight: float = 1.0, waiting_weight: float = 0.0) -> None:
        """Set the weight of extra time. Extra time is prefill that an engine computes although
        another engine has the prefix cached. It delays the requests behind this request.

        Args:
            own_weight: how many times extra time counts; the part above 1 is for requests that come
                later.
            waiting_weight: added to `own_weight` for each prompt that already waits at the engine.
        """
        self._own_weight = own_weight
        self._waiting_weight = waiting_weight

    @classmethod
    def twice(cls) -> Conductor:
        """`conductor_2x`: extra time counts twice, because the next requests wait for it too. The
        caches get more hits: on Mooncake's trace the mean TTFT falls by 4 % (docs/simulator.md)."""
        return cls(own_weight=2.0)

    @classmethod
    def least_delay(cls) -> Conductor:
        """`least_delay`: extra time counts four times, and twice more for each prompt that already
        waits at the engine. Thus a cached prompt prefers the engine that has it, and more strongly
        under load. Any other prompt goes to the smallest TTFT. The weights were chosen on
        Mooncake's trace (docs/simulator.md)."""
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
        most = max(cached_tokens(request, *match) for match in zip(engines, matches, strict=True))
        choices = list[tuple[bool, float, int, Choice]]()
        for engine, (prefill_s, source) in zip(engines, prefills, strict=True):
            choice = Choice(engine, engine.queued_s(now_s) + prefill_s, source)
            weight = self._own_weight - 1 + self._waiting_weight * engine.prefills
            extra_s = max(0.0, prefill_s - engine.costs.prefill_s(request.tokens, most))
            cost_s = choice.expected_s + weight * extra_s
            late = choice.expected_s > request.ttft_slo_s
            choices.append((late, cost_s, engine.open_requests, choice))
        return least(choices, lambda candidate: candidate[:3], random)[3]

    def _prefills(
        self,
        request: Request,
        engines: Sequence[EngineView],
        matches: Sequence[int],
        view: View,
    ) -> list[Prefill]:
        best = max(matches)
        owner = engines[matches.index(best)]
        pooled = pool_matches(request, view)
        prefills = list[Prefill]()
        for engine, blocks in zip(engines, matches, strict=True):
            own = cached_tokens(request, engine, blocks)
            others = [(owner, best), *pooled] if engine.pull_prefix else pooled
            prefills.append(prefill(request, engine, engine.costs, own, others, view, THRESHOLD))
        return prefills
