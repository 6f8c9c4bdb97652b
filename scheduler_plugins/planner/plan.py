# SPDX-License-Identifier: Apache-2.0
"""The plan: every search, one table, and which row is recommended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, inf

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.colocated import colocated, uniform
from scheduler_plugins.planner.errors import PlanError
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import LASTS, Judge, Late, Promise, Window, windows_of
from scheduler_plugins.planner.inventory import Inventory
from scheduler_plugins.planner.mix import Mix, gpus_of, name_of, placed
from scheduler_plugins.planner.papers import distserve, hexgen2, splitwise
from scheduler_plugins.planner.search import Candidate, search
from scheduler_plugins.sim.fleet import Fleet
from scheduler_plugins.sim.report import spread

OURS, COLOCATED = "planner", "colocated"
SEARCHES: dict[str, Callable[[Judge, Bounds], Candidate | None]] = {
    OURS: search,
    COLOCATED: colocated,
    "distserve, high affinity": distserve.high,
    "distserve, low affinity": distserve.low,
    "splitwise": splitwise.splitwise,
    "hexgen2": hexgen2.hexgen2,
}
"""Each search, by its name in tables."""
WORTH = 1.03
"""Disaggregation is recommended if it has this many times the rate of engines that do both, in every window."""
FEWEST = 40
"""A trace with fewer requests has no windows."""
_WRITTEN = 1e4
"""Rates are written in parts of 1 / 10,000."""
_LITTLE = 0.05
"""Part of the closed-form rate at which a promise that cannot be kept is looked at."""


@dataclass(frozen=True)
class Row:
    """A fleet of the table."""

    search: str
    candidate: Candidate
    gpus: int
    price_per_h: float
    watts: float
    windows: Sequence[float]  # highest rate of each window
    worst: int  # the window with the fewest requests in time at the highest rate of all
    in_time: float  # that part
    late: Late  # of that window, at a rate 10 % higher
    wins: bool = False

    @property
    def per_s(self) -> float:
        return self.candidate.per_s

    @property
    def binds(self) -> str:
        """What limits it."""
        causes = self.late._asdict()
        worst = max(causes, key=lambda cause: causes[cause])
        return worst if causes[worst] else "nothing seen"


@dataclass(frozen=True)
class Plan:
    """Everything that the searches reached."""

    inventory: Inventory
    promise: Promise
    windows: Sequence[Window]
    rows: Sequence[Row]  # the recommended one first, then by rate
    why: str  # a sentence: why the first row is recommended
    varied: Sequence[
        tuple[str, float]
    ]  # the recommended fleet with other traffic: what is changed, part in time
    simulated: int  # requests
    runs: int
    order: str
    policy: str

    @property
    def chosen(self) -> Row:
        return self.rows[0]

    @property
    def sources(self) -> list[str]:
        """Where the figures of the engines come from: `measured`, `estimated`, `assumed`."""
        return sorted({profile.source for profile in self.inventory.kinds.values()})

    @property
    def doubts(self) -> list[str]:
        """What to know before it is believed."""
        kinds = self.inventory.kinds
        doubts = [f"{name}: {profile.doubt}" for name, profile in kinds.items() if profile.doubt]
        if any(profile.errors.mixed is None for profile in kinds.values()):
            doubts.append(
                "steps with both prompts and decoding sequences were not measured: they decide between engines of one "
                "role and engines that do both, and simulators differ there by up to 16 points"
            )
        return doubts


def make(
    inventory: Inventory,
    requests: Sequence[Waiting],
    promise: Promise,
    *,
    per_s: float = 0.0,
    each: int = 750,
    order: str = "srjf_calibrated",
    policy: str = "",
    say: Callable[[str], None] = lambda text: None,
    ran: Callable[[int], None] = lambda runs: None,
) -> Plan:
    """Plan.

    Args:
        requests: the trace.
        per_s: the rate that must be kept; 0: the highest.
        each: requests of a window.
        ran: called with the number of simulated windows so far.

    Raises:
        PlanError: the trace has too few requests, or no fleet keeps the promise at this rate; then the message says
            what is possible.
    """
    if len(requests) < FEWEST:
        raise PlanError(
            f"trace: has {len(requests)} requests, wanted are {FEWEST} or more for four windows; record a longer one, "
            "or give --prompt-tokens, --answer-tokens and --per-s"
        )
    windows = windows_of(requests, each)
    if any(part[0].arrival_s == part[-1].arrival_s for _, part in windows):
        raise PlanError(
            f"trace: all {len(windows[0].requests)} requests of a window come at the same time, so they have no rate; record "
            "times that differ, or give more --requests"
        )
    bounds = Bounds(inventory, Workload.of(requests, promise.tpot_s))
    if not (likely := _likely(bounds)):
        raise PlanError("budget: no fleet that answers is within it; give more, or cheaper devices")
    judge = Judge(windows, promise, policy, order, ran=ran)
    judge.first_per_s = max(0.1, bounds.of(likely[0]) / 8)
    rows, by_fleet = list[Row](), dict[Fleet, Row]()
    for name, how in SEARCHES.items():
        before = judge.runs
        if (candidate := how(judge, bounds)) is None:
            say(f"{name}: nothing that keeps the promise")
            continue
        said = f"{candidate.name} keeps the promise at {candidate.per_s:.2f} requests a second"
        say(f"{name}: {said} ({judge.runs - before} runs)")
        same = by_fleet.get(candidate.fleet)
        if same is None or same.candidate.copies != candidate.copies:
            same = by_fleet[candidate.fleet] = _row(name, candidate, judge, inventory)
        rows.append(replace(same, search=name))
    if not rows:
        raise PlanError(f"promise: no fleet keeps it at any rate; {_possible(judge, bounds)}")
    most = max(row.candidate.unit_per_s for row in rows)
    if most + 1 / _WRITTEN > judge.most_per_s * 0.97:
        raise PlanError(
            f"requests {each * len(judge.windows)}: at {most:.3g} requests a second a window lasts less than {LASTS} promised "
            "first tokens, and every rate is in time; give more --requests, of a longer trace"
        )
    chosen, why = _chosen(rows)
    if per_s and chosen.per_s < per_s:
        raise PlanError(
            f"per_s {per_s:g}: no fleet keeps the promise at this rate; the best possible is {chosen.per_s:.2f} requests a "
            f"second ({chosen.candidate.name}). Add GPUs, or promise less"
        )
    rest = sorted((row for row in rows if row is not chosen), key=lambda row: -row.per_s)
    most = max(row.per_s for row in rows)
    rows = [replace(row, wins=row.per_s >= most * 0.98) for row in [chosen, *rest]]
    varied = list(_varied(rows[0], judge))
    return Plan(
        inventory, promise, judge.windows, rows, why, varied, judge.simulated, judge.runs, order, policy
    )  # fmt: skip


def _likely(bounds: Bounds) -> list[Mix]:
    """All mixes of the front, and those that do both, the highest closed-form rate first."""
    return sorted([*front(bounds), *uniform(bounds)], key=bounds.of, reverse=True)


def _row(name: str, candidate: Candidate, judge: Judge, inventory: Inventory) -> Row:
    rate = floor(candidate.unit_per_s * _WRITTEN) / _WRITTEN
    candidate = candidate._replace(per_s=rate * candidate.copies)
    windows = [
        judge.of_window(candidate.fleet, n, rate) * candidate.copies
        for n in range(len(judge.windows))
    ]
    worst, in_time = judge.worst_window(candidate.fleet, rate)
    kinds = [(inventory.kinds[kind], n) for kind, _, n in candidate.mix]
    return Row(
        search=name,
        candidate=candidate,
        gpus=gpus_of(candidate.mix, inventory),
        price_per_h=sum(profile.price_per_h * n for profile, n in kinds),
        watts=sum(profile.watts * n for profile, n in kinds),
        windows=windows,
        worst=worst,
        in_time=in_time,
        late=judge.late(candidate.fleet, rate * 1.1, worst),
    )


def _chosen(rows: Sequence[Row]) -> tuple[Row, str]:
    """The recommended row, and why."""
    apart = [row for row in rows if row.search != COLOCATED]
    both = [row for row in rows if row.search == COLOCATED]
    best = max(apart, key=lambda row: row.per_s, default=None)
    if best is None:
        return both[0], "no fleet of prefill and decode engines keeps the promise"
    if not both:
        return best, "no fleet whose engines do both keeps the promise"
    rival = both[0]
    ratios = [
        ours / max(theirs, 1e-9) for ours, theirs in zip(best.windows, rival.windows, strict=True)
    ]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    if min(ratios) >= WORTH:
        return best, f"it has {shown} times the rate of engines that do both, in the four windows"
    return rival, (
        f"disaggregation has {shown} times its rate in the four windows; it is recommended from {WORTH} times in every "
        "window on"
    )


def _varied(row: Row, judge: Judge) -> list[tuple[str, float]]:
    """The part in time of the worst window, if traffic is 20 % different."""
    fleet, rate = row.candidate.fleet, row.candidate.unit_per_s
    parts = [
        (f"rate {by:+.0%}", judge.worst_window(fleet, rate * (1 + by))[1]) for by in (-0.2, 0.2)
    ]
    for by in (-0.2, 0.2):
        longer = replace(judge, windows=[_longer(window, 1 + by) for window in judge.windows])
        parts.append((f"lengths {by:+.0%}", longer.worst_window(fleet, rate)[1]))
        judge.runs, judge.simulated = longer.runs, longer.simulated
    return parts


def _longer(window: Window, times: float) -> Window:
    return window._replace(
        requests=[
            replace(
                request,
                tokens=max(1, round(request.tokens * times)),
                max_tokens=max(1, round(request.max_tokens * times)),
                block_hashes=request.block_hashes[: int(request.tokens * times) // 512],
            )
            for request in window.requests
        ]
    )


def _possible(judge: Judge, bounds: Bounds) -> str:
    """What the fleets with the highest closed-form rates reach of the promise when there is little to do."""
    mix = _likely(bounds)[0]
    fleet = placed(mix, bounds.inventory)
    if fleet is None:
        return "its engines do not fit the nodes"
    free = replace(judge, promise=Promise(inf, inf))
    served = free.served(fleet, judge.first_per_s * _LITTLE, 0)
    ttft_s = spread([request.ttft_s for request in served])["p90"]
    tpot_s = spread([request.tpot_s for request in served])["p90"]
    return (
        f"the best possible at little load is, for nine of ten requests, a first token within {ttft_s * 1e3:.0f} ms and "
        f"a token within {tpot_s * 1e3:.1f} ms ({name_of(mix)}). Promise less, or use faster devices"
    )
