# SPDX-License-Identifier: Apache-2.0
"""`arrow`: a decode engine computes the prompt if all prefill engines would be late."""

from __future__ import annotations

from random import Random

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.policies.base import (
    Decision,
    EngineView,
    Policy,
    Request,
    Role,
    Route,
    View,
)
from scheduler_plugins.router.policies.conductor import Conductor
from scheduler_plugins.router.policies.least_tpot import LeastTpot
from scheduler_plugins.router.policies.sides import Rule, Sides, least

MARGIN = 0.8
"""Part of the promised TPOT that a step of the decode engine may take while it computes the prompt."""


class Arrow(Policy):
    """Routes as `least_delay` does. If the chosen prefill engine would miss the promised TTFT, a decode engine that
    keeps both promises computes the prompt itself. A prefill makes the steps of all sequences beside it longer, so the
    engine must be idle, or its steps must stay short. Source: Arrow, xllm-service's `SLO_AWARE`, which has neither
    condition."""

    def __init__(self, decode: Rule | None = None) -> None:
        self._prefill = Conductor.least_delay()
        self._decode = decode or LeastTpot()
        self._sides = Sides(self._prefill, self._decode)

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        prefill = view.engines(Role.PREFILL)
        if prefill and request.ttft_slo_s != float("inf"):
            p = self._prefill.choose(request, prefill, view, now_s, random)
            if p.expected_s > request.ttft_slo_s:
                alone = self._alone(request, view, now_s, random)
                if alone is not None:
                    return alone
        return self._sides.decide(request, view, now_s, random)

    def _alone(self, request: Request, view: View, now_s: float, random: Random) -> Route | None:
        able = list[tuple[float, str]]()
        for engine in view.engines(Role.DECODE):
            own_s = engine.queued_s(now_s) + engine.costs.prefill_s(request.tokens)
            kept = (
                own_s <= request.ttft_slo_s
                and self._step_s(request, engine) <= MARGIN * request.tpot_slo_s
            )
            if kept and engine.free_kv >= request.tokens and engine.role is Role.DECODE:
                able.append((own_s, engine.name))
        return Route(None, least(able, lambda pair: pair[0], random)[1]) if able else None

    def _step_s(self, request: Request, engine: EngineView) -> float:
        """The longest step of the engine while it computes the prompt; 0 if no sequence would wait for it."""
        if not engine.batch:
            return 0.0
        tokens = min(request.tokens, engine.costs.chunk_tokens or request.tokens)
        context = engine.context + request.tokens
        return engine.costs.step_s(StepLoad(tokens, tokens**2, engine.batch + 1, context))
