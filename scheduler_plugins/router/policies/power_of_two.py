# SPDX-License-Identifier: Apache-2.0
"""`power_of_two`: TetriInfer's choice of a decode engine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule, least


class PowerOfTwo(Rule):
    """Draws two engines with room for prompt and answer, and chooses the one with fewer heavy
    decodes.

    So heavy and light decodes spread evenly, and routers that act at the same time choose different
    engines. Ties are decided by the tokens in the caches. Source: TetriInfer, dispatch to decode
    instances.
    """

    decode = "power_of_two"

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        wanted = request.tokens + request.max_tokens
        able = [engine for engine in engines if engine.free_kv >= wanted] or engines
        two = random.sample(able, 2) if len(able) > 2 else able
        return Choice(
            least(two, lambda engine: (engine.heavy, engine.context, engine.batch), random)
        )
