# SPDX-License-Identifier: Apache-2.0
"""`roles truth`: the simulator beside live engines that change their roles, under the same requests.

The traffic is code, conversations, and code again. Each policy starts with the best fixed ratio for code.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple, Protocol

from pd_bench.report import Comparison, Say
from pd_bench.roles.fleets import FleetKind
from pd_bench.roles.play import Sustained, in_parallel, run, sustained
from pd_bench.sample import single
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.cluster import Change, Cluster

POLICIES = ("pressure", "ratio", "fixed")
TIME_OFF = 15.0
"""Allowed error of the simulator in mean TTFT and mean TPOT, in percent."""
POINTS_OFF, POINTS_OFF_MOCKS = 10.0, 3.0
"""Allowed error in the part of requests that were in time, in percentage points: real engines, mocks."""
LOAD = 0.8
"""Rate of each phase, as a part of the capacity of its best fixed ratio in the simulator."""

SAMPLE_S = 5.0
"""Length of the periods in which a simulated engine counts as busy for a part of the time."""


class Outcome(Protocol):
    """What became of a request, live or simulated."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float: ...


class Figures(NamedTuple):
    """The figures of a run. Times are in seconds, over requests that were answered."""

    ttft_s: float  # mean
    tpot_s: float  # mean over answers of two and more tokens
    kept: float  # part of all requests that was in time
    moves: int

    @classmethod
    def of(cls, fleet: FleetKind, outcomes: Sequence[Outcome | None], moves: int) -> Figures:
        """`outcomes`: None for a request without an answer."""
        answered = [outcome for outcome in outcomes if outcome is not None]
        kept = sum(
            outcome.ttft_s <= fleet.ttft_s and outcome.tpot_s <= fleet.tpot_s
            for outcome in answered
        )
        return cls(
            statistics.mean(outcome.ttft_s for outcome in answered),
            statistics.mean(outcome.tpot_s for outcome in answered if outcome.tpot_s),
            kept / len(outcomes),
            moves,
        )


@dataclass(frozen=True)
class Plan:
    """The requests of a run, and the ratio that it starts with."""

    requests: Sequence[Waiting]
    prefill: int
    per_s: Sequence[float]  # of each phase


def plan(
    fleet: FleetKind,
    code: Sequence[Waiting],
    conv: Sequence[Waiting],
    seconds: float,
    load: float,
    jobs: int,
    say: Say,
) -> Plan:
    """Three phases of `seconds` each."""
    arguments = [
        (fleet, trace_requests, p) for trace_requests in (code, conv) for p in fleet.ratios
    ]
    sustained_rates = in_parallel(jobs, sustained, arguments, lambda given, result: None)
    each = len(fleet.ratios)
    capacities = [Sustained(sustained_rates[:each]), Sustained(sustained_rates[each:])]
    for name, capacity in zip(("code", "conversations"), capacities, strict=True):
        say(
            f"{name}: {fleet.ratio_name(capacity.prefill)} sustains {capacity.most:.2f} requests a second"
        )
    rates = [load * capacities[n].most for n in (0, 1, 0)]
    parts, taken = list[Sequence[Waiting]](), [0, 0]
    for phase, per_s in enumerate(rates):
        which = phase % 2
        source, first = (code, conv)[which], taken[which]
        count = min(round(per_s * seconds), len(source) - first)
        taken[which] += count
        parts.append(trace.at_rate(source[first : first + count], per_s, phase))
    return Plan(trace.one_after_another(parts), capacities[0].prefill, rates)


class Busy(NamedTuple):
    """How many other engines compute at the same time, on average."""

    beside_prefill: float
    beside_decode: float


def busy(fleet: FleetKind, given: Plan, policy: str) -> Busy:
    """How busy the other engines are while an engine computes a prompt, or decodes, in a simulated run."""
    samples = list[list[tuple[float, float]]]()

    def sample(cluster: Cluster, now_s: float) -> None:
        samples.append(
            [(shares_of.prefilling_s, shares_of.decoding_s) for shares_of in cluster.nodes.values()]
        )

    count = round(given.requests[-1].arrival_s / SAMPLE_S)
    changes = [Change(n * SAMPLE_S, sample) for n in range(count + 1)]
    run(fleet, given.requests, given.prefill, policy, changes)
    computed, beside = [0.0, 0.0], [0.0, 0.0]
    for before, after in pairwise(samples):
        spent = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
        shares = [min(1.0, sum(shares_of) / SAMPLE_S) for shares_of in spent]
        for shares_of, share in zip(spent, shares, strict=True):
            for kind in (0, 1):
                computed[kind] += shares_of[kind]
                beside[kind] += shares_of[kind] * (sum(shares) - share)
    return Busy(*(b / c if c else 0.0 for b, c in zip(beside, computed, strict=True)))


def simulated(fleet: FleetKind, given: Plan, policy: str) -> Figures:
    """The simulator's figures."""
    served, moves = run(fleet, given.requests, given.prefill, policy)
    return Figures.of(
        fleet, [None if request.end_s is None else request for request in served], moves
    )


def compared(
    live: Mapping[str, Figures], simulated_figures: Mapping[str, Figures], points: float
) -> list[Comparison]:
    """The simulator's errors beside the allowed errors. `points`: the allowed error of the parts in time."""
    rows = list[Comparison]()
    for name, ours in live.items():
        theirs, params = simulated_figures[name], {"roles": name}
        for what, live_value, model in (
            ("mean TTFT off", ours.ttft_s, theirs.ttft_s),
            ("mean TPOT off", ours.tpot_s, theirs.tpot_s),
        ):
            off = abs(model / live_value - 1) * 100
            rows.append(Comparison(what, params, single(off), single(TIME_OFF), "%", 1.0))
        off = abs(theirs.kept - ours.kept) * 100
        rows.append(Comparison("in time off", params, single(off), single(points), "points", 1.0))
    wrong = float(len(swapped(live, simulated_figures)))
    rows.append(
        Comparison("policies in another order", {}, single(wrong), single(0.5), "pairs", 1.0)
    )
    return rows


def swapped(live: Mapping[str, Figures], model: Mapping[str, Figures]) -> list[tuple[str, str]]:
    """Pairs of policies that the simulator ranks the other way round, by more than a point on both sides."""
    pairs = []
    for first, other in combinations(live, 2):
        apart = [round(100 * (side[first].kept - side[other].kept), 1) for side in (live, model)]
        if min(apart) < -1.0 and max(apart) > 1.0:
            pairs.append((first, other))
    return pairs


def scaled(requests: Sequence[Waiting], prompts: float, answers: float) -> list[Waiting]:
    """The requests with shorter prompts and answers; an answer has at least two tokens, so that it has a TPOT."""
    return [
        replace(
            request,
            tokens=max(1, round(request.tokens / prompts)),
            max_tokens=max(2, round(request.max_tokens / answers)),
        )
        for request in requests
    ]
