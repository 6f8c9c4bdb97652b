# SPDX-License-Identifier: Apache-2.0
"""`least_tpot`: the decode engine whose steps will be shortest."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule


class LeastTpot(Rule):
    """Smallest predicted time per token with this request in the batch. An engine without room
    comes last."""

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        tokens = request.tokens
        chosen, least, full = engines[0], inf, True
        for engine in engines:
            step_s = engine.costs.decode_step_s(engine.batch + 1, engine.context + tokens)
            lacks = engine.free_kv < tokens
            if lacks < full or (lacks == full and step_s < least):
                chosen, least, full = engine, step_s, lacks
        return Choice(chosen, least)
