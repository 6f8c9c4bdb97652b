# SPDX-License-Identifier: Apache-2.0
"""`least_work`: the engine that will have computed its prompts first."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule, least


class LeastWork(Rule):
    """Chooses the smallest predicted seconds of queued prefill, then the fewest open requests. It
    ignores caches."""

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        chosen = least(
            engines, lambda engine: (engine.queued_s(now_s), engine.open_requests), random
        )
        expected_s = chosen.queued_s(now_s) + chosen.costs.prefill_s(request.tokens)
        return Choice(chosen, expected_s)
