# SPDX-License-Identifier: Apache-2.0
"""Asks the policy for the next engines of a request."""

import asyncio
from collections.abc import Sequence
from math import inf

from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.loop import ran_s
from scheduler_plugins.router.policies.base import Defer, Reject, Request, Route, cached_tokens
from scheduler_plugins.router.policies.sides import least
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.attempt import AbleEngines, Attempt, RejectedError
from scheduler_plugins.router.routing.candidates import Candidates
from scheduler_plugins.router.routing.promises import kept_by
from scheduler_plugins.router.routing.view import LiveView

LEAST_PAUSE_S = 1e-3
"""Shortest pause before a policy is asked again. A policy that always defers must not block the
event loop."""
LONGEST_PAUSE_S = 1.0
"""A deferred request is asked about again at least this often. What a policy waits for may not come: an engine leaves."""


async def next_attempt(
    shared: Shared, candidates: Candidates, request: Request, arrived: float, *, begun: bool
) -> Attempt | None:
    """The policy's decision; None if no engine is left, or all are overloaded.

    Args:
        arrived: when the request came, on the event loop's clock.
        begun: the client has a part of the answer, so the request can no longer be rejected.

    Raises:
        RejectedError: the policy rejects the request.
    """
    loop = asyncio.get_running_loop()
    begun_s = ran_s()
    while (engines := candidates.able(begun=begun)) is not None:
        now = loop.time()
        by_role = {
            Role.PREFILL: engines.prefill,
            Role.DECODE: engines.decode,
            Role.CPU_PREFILL: engines.cpu_prefill,
        }
        able = (*engines.prefill, *engines.cpu_prefill)
        computing = able if engines.prefill else engines.decode
        places = {engine.name: engine.store for engine in computing if engine.store}
        view = LiveView(by_role, shared.pool.prefixes, now, places)
        margin = shared.margins.of(request.qos)
        promised = _with_time_left(
            request, engines.prefill, engines.decode, now - arrived, margin, begun
        )
        if (waited_s := ran_s() - begun_s) < shared.config.first_byte_timeout_s:
            decision = shared.policy.decide(promised, view, now, shared.random)
        else:
            decision = shared.policy.decide_at_last(promised, view, now, shared.random, waited_s)
        if isinstance(decision, Reject):
            shared.metrics.rejected.labels(request.qos, decision.cause).inc()
            raise RejectedError(decision)
        if isinstance(decision, Defer):
            pause_s = min(decision.until_s - now, LONGEST_PAUSE_S)
            await asyncio.sleep(max(LEAST_PAUSE_S, pause_s))
            continue
        return _attempt(shared, request, engines, view, decision, now - arrived, now)
    return None


def _attempt(
    shared: Shared,
    request: Request,
    engines: AbleEngines,
    view: LiveView,
    decision: Route,
    waited_s: float,
    now: float,
) -> Attempt:
    """The engines that the policy has named, and when the first token is expected of them.

    Args:
        waited_s: since the request came.
        now: on the event loop's clock, in seconds.
    """
    answering = next(engine for engine in engines.decode if engine.name == decision.d)
    p = None if decision.p == decision.d else decision.p
    others = [engine for engine in engines.prefill if engine is not answering]
    pool = next((pool for pool in view.pools() if pool.name == decision.pull_from), None)
    name = "" if pool is None else pool.name
    if p is None and (answering.computes_prompts or not others):
        return Attempt(answering, None, engines.cause or "policy", pool=name)
    # An engine that computes no prompts gets the least busy prefill engine.
    prefill = (
        least(others, lambda engine: engine.open_requests, shared.random)
        if p is None
        else next(engine for engine in (*engines.prefill, *engines.cpu_prefill) if engine.name == p)
    )
    _count(shared, request, prefill, now)
    (blocks,) = view.match(request.hashes, [prefill])
    cached, loaded_s = cached_tokens(request, prefill, blocks), 0.0
    if pool is not None:
        (chunks,) = view.match(request.hashes, [pool])
        stored = max(cached, cached_tokens(request, pool, chunks))
        loaded_s = view.transfer_s(pool, prefill, stored - cached)
        cached = stored
    expected_s = None
    if prefill.costs.known:
        own_s = loaded_s + prefill.costs.prefill_s(request.tokens, cached)
        expected_s = waited_s + prefill.queued_s(now) + own_s
    return Attempt(answering, prefill, "", request.tokens - cached, expected_s, name)


def _count(shared: Shared, request: Request, prefill: BackendEngine, now_s: float) -> None:
    """Count prompts of engines without a GPU."""
    no_gpu = prefill.role is Role.CPU_PREFILL
    # A policy sends prompts there whose clients do not wait, and others only if they would be late elsewhere.
    late = no_gpu and request.interactive
    if late:
        shared.pool.history.overflowed(now_s, request.group)
    if no_gpu:
        shared.metrics.cpu_prefills.labels("late" if late else "background").inc()


def _with_time_left(
    request: Request,
    prefill: Sequence[BackendEngine],
    decode: Sequence[BackendEngine],
    waited_s: float,
    margin: float,
    begun: bool,
) -> Request:
    """The request for the policy, with its remaining promises.

    `margin` is a factor: predictions times `margin` must keep the promise.
    """
    if begun:  # it was accepted before
        return request._replace(ttft_slo_s=inf, tpot_slo_s=inf)
    promised = kept_by(request, prefill, decode)
    return promised._replace(ttft_slo_s=promised.ttft_slo_s / margin - waited_s)
