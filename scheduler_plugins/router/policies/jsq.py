# SPDX-License-Identifier: Apache-2.0
"""`jsq`: join the shortest queue."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule, least


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
