# SPDX-License-Identifier: Apache-2.0
"""The simulator beside a live run: the same requests, the same policy, engines with the same costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pd_bench.report import Comparison
from pd_bench.router import scaled
from pd_bench.sample import single
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim.simulate import Scenario

TTFT_OFF = 15.0
HIT_OFF = 2.0
"""Allowed errors of the simulator: percent of the mean TTFT, percentage points of the hit rate."""


class Seen(NamedTuple):
    """The figures of a window of requests."""

    ttft_s: float  # mean
    hit: float  # part of the prompt tokens


def simulated(requests: Sequence[Waiting], policy: str, windows: Sequence[range]) -> list[Seen]:
    """The simulator's figures for these windows of requests. `requests`: see `scaled.read`."""
    scenario = Scenario(
        level=2,
        costs=scaled.whole_costs(),
        cache_blocks=scaled.CACHE_BLOCKS,
        network=scaled.NETWORK,
        kv_tokens=1e12,
    )
    served = scenario.cluster(policy).run(requests)
    seen = []
    for window in windows:
        chosen = [served[n] for n in window]
        cached = sum(request.cached_tokens for request in chosen)
        tokens = sum(request.request.tokens for request in chosen)
        seen.append(Seen(statistics.mean(request.ttft_s for request in chosen), cached / tokens))
    return seen


def compared(name: str, live: Seen, simulated: Seen) -> list[Comparison]:
    """The simulator's errors beside the allowed errors."""
    ttft_off = abs(simulated.ttft_s / live.ttft_s - 1) * 100
    hit_off = abs(simulated.hit - live.hit) * 100
    params = {"requests": name}
    return [
        Comparison("mean TTFT off", params, single(ttft_off), single(TTFT_OFF), "%", 1.0),
        Comparison("hit off", params, single(hit_off), single(HIT_OFF), "points", 1.0),
    ]
