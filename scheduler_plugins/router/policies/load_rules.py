# SPDX-License-Identifier: Apache-2.0
"""Rules that look at the engines' load alone, or at nothing: `random`, `round_robin`, `jsq`, `least_work`, `power_of_two`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule, least


class RandomChoice(Rule):
    """Chooses any engine with the same probability. Other policies are measured against it."""

    decode = "random"

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        return Choice(random.choice(engines))


class RoundRobin(Rule):
    """Chooses the engine whose last turn is longest ago. Engines never chosen come first, in the
    order given."""

    decode = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        chosen = min(engines, key=lambda engine: self._last_turn.get(engine.name, 0))
        self._turn += 1
        self._last_turn[chosen.name] = self._turn
        return Choice(chosen)


class ShortestQueue(Rule):
    """Chooses the engine with the fewest open requests, whatever their size. Ties are broken at
    random.

    On the prefill side, a request is open until its prompt is computed.
    """

    decode = "jsq"

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        return Choice(least(engines, lambda engine: engine.open_requests, random))


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
        needed = request.tokens + request.max_tokens
        able = [engine for engine in engines if engine.free_kv >= needed] or engines
        two = random.sample(able, 2) if len(able) > 2 else able
        return Choice(
            least(two, lambda engine: (engine.heavy, engine.context, engine.batch), random)
        )
