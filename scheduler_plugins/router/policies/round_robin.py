# SPDX-License-Identifier: Apache-2.0
"""`round_robin`: each engine in turn."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule


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
