# SPDX-License-Identifier: Apache-2.0
"""`length`: very long and very short prompts leave the usual way. Wraps any policy."""

from __future__ import annotations

from random import Random

from scheduler_plugins.router.policies.base import (
    Decision,
    EngineView,
    Policy,
    Request,
    Role,
    Route,
    View,
    cached_tokens,
)
from scheduler_plugins.router.policies.sides import least

MIN_UNCACHED = 64
"""Below so many tokens to compute, a handoff costs more than it spares."""
MAX_UNCACHED = 32_768
"""Above so many, a request that nobody waits for goes to a `cpu_prefill` engine."""


class Length(Policy):
    """Routes by the tokens that no engine has cached.

    More than `max_uncached`, and no interactive class: the prompt goes to the `cpu_prefill` engine
    that has least to do. Fewer than `min_uncached` that the decode engine has not cached: that
    engine computes them itself. All else is left to the policy inside.
    """

    def __init__(
        self, inner: Policy, min_uncached: int = MIN_UNCACHED, max_uncached: int = MAX_UNCACHED
    ) -> None:
        self._inner = inner
        self._min_uncached = min_uncached
        self._max_uncached = max_uncached

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        decision = self._inner.decide(request, view, now_s, random)
        if type(decision) is not Route or decision.p is None:
            return decision
        d = [one for one in view.engines(Role.DECODE) if one.name == decision.d]
        if self._uncached(request, view, d[0]) < self._min_uncached:
            return Route(None, decision.d)
        cpus = view.engines(Role.CPU_PREFILL)
        if cpus and not request.interactive:
            p = [one for one in view.engines(Role.PREFILL) if one.name == decision.p]
            if p and self._uncached(request, view, p[0]) > self._max_uncached:
                slow = least(cpus, lambda engine: engine.queued_s(now_s), random)
                return Route(slow.name, decision.d)
        return decision

    def _uncached(self, request: Request, view: View, engine: EngineView) -> int:
        (blocks,) = view.match(request.hashes, [engine])
        return request.tokens - cached_tokens(request, engine, blocks)
