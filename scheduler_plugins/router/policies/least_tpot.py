# SPDX-License-Identifier: Apache-2.0
"""`least_tpot`: the decode engine with the fewest sequences for its speed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule, least


class LeastTpot(Rule):
    """Chooses the smallest sum of times per token over all sequences of an engine, this request
    included.

    The sum is `sequences * step time`. The step time alone hardly depends on the batch: small
    errors of learnt costs would move dozens of sequences. With the sum, an engine of half the speed
    gets about half as many sequences. Prompts that wait at the engine count as sequences, because
    they will share its steps. An engine that would break the promised time per token comes after
    all others that keep it. An engine without room for the prompt comes last.

    If an engine's decode costs are unknown, the mean of the other engines stands in. If all are
    unknown, the fewest sequences decide, then the fewest tokens.
    """

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        known = [engine.costs for engine in engines if engine.costs.knows_decode]
        assumed = CostModel.mean(known) if known else CostModel.token_count()

        def step_s(engine: EngineView) -> float:
            costs = engine.costs if engine.costs.knows_decode else assumed
            sequences = engine.batch + engine.prefills + 1
            return costs.decode_step_s(sequences, engine.context + request.tokens)

        def rank(engine: EngineView) -> tuple[bool, bool, float, int, int]:
            one_s, sequences = step_s(engine), engine.batch + engine.prefills + 1
            return (
                engine.free_kv < request.tokens,
                one_s > request.tpot_slo_s,
                one_s * sequences,
                sequences,
                engine.context,
            )

        chosen = least(engines, rank, random)
        return Choice(chosen, step_s(chosen))
