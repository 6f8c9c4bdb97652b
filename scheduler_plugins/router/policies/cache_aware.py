# SPDX-License-Identifier: Apache-2.0
"""`cache_aware`: SGLang's rule."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View, cached_tokens
from scheduler_plugins.router.policies.sides import Choice, Rule, least

MATCH = 0.3
"""A cached prefix decides if it covers more than this part of the prompt."""
ABSOLUTE, RELATIVE = 64, 1.5
"""Load is out of balance if the busiest engine exceeds the idlest by both limits: `ABSOLUTE` more
open requests, and `RELATIVE` times as many."""


class CacheAware(Rule):
    """Chooses the longest cached prefix while load is in balance, else the fewest open requests.

    SGLang's and vLLM's routers have the same rule and thresholds (`cache_aware`, `--cache-threshold
    0.3 --balance-abs-threshold 64 --balance-rel-threshold 1.5`).
    """

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        loads = [engine.open_requests for engine in engines]
        low, high = min(loads), max(loads)
        if high - low <= ABSOLUTE or high <= RELATIVE * low:
            matches = view.match(request.hashes, engines)
            best = max(matches)
            # A prefix that all engines have cached, such as a system prompt, prefers none.
            able = [e for e, blocks in zip(engines, matches, strict=True) if blocks == best]
            if cached_tokens(request, able[0], best) > MATCH * request.tokens:
                engines = able
        return Choice(least(engines, lambda engine: engine.open_requests, random))
