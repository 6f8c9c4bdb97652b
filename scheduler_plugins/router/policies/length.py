# SPDX-License-Identifier: Apache-2.0
"""`length`: routes very long and very short prompts apart from the rest. Wraps any policy."""

from __future__ import annotations

from math import inf
from random import Random

from scheduler_plugins.router.policies.base import (
    ASSUMED_TTFT_S,
    Decision,
    EngineView,
    Policy,
    Reject,
    Request,
    Role,
    Route,
    View,
    cached_tokens,
)
from scheduler_plugins.router.policies.sides import least

MIN_UNCACHED = 64
"""With fewer tokens to compute, a handoff costs more than it saves."""
MAX_UNCACHED = 32_768
"""With more tokens to compute, a request that is not interactive goes to a `cpu_prefill` engine. Used while the costs of
prefill are not known. If they are known, a prompt is long if the chosen engine would compute it for `LONG_S`."""
LONG_S = ASSUMED_TTFT_S
"""A prefill of this length makes the prompt behind it miss a usual TTFT SLO."""


class Length(Policy):
    """Routes by the tokens that the chosen engines have not cached.

    If the decode engine lacks fewer than `min_uncached` tokens, it computes them itself. If the
    prefill engine lacks more than `max_uncached` and the class is not interactive, the least busy
    `cpu_prefill` engine computes the prompt. Without `max_uncached`, costs say which prompts are long (`LONG_S`). If the wrapped policy refuses because every prefill engine would be late,
    and a `cpu_prefill` engine would not, that one computes the prompt. Otherwise the wrapped policy's decision stands.
    """

    def __init__(
        self, inner: Policy, min_uncached: int = MIN_UNCACHED, max_uncached: int | None = None
    ) -> None:
        """`max_uncached`: in tokens; None: computed from the engine's costs."""
        self._inner = inner
        self._min_uncached = min_uncached
        self._max_uncached = max_uncached

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        decision = self._inner.decide(request, view, now_s, random)
        if isinstance(decision, Reject) and decision.cause == "ttft":
            return self._by_cpu(request, view, now_s, random) or decision
        if type(decision) is not Route or decision.p is None:
            return decision
        d = [candidate for candidate in view.engines(Role.DECODE) if candidate.name == decision.d]
        if self._uncached(request, view, d[0]) < self._min_uncached:
            return Route(None, decision.d)
        cpus = view.engines(Role.CPU_PREFILL)
        if cpus and not request.interactive:
            p = [
                candidate
                for candidate in view.engines(Role.PREFILL)
                if candidate.name == decision.p
            ]
            if p and self._is_long(request, view, p[0]):
                slow = least(cpus, lambda engine: engine.queued_s(now_s), random)
                return Route(slow.name, decision.d)
        return decision

    def _by_cpu(
        self, request: Request, view: View, now_s: float, random: Random
    ) -> Decision | None:
        """The decision with the soonest `cpu_prefill` engine; None if none keeps the promised TTFT."""
        soonest: tuple[float, str] | None = None
        for engine in view.engines(Role.CPU_PREFILL):
            (blocks,) = view.match(request.hashes, [engine])
            cached = cached_tokens(request, engine, blocks)
            expected_s = engine.queued_s(now_s) + engine.costs.prefill_s(request.tokens, cached)
            if expected_s <= request.ttft_slo_s and (soonest is None or expected_s < soonest[0]):
                soonest = expected_s, engine.name
        if soonest is None:
            return None
        decision = self._inner.decide(request._replace(ttft_slo_s=inf), view, now_s, random)
        return decision._replace(p=soonest[1], pull_from=None) if type(decision) is Route else None

    def _is_long(self, request: Request, view: View, engine: EngineView) -> bool:
        uncached = self._uncached(request, view, engine)
        if self._max_uncached is not None or not engine.costs.known:
            return uncached > (self._max_uncached or MAX_UNCACHED)
        return engine.costs.prefill_s(request.tokens, request.tokens - uncached) > LONG_S

    def _uncached(self, request: Request, view: View, engine: EngineView) -> int:
        (blocks,) = view.match(request.hashes, [engine])
        return request.tokens - cached_tokens(request, engine, blocks)
