# SPDX-License-Identifier: Apache-2.0
"""The results of a simulation in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from scheduler_plugins.sim.node import Node
from scheduler_plugins.sim.served import Served

PERCENTILES = (50, 90, 95, 99)


class RoleMove(NamedTuple):
    """An engine that changed its role."""

    at_s: float
    engine: str
    before: str
    after: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run. Times are in seconds, fractions between 0 and 1."""

    policy: str
    requests: int
    served: int
    rejected: Mapping[str, int]  # by cause
    restarts: int  # attempts that were lost to an engine's death
    preemptions: int
    duration_s: float  # from the first arrival to the last token
    ttft_s: Mapping[str, float]  # mean, p50, p90, p95, p99
    tpot_s: Mapping[str, float]
    hit: float  # part of the served requests' prompt tokens that came from a cache
    pulled: float  # part of those tokens that came from another engine's cache or the pool
    far: float  # part of those tokens that came from the far store
    goodput_per_s: float  # requests that were served within both promises, per second of arrivals
    attained: float  # part of the served requests that were
    utilisation: Mapping[str, float]  # by engine, fraction of the time in which it computed
    moved_bytes: int  # over the links
    moves: Sequence[RoleMove] = ()


def summarize(
    policy: str,
    served: Sequence[Served],
    nodes: Iterable[Node],
    *,
    ttft_slo_s: float,
    tpot_slo_s: float,
    moved_bytes: int,
    moves: Sequence[RoleMove] = (),
) -> Summary:
    """Sum up a run of `Cluster`. `served` has at least one request."""
    done = [request for request in served if request.end_s is not None]
    begun_s = served[0].request.arrival_s
    ended_s = max((request.end_s or 0.0 for request in done), default=begun_s)
    duration_s = max(ended_s - begun_s, 1e-9)
    kept = sum(request.ttft_s <= ttft_slo_s and request.tpot_s <= tpot_slo_s for request in done)
    arriving_s = served[-1].request.arrival_s - begun_s or duration_s
    tokens = sum(request.request.tokens for request in done)
    return Summary(
        policy=policy,
        requests=len(served),
        served=len(done),
        rejected=dict(
            sorted(Counter(request.rejected for request in served if request.rejected).items())
        ),
        restarts=sum(request.restarts for request in served),
        preemptions=sum(request.preemptions for request in served),
        duration_s=duration_s,
        ttft_s=spread([request.ttft_s for request in done]),
        tpot_s=spread([request.tpot_s for request in done if request.request.max_tokens > 1]),
        hit=sum(request.cached_tokens for request in done) / max(1, tokens),
        pulled=sum(request.pulled_tokens for request in done) / max(1, tokens),
        far=sum(request.far_tokens for request in done) / max(1, tokens),
        goodput_per_s=kept / arriving_s,
        attained=kept / max(1, len(done)),
        utilisation={node.name: node.busy_s / duration_s for node in nodes},
        moved_bytes=moved_bytes,
        moves=moves,
    )


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles; the p-th percentile is the smallest value that p percent of the values do not exceed.
    Empty: all 0."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", *(f"p{n}" for n in PERCENTILES)), 0.0)
    numbers = {"mean": sum(ordered) / len(ordered)}
    for n in PERCENTILES:
        numbers[f"p{n}"] = ordered[max(0, ceil(len(ordered) * n / 100) - 1)]
    return numbers
