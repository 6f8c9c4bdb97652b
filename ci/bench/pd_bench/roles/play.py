# SPDX-License-Identifier: Apache-2.0
"""One simulated run of a fleet, and searches over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, TypeVar

from pd_bench.roles.arrow_paper import ArrowPaper
from pd_bench.roles.fleets import FleetKind
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.registry import create
from scheduler_plugins.sim import capacity, trace
from scheduler_plugins.sim.capacity import KEPT, kept
from scheduler_plugins.sim.cluster import Change
from scheduler_plugins.sim.served import Served

UNGUARDED = {"arrow_paper": ArrowPaper}
"""Policies as they are published, which run without guards. No router has them."""
T = TypeVar("T")


class Outcome(NamedTuple):
    """Parts of the requests that were served within both promises, and the moves of the run."""

    kept: float
    first: float  # of the requests of the first trace
    second: float  # of the second; 1 if there is none
    moves: int

    @property
    def worst(self) -> float:
        return min(self.first, self.second)


def play(
    fleet: FleetKind,
    requests: Sequence[Waiting],
    prefill: int,
    roles: str = "",
    *,
    split: int | None = None,
    changes: Iterable[Change] = (),
) -> Outcome:
    """Play requests on a fleet.

    Args:
        prefill: prefill engines at the start.
        roles: a role policy; empty: no engine changes its role.
        split: where the second trace begins.
    """
    served, moves = run(fleet, requests, prefill, roles, changes)
    split = len(served) if split is None else split
    return Outcome(
        _kept(fleet, served),
        _kept(fleet, served[:split]),
        _kept(fleet, served[split:]) if split < len(served) else 1.0,
        moves,
    )


def run(
    fleet: FleetKind,
    requests: Sequence[Waiting],
    prefill: int,
    roles: str = "",
    changes: Iterable[Change] = (),
) -> tuple[list[Served], int]:
    """What became of each request, and the number of moves. Arguments as of `play`."""
    controller, route = None, DEFAULT
    if roles:
        policy = UNGUARDED[roles]() if roles in UNGUARDED else create(roles)
        controller, route = RoleController(policy), policy.route or DEFAULT
        if roles in UNGUARDED:
            controller = RoleController(policy, dwell_s=0.0, pause_s=0.0)
    cluster = fleet.scenario(prefill).cluster(route)
    served = cluster.run(requests, changes, controller)
    return served, len(cluster.roles.moved)


def _kept(fleet: FleetKind, served: Sequence[Served]) -> float:
    return kept(served, fleet.ttft_s, fleet.tpot_s)


class Sustained(NamedTuple):
    """For each number of prefill engines from 1 on, the largest rate that is served in time; and the best."""

    per_s: Sequence[float]

    @property
    def prefill(self) -> int:
        """Prefill engines of the best ratio."""
        return self.per_s.index(max(self.per_s)) + 1

    @property
    def most(self) -> float:
        return max(self.per_s)


def sustained(fleet: FleetKind, requests: Sequence[Waiting], prefill: int) -> float:
    """The largest rate of these requests, a second, that `prefill` engines of the fleet serve in time."""

    def keeps(per_s: float) -> bool:
        return play(fleet, trace.at_rate(requests, per_s, 0), prefill).kept >= KEPT

    return capacity.sustained(keeps)


def in_parallel(
    jobs: int,
    work: Callable[..., T],
    arguments: Sequence[tuple[object, ...]],
    done: Callable[[tuple[object, ...], T], None],
) -> list[T]:
    """Call `work` with each of the arguments in processes of their own. `done` is called with each result in order."""
    results = list[T]()
    with ProcessPoolExecutor(jobs) as pool:
        for given, result in zip(
            arguments, pool.map(work, *zip(*arguments, strict=True)), strict=True
        ):
            done(given, result)
            results.append(result)
    return results
