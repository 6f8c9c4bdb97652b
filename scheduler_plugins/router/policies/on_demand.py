# SPDX-License-Identifier: Apache-2.0
"""`on_demand`: P/D-Serve's forwarding on acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import Defer, EngineView, Reject, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule, least

BATCH = 4
"""Most prompts that one prefill engine has at a time."""
PATIENCE_S = 30.0
"""Longest wait for an engine to accept."""
RETRY_S = 0.05
"""Pause before all engines are asked again."""


class OnDemand(Rule):
    """Prefill engines keep no queue. The first engine with room takes the request; until then the
    request waits at the router.

    Engines with the fewest open requests come first. An engine accepts while it has fewer than
    `BATCH` prompts and has not answered "no room". If all refuse, all are asked again until the
    deadline; then the request is rejected. Source: P/D-Serve, on-demand forwarding.
    """

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice | Reject | Defer:
        able = [
            candidate
            for candidate in engines
            if candidate.prefills < BATCH and candidate.accepts(now_s)
        ]
        if able:
            return Choice(least(able, lambda engine: engine.open_requests, random))
        deadline_s = min(request.deadline_s, request.arrival_s + PATIENCE_S)
        if now_s >= deadline_s:
            return Reject("deadline", max(1.0, min(e.queued_s(now_s) for e in engines)))
        return Defer(min(deadline_s, now_s + RETRY_S))
