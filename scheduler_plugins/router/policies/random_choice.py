# SPDX-License-Identifier: Apache-2.0
"""`random`: any engine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule


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
