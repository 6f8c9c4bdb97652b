# SPDX-License-Identifier: Apache-2.0
"""`roles shift`: the traffic changes once, from one trace to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pd_bench.report import Say
from pd_bench.roles.fleets import OPT_13B, FleetKind
from pd_bench.roles.play import Outcome, Sustained, in_parallel, play, sustained
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.capacity import KEPT, largest
from scheduler_plugins.sim.cluster import Change, Cluster

ORACLE = "oracle"
POLICIES = ("pressure", "ratio", "arrow", "tetri", "mixed", "arrow_paper")
LEAST = 0.3
"""The search for the largest rate starts here, so lower rates look the same."""
OF_ORACLE = 0.92
"""`pressure` sustains at least this part of the oracle's rate."""
OVER_FIXED = 1.3
"""On the fleet where decode is dear, `pressure` sustains this many times the best fixed ratio's rate."""


class Half(NamedTuple):
    """A trace, and what the fleet sustains of it."""

    name: str
    requests: Sequence[Waiting]
    capacity: Sustained


class Shifted(NamedTuple):
    """Rates that were sustained in both halves; 1.0 is the capacity of each half's best ratio."""

    fleet: FleetKind
    order: str
    rates: Mapping[str, float]  # by policy; fixed ratios are "4P4D"

    @property
    def fixed(self) -> list[tuple[str, float]]:
        """Fixed ratios, the worst first."""
        fixed_rates = [(name, rate) for name, rate in self.rates.items() if name[0].isdigit()]
        return sorted(fixed_rates, key=lambda pair: pair[1])


def capacities(
    fleet: FleetKind, traces: Mapping[str, Sequence[Waiting]], jobs: int, say: Say
) -> list[Half]:
    """What each ratio sustains of each trace."""
    arguments = [(fleet, name, traces[name], p) for name in traces for p in fleet.ratios]

    def done(given: tuple[object, ...], per_s: float) -> None:
        say(
            f"{fleet.name}, {given[1]}: {fleet.ratio_name(int(str(given[3])))} sustains {per_s:.1f} requests a second"
        )

    sustained = in_parallel(jobs, _sustained, arguments, done)
    each = len(fleet.ratios)
    return [
        Half(name, traces[name], Sustained(sustained[n * each : (n + 1) * each]))
        for n, name in enumerate(traces)
    ]


def compare(fleet: FleetKind, halves: Sequence[Half], jobs: int, say: Say) -> Shifted:
    """Every policy, the oracle and the fixed ratios, for one order of the halves."""
    order = " then ".join(half.name for half in halves)
    rates = {
        fleet.ratio_name(p): min(half.capacity.per_s[p - 1] / half.capacity.most for half in halves)
        for p in fleet.ratios
    }
    best = max(rates, key=lambda name: rates[name])
    contenders = [best, ORACLE, *POLICIES]

    def done(given: tuple[object, ...], rate: float) -> None:
        say(f"{fleet.name}, {order}: {given[2]} sustains {rate:.3f} of both capacities")

    sustained_rates = in_parallel(jobs, _rate, [(fleet, halves, name) for name in contenders], done)
    return Shifted(fleet, order, {**rates, **dict(zip(contenders, sustained_rates, strict=True))})


def bars(shifted: Shifted) -> list[tuple[str, float, float, float | None]]:
    """Rows of (name, ours, baseline, bar); bars are the least ratio."""
    rates, best = shifted.rates, shifted.fixed[-1][1]
    dear = shifted.fleet is OPT_13B or shifted.fleet.name == OPT_13B.name
    return [
        ("pressure beside the oracle", rates["pressure"], rates[ORACLE], OF_ORACLE),
        ("pressure beside the best fixed", rates["pressure"], best, OVER_FIXED if dear else 1.0),
        ("ratio beside the best fixed", rates["ratio"], best, 1.0),
        ("arrow beside the best fixed", rates["arrow"], best, 1.0),
    ]


def _sustained(fleet: FleetKind, name: str, requests: Sequence[Waiting], prefill: int) -> float:
    return sustained(fleet, requests, prefill)


def _rate(fleet: FleetKind, halves: Sequence[Half], name: str) -> float:
    return largest(lambda rate: _outcome(fleet, halves, name, rate).worst >= KEPT, LEAST, 1.1)


def _outcome(fleet: FleetKind, halves: Sequence[Half], name: str, rate: float) -> Outcome:
    """One run. Every policy starts with the best ratio of the first half."""
    first, second = halves
    parts = [trace.at_rate(half.requests, rate * half.capacity.most, 0) for half in halves]
    requests, split = trace.one_after_another(parts), len(parts[0])
    prefill = first.capacity.prefill
    if name == ORACLE:
        changes = _switch(
            fleet.engines, prefill, second.capacity.prefill, requests[split - 1].arrival_s
        )
        return play(fleet, requests, prefill, split=split, changes=changes)
    if name[0].isdigit():
        return play(fleet, requests, int(name[0]), split=split)
    return play(fleet, requests, prefill, name, split=split)


def _switch(engines: int, before: int, after: int, at_s: float) -> list[Change]:
    """The oracle: at the switch, all at once."""
    names = [f"p{n}" for n in range(before)] + [f"d{n}" for n in range(engines - before)]
    moved, role = (names[after:before], Role.DECODE)
    if after > before:
        moved, role = names[before:after], Role.PREFILL
    return [Change(at_s, partial(_set_role, name, role)) for name in moved]


def _set_role(name: str, role: Role, cluster: Cluster, now_s: float) -> None:
    cluster.set_role(name, role, now_s)
