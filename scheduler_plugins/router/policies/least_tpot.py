# SPDX-License-Identifier: Apache-2.0
"""`least_tpot`: the decode engine with the fewest sequences for its speed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import EngineView, Request, Role, View
from scheduler_plugins.router.policies.prefix import NOTHING, Prefill, prefills
from scheduler_plugins.router.policies.sides import Choice, Rule, least


class LeastTpot(Rule):
    """Chooses the smallest sum of times per token over all sequences of an engine, this request
    included.

    The sum is `sequences * step time`. The step time alone depends little on the batch: small
    errors of learnt costs would move dozens of sequences. With the sum, an engine of half the speed
    gets about half as many sequences. Prompts that wait at the engine count as sequences, because
    they will share its steps. An engine that would break the promised time per token comes after
    all others that keep it. An engine without room for the prompt comes last.

    If an engine's decode costs are unknown, the mean of the other engines stands in. If all are
    unknown, the fewest sequences decide, then the fewest tokens.

    Without a prefill engine, the chosen engine computes the prompt as well. Then all sequences wait
    for the prompt and for each token of its answer: the sum is `sequences * (prefill + max_tokens *
    step time)`. A prefix that the engine has cached, or can load from a KV pool, makes it smaller.
    """

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        known_costs = [engine.costs for engine in engines if engine.costs.knows_decode]
        assumed = CostModel.mean(known_costs) if known_costs else CostModel.token_count()

        costs = {each.name: each.costs if each.costs.knows_decode else assumed for each in engines}
        alone = not view.engines(Role.PREFILL)
        computed = dict[str, Prefill]()
        if alone:
            computed = prefills(request, engines, view, costs)

        def step_s(engine: EngineView) -> float:
            sequences = engine.batch + engine.prefills + 1
            return costs[engine.name].decode_step_s(sequences, engine.context + request.tokens)

        tokens = request.max_tokens if alone else 1

        def rank(engine: EngineView) -> tuple[bool, bool, float, int, float, int]:
            one_s, sequences = step_s(engine), engine.batch + engine.prefills + 1
            prefill_s, _ = computed.get(engine.name, NOTHING)
            return (
                engine.free_kv < request.tokens,
                one_s > request.tpot_slo_s,
                (prefill_s + tokens * one_s) * sequences if one_s else 0.0,
                sequences,
                prefill_s,
                engine.context,
            )

        chosen = least(engines, rank, random)
        return Choice(chosen, step_s(chosen), computed.get(chosen.name, NOTHING)[1])
