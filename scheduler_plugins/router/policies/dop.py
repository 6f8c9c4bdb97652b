# SPDX-License-Identifier: Apache-2.0
"""`dop`: LoongServe's batching over prefill engines of unlike parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import NamedTuple

from scheduler_plugins.router.policies.base import (
    ASSUMED_TPOT_S,
    Decision,
    Defer,
    EngineView,
    Policy,
    Reject,
    Request,
    Role,
    Route,
    View,
    cached_tokens,
)
from scheduler_plugins.router.policies.least_tpot import LeastTpot
from scheduler_plugins.router.policies.sides import Choice, Rule, chosen_in_time, least

AHEAD = 8
"""An engine with fewer prompts gets the next. Others wait in the router, where they can still go elsewhere."""
RETRY_S = 0.02
"""Pause before a request that waits is decided again."""
EXTRA_WEIGHT = 3.0
"""Prefill of tokens that another engine has cached counts this many times more, as in `least_delay`: it delays others."""
MOST = 32
"""Requests that one decision looks at: those that have waited longest."""
_NEVER_S = 1e6
"""Cost of a request at an engine that came after it was last asked about."""
_GONE_S = 1.0
"""A waiting request that is not asked about for this time was cancelled."""


class _Waiting(NamedTuple):
    request: Request
    costs_s: Mapping[str, float]  # by engine
    seen_s: float


class FullestRoom(Rule):
    """Chooses the engine with the most tokens that has room for one more sequence and keeps the promise.

    Emptier engines stay free for long requests. If no engine has room, `least_tpot` decides. Without a promise, 0.1 s a
    token is assumed. Source: LoongServe, decode on the fewest instances.
    """

    def __init__(self) -> None:
        self._otherwise = LeastTpot()

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice | Reject | Defer:
        promised_s = request.tpot_slo_s if request.tpot_slo_s < inf else ASSUMED_TPOT_S
        able = list[tuple[int, float, EngineView]]()
        for engine in engines:
            step_s = engine.costs.decode_step_s(engine.batch + 1, engine.context + request.tokens)
            room = engine.free_kv >= request.tokens + request.max_tokens
            if engine.costs.knows_decode and room and step_s <= promised_s:
                able.append((engine.context, step_s, engine))
        if not able:
            return self._otherwise.choose(request, engines, view, now_s, random)
        _, step_s, chosen = least(able, lambda candidate: -candidate[0], random)
        return Choice(chosen, step_s)


class Dop(Policy):
    """Divides the requests that wait among prefill engines, each with its own costs.

    Requests are sorted by length and engines by speed, so each engine gets neighbours in length. The division has the
    least sum of `time until the batch is computed / prompt length`. A request is sent when its engine has room for it;
    until then it waits in the router and is divided again. Tensor
    parallelism of an engine is fixed when it starts: vLLM cannot spread a running engine over more GPUs. Source:
    LoongServe, batching.
    """

    def __init__(self, decode: Rule | None = None) -> None:
        self._decode = decode or FullestRoom()
        self._waiting: dict[str, _Waiting] = {}

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        prefill, decode = view.engines(Role.PREFILL), view.engines(Role.DECODE)
        if not prefill:
            chosen = self._decode.choose(request, decode, view, now_s, random)
            return chosen if isinstance(chosen, Reject | Defer) else Route(None, chosen.engine.name)
        self._note(request, prefill, view, now_s)
        p = self._divided(request, prefill, now_s, random)
        expected_s = p.queued_s(now_s) + self._waiting[request.id].costs_s[p.name]
        if now_s + expected_s - request.arrival_s > request.ttft_slo_s:
            del self._waiting[request.id]
            return Reject("ttft", expected_s)
        if p.prefills >= AHEAD:
            return Defer(now_s + RETRY_S)
        del self._waiting[request.id]
        if p.role is Role.WHOLE:
            return Route(None, p.name)
        decode = [engine for engine in decode if engine.name != p.name]
        if not decode:
            return Route(None, p.name)
        d = chosen_in_time(self._decode, request, decode, view, now_s, random)
        return d if isinstance(d, Reject | Defer) else Route(p.name, d.engine.name)

    def _note(
        self, request: Request, engines: Sequence[EngineView], view: View, now_s: float
    ) -> None:
        matches = view.match(request.hashes, engines)
        cached = [cached_tokens(request, *match) for match in zip(engines, matches, strict=True)]
        costs_s = dict[str, float]()
        for engine, there in zip(engines, cached, strict=True):
            own_s = engine.costs.prefill_s(request.tokens, there)
            extra_s = own_s - engine.costs.prefill_s(request.tokens, max(cached))
            costs_s[engine.name] = own_s + EXTRA_WEIGHT * extra_s
        self._waiting[request.id] = _Waiting(request, costs_s, now_s)
        if len(self._waiting) > 1:
            late = [
                name for name, waiting in self._waiting.items() if waiting.seen_s < now_s - _GONE_S
            ]
            for name in late:
                del self._waiting[name]

    def _divided(
        self, request: Request, engines: Sequence[EngineView], now_s: float, random: Random
    ) -> EngineView:
        """The engine of this request. Engines of equal speed are shuffled: otherwise the first of them would get every
        request while all are idle."""
        before = [other for other in self._waiting.values() if other.request.id != request.id]
        before.sort(key=lambda other: other.request.arrival_s)
        waiting = [self._waiting[request.id], *before[: MOST - 1]]
        waiting.sort(key=lambda item: (item.request.tokens, item.request.id))
        by_speed = random.sample(engines, len(engines))
        by_speed.sort(key=lambda engine: -engine.costs.prefill_s(10_000))
        costs_s = [[item.costs_s.get(e.name, _NEVER_S) for item in waiting] for e in by_speed]
        weights = [1 / item.request.tokens for item in waiting]
        queued_s = [engine.queued_s(now_s) for engine in by_speed]
        chosen = divide(costs_s, queued_s, weights)
        own = next(n for n, item in enumerate(waiting) if item.request.id == request.id)
        return by_speed[chosen[own]]


def divide(
    costs_s: Sequence[Sequence[float]], queued_s: Sequence[float], weights: Sequence[float]
) -> list[int]:
    """Divide requests, in their order, among engines, in theirs.

    Each engine gets a run of neighbours, possibly none. All requests of a run end when the whole run is computed.

    Args:
        costs_s: for each engine, the seconds of each request there.
        queued_s: seconds until each engine can begin.
        weights: weight of each request's time.

    Returns:
        For each request, the number of its engine. The weighed sum of times is the least possible.
    """
    count = len(weights)
    heavy = _sums(weights)
    least = [0.0] + [inf] * count  # by requests divided so far, over the engines so far
    taken: list[list[int]] = []
    for own_s, begin_s in zip(costs_s, queued_s, strict=True):
        busy_s, now, cuts = _sums(own_s), list(least), list(range(count + 1))
        for stop in range(1, count + 1):
            for first in range(stop):
                time_s = begin_s + busy_s[stop] - busy_s[first]
                cost = least[first] + time_s * (heavy[stop] - heavy[first])
                if cost < now[stop]:
                    now[stop], cuts[stop] = cost, first
        least = now
        taken.append(cuts)
    chosen, stop = [0] * count, count
    for engine in reversed(range(len(taken))):
        first = taken[engine][stop]
        chosen[first:stop] = [engine] * (stop - first)
        stop = first
    return chosen


def _sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
