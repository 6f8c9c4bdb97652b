# SPDX-License-Identifier: Apache-2.0
"""Roles that change during a simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pd_bench.scheduler.workload import lengths, poisson
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.added import PolicyError
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import create
from scheduler_plugins.router.roles.base import Fleet, Move, RolePolicy
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.pressure import Pressure
from scheduler_plugins.sim.cluster import Change, Cluster
from scheduler_plugins.sim.node import Node, NodeSettings
from scheduler_plugins.sim.simulate import Scenario
from scheduler_plugins.sim.trace import one_after_another

TRUTH = CostModel(a=1e-4, c=0.01, d0=0.02, d1=1e-4, d2=1e-7, chunk_tokens=2048)
SETTINGS = NodeSettings(truth=TRUTH, block_tokens=16, order="fcfs", kv_tokens=50_000)


def cluster(roles: dict[str, Role], policy: str = "least_delay") -> Cluster:
    return Cluster([Node(name, role, SETTINGS) for name, role in roles.items()], create(policy))


def load(prompt: int, answer: int, count: int, per_s: float, seed: int = 0) -> list[Waiting]:
    return poisson(lengths(seed, count, median_tokens=prompt, max_tokens=answer), per_s, seed)


class Sees(RolePolicy):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Fleet]] = []

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        self.seen.append((now_s, fleet))
        return []


def test_the_controller_is_asked_until_the_last_request_ends() -> None:
    policy = Sees()
    served = cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
        load(1000, 50, 20, 5.0), controller=RoleController(policy), every_s=0.5
    )
    ended_s = max(one.end_s or 0.0 for one in served)
    times = [at_s for at_s, _ in policy.seen]
    assert times[:3] == [0.5, 1.0, 1.5]
    assert ended_s - 0.5 <= times[-1] <= ended_s + 0.5


def test_a_month_without_requests_is_not_millions_of_questions() -> None:
    policy = Sees()
    early = load(1000, 50, 20, 5.0)
    month_s = 30 * 86400.25
    late = [replace(one, id=f"late {one.id}", arrival_s=one.arrival_s + month_s) for one in early]
    served = cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
        [*early, *late], controller=RoleController(policy)
    )
    assert all(one.end_s is not None for one in served)
    times = [at_s for at_s, _ in policy.seen]
    assert len(times) < 3000
    (pause_s,) = [b - a for a, b in pairwise(times) if b - a != 1.0]
    assert month_s - 2000 < pause_s < month_s
    assert all(at_s % 1.0 == 0.0 for at_s in times)  # asked as if it had gone on


def test_a_simulation_ends_although_no_engine_is_left_for_its_requests() -> None:
    dies = [Change(2.0, lambda all_, now_s, n=name: all_.die(n, now_s)) for name in "pd"]
    served = cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
        load(1000, 50, 20, 5.0), dies, controller=RoleController(Sees())
    )
    assert served[-1].rejected == "unavailable"


def test_a_policy_that_fails_ends_the_simulation_and_is_named() -> None:
    class Ghosts(RolePolicy):
        def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
            return [Move("ghost", Role.DECODE, "it is lonely")]

    with pytest.raises(PolicyError, match=r"ghost.*engine must be one of p, d"):
        cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
            load(1000, 50, 20, 5.0), controller=RoleController(Ghosts())
        )


def test_the_history_counts_every_request_once() -> None:
    policy = Sees()
    requests = load(1000, 50, 60, 10.0)
    cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
        requests, controller=RoleController(policy), every_s=1.0
    )
    now_s, fleet = policy.seen[-1]
    seen = fleet.history.over(now_s, 600, "")
    assert (seen.arrivals, seen.prefills) == (60, 60)
    assert seen.tokens == seen.uncached == sum(one.tokens for one in requests)
    assert seen.answers >= 59  # the last can end after the last question
    assert seen.answered == seen.answers * 50


def test_what_waits_in_the_router_is_told() -> None:
    policy = Sees()
    cluster({"p": Role.PREFILL, "d": Role.DECODE}, "on_demand").run(
        load(4000, 2, 30, 100.0), controller=RoleController(policy), every_s=0.5
    )
    front = policy.seen[0][1].front[""]
    assert front.requests >= 20
    assert front.tokens > 4000
    assert 0 < front.oldest_s <= 0.5


@pytest.mark.parametrize("turned", [False, True])
def test_pressure_follows_the_traffic_and_nothing_is_lost(turned: bool) -> None:
    """Long prompts, then long answers; and the other way round. A fixed ratio fails one half."""
    halves = [load(4000, 5, 2000, 7.0), load(300, 400, 2000, 7.0, seed=1)]
    requests = one_after_another(halves[::-1] if turned else halves)
    scenario = Scenario(
        prefill=3, decode=3, level=2, costs=TRUTH, kv_tokens=15_000, ttft_slo_s=2.0, tpot_slo_s=0.1
    )
    elastic = scenario.cluster("least_delay")
    served = elastic.run(requests, controller=RoleController(Pressure()))
    fixed = scenario.cluster("least_delay").run(requests)

    def late(those: list) -> int:  # type: ignore[type-arg]
        return sum(one.end_s is None or one.ttft_s > 2.0 or one.tpot_s > 0.1 for one in those)

    assert elastic.roles.moved
    assert late(served) < 0.7 * late(fixed)
    assert all(one.end_s is not None or one.rejected for one in served)
    times = [one.at_s for one in elastic.roles.moved]
    assert all(b - a >= 5.0 for a, b in pairwise(times))


def test_an_engine_that_does_both_is_never_its_own_partner() -> None:
    """Three such engines: each serves both sides, and each request uses two of them."""
    roles = dict.fromkeys(("x", "y", "z"), Role.BOTH)
    served = cluster(roles).run(load(500, 20, 100, 10.0))
    assert all(one.p is not None and one.p != one.d for one in served)
    assert {one.p for one in served} == {one.d for one in served} == set(roles)


def test_one_engine_that_does_both_serves_alone() -> None:
    served = cluster({"x": Role.BOTH}).run(load(500, 20, 10, 10.0))
    assert all(one.end_s is not None and one.p is None for one in served)


def test_an_engine_that_joins_serves_only_after_its_start() -> None:
    def join(running: Cluster, now_s: float) -> None:
        running.join(Node("late", Role.PREFILL, SETTINGS), now_s, start_s=3.0)

    served = cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
        load(2000, 5, 100, 10.0), [Change(1.0, join)]
    )
    begun_s = [one.request.arrival_s for one in served if one.p == "late"]
    assert begun_s
    assert min(begun_s) >= 4.0


def test_an_engine_that_dies_before_it_has_started_stays_dead() -> None:
    def join(running: Cluster, now_s: float) -> None:
        running.join(Node("late", Role.PREFILL, SETTINGS), now_s, start_s=3.0)

    served = cluster({"p": Role.PREFILL, "d": Role.DECODE}).run(
        load(2000, 5, 100, 10.0),
        [Change(1.0, join), Change(2.0, lambda running, now_s: running.die("late", now_s))],
    )
    assert not [one for one in served if one.p == "late"]


def test_a_dead_side_is_repaired_within_a_tick() -> None:
    """The control: without a controller the decode engines compute all prompts from then on."""
    roles = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    requests = load(1000, 20, 200, 8.0)
    dies = [Change(5.0, lambda running, now_s: running.die("p", now_s))]
    alone = cluster(roles).run(requests, dies)
    assert all(one.p is None for one in alone if one.request.arrival_s > 6.0)
    repaired = cluster(roles)
    served = repaired.run(requests, dies, RoleController(Sees()))
    assert [one.move.role for one in repaired.roles.moved] == [Role.PREFILL]
    assert all(one.p is not None for one in served if one.request.arrival_s > 6.5)
    assert all(one.end_s is not None for one in served)


def test_traces_one_after_another_share_nothing() -> None:
    one = [replace(r, arrival_s=r.arrival_s + 100) for r in load(500, 2, 10, 1.0)]
    joined = one_after_another([one, one])
    assert len({r.id for r in joined}) == 20
    assert joined[0].arrival_s == 0.0
    assert joined[10].arrival_s == joined[9].arrival_s
    assert not set(joined[0].block_hashes) & set(joined[10].block_hashes)
