# SPDX-License-Identifier: Apache-2.0
"""`kv_cost`: Dynamo's cost of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View, cached_tokens
from scheduler_plugins.router.policies.sides import Choice, Rule


class KvCostPrefill(Rule):
    """Chooses the fewest prefill blocks: blocks that the engine has yet to compute,
    plus the blocks of this prompt.

    Dynamo's KV router adds the blocks of decoding sequences, and its prefill stage does not. A
    prefill engine here has no such blocks. An engine of role `BOTH` or `WHOLE` has them, so they
    count there.
    """

    decode = "kv_cost"

    def __init__(self, temperature: float = 0.0) -> None:
        """`temperature`: 0 takes the smallest cost; above 0, engines are drawn by a softmax of
        their costs."""
        self._temperature = temperature

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        costs = []
        for engine, blocks in zip(engines, view.match(request.hashes, engines), strict=True):
            fresh = request.tokens - cached_tokens(request, engine, blocks)
            prefill = (engine.queued_tokens + fresh) / engine.block_tokens
            costs.append(prefill + engine.context / engine.block_tokens)
        return Choice(_drawn(engines, costs, self._temperature, random))


class KvCostDecode(Rule):
    """Chooses the fewest blocks of decoding sequences. Cached prefixes do not count."""

    def __init__(self, temperature: float = 0.0) -> None:
        self._temperature = temperature

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        costs = [engine.context / engine.block_tokens for engine in engines]
        return Choice(_drawn(engines, costs, self._temperature, random))


def _drawn(
    engines: Sequence[EngineView], costs: Sequence[float], temperature: float, random: Random
) -> EngineView:
    low, high = min(costs), max(costs)
    if not temperature or high == low:
        return random.choice([e for e, cost in zip(engines, costs, strict=True) if cost == low])
    weights = [exp((low - cost) / (high - low) / temperature) for cost in costs]
    return random.choices(engines, weights)[0]
