# SPDX-License-Identifier: Apache-2.0
"""The search: one run refutes, every window counts, and each paper is a restriction of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.plan_cases import TWO_NODES, model, requests

from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.colocated import colocated
from scheduler_plugins.planner.errors import PlanError
from scheduler_plugins.planner.goodput import Judge, Promise, windows_of
from scheduler_plugins.planner.inventory import load, one_device
from scheduler_plugins.planner.mix import mix_of, placed
from scheduler_plugins.planner.papers import distserve
from scheduler_plugins.planner.plan import make
from scheduler_plugins.planner.search import best_of, search
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.fleet import Fleet

PROMISE = Promise(0.3, 0.05)


def judge(number: int = 240, each: int = 60) -> Judge:
    return Judge(windows_of(requests(number), each), PROMISE, first_per_s=8.0)


def pair(tmp_path: Path, prefill: int = 1, decode: int = 1) -> Fleet:
    mix = mix_of({("H100-tp1", Role.PREFILL): prefill, ("H100-tp1", Role.DECODE): decode})
    fleet = placed(mix, one_device("H100", 8, model(tmp_path)))
    assert fleet is not None
    return fleet


def test_windows_are_four_parts_at_even_distances() -> None:
    assert [one.skip for one in windows_of(requests(120), 20)] == [0, 30, 60, 90]
    assert [len(one.requests) for one in windows_of(requests(43), 20)] == [10] * 4


def test_a_rate_holds_in_every_window_and_a_little_more_does_not(tmp_path: Path) -> None:
    found, fleet = judge(), pair(tmp_path)
    rate = found.goodput(fleet)
    assert rate > 1
    assert found.holds(fleet, rate)
    assert not found.holds(fleet, rate * 1.05)
    worst, part = found.worst_window(fleet, rate)
    assert part >= 0.9
    late = found.late(fleet, rate * 3, worst)
    assert late.prefill > 0.1
    assert sum(late) <= 1


def test_one_run_refutes_a_fleet(tmp_path: Path) -> None:
    found = judge()
    rate, runs = found.goodput(pair(tmp_path, 2, 1)), found.runs
    assert found.goodput(pair(tmp_path), rate) == 0
    assert found.runs == runs + 1
    assert found.simulated == 60 * found.runs


def test_the_worst_class_counts(tmp_path: Path) -> None:
    """Few requests of another class that are all late would hide among the others."""
    long = [replace(one, tokens=120_000, qos="long") for one in requests(120)[::20]]
    mixed = sorted(
        [*requests(120), *[replace(one, id=f"l{one.id}") for one in long]],
        key=lambda one: one.arrival_s,
    )
    found = Judge(windows_of(mixed, len(mixed)), Promise(2.5, 0.05))
    classless = [replace(one, qos="") for one in mixed]
    plain = Judge(windows_of(classless, len(mixed)), Promise(2.5, 0.05))
    fleet = pair(tmp_path, 4, 4)
    assert plain.kept(fleet, 2.0, 0) >= 0.9
    assert found.kept(fleet, 2.0, 0) == plain.kept(fleet, 2.0, 0), (
        "arrivals are one class: see `Scenario.arrivals`"
    )


def test_a_rate_far_below_and_far_above_the_first_guess_is_found(tmp_path: Path) -> None:
    fleet, usual = pair(tmp_path), judge().goodput(pair(tmp_path))
    for guess in (usual / 50, usual * 50):
        found = judge()
        found.first_per_s = guess
        assert found.goodput(fleet) == pytest.approx(usual, rel=0.05)
    assert Judge(judge().windows, Promise(1e-6, 1e-6)).goodput(fleet) == 0


def test_ours_is_at_least_every_restriction_of_it(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(TWO_NODES)
    inventory = load(path, model(tmp_path))
    found = make(inventory, requests(240), PROMISE, each=60)
    rates = {one.search: one.per_s for one in found.rows}
    assert {"planner", "colocated", "splitwise", "hexgen2", "distserve, high affinity"} <= set(
        rates
    )
    assert all(
        rates["planner"] >= rate * 0.98 for name, rate in rates.items() if name != "colocated"
    )
    assert found.rows[0].per_s == found.chosen.per_s
    assert found.sources == ["estimated"]
    assert "not measured" in found.doubts[0]
    assert dict(found.varied)["rate +20%"] <= dict(found.varied)["rate -20%"]
    for one in found.rows:
        assert min(one.windows) >= one.per_s * 0.95
        assert one.in_time >= 0.9


def test_disaggregation_that_is_hardly_better_is_not_recommended(tmp_path: Path) -> None:
    inventory = one_device("H100", 2, model(tmp_path))
    short = make(inventory, requests(900, 500, 100), Promise(0.3, 0.2), each=225)
    assert short.chosen.search == "colocated"
    assert "recommended from 1.03 times" in short.why


@pytest.mark.parametrize(("gbit_per_s", "slow"), [(8, True), (100, False)])
def test_pairs_stay_within_nodes_where_the_link_between_them_is_slow(
    tmp_path: Path, gbit_per_s: int, slow: bool
) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(
        f"nodes: [{{name: n, number: 2, device: H100, gpus: 2, nic_gbit_per_s: {gbit_per_s}}}]"
    )
    inventory = load(path, model(tmp_path))
    bounds = Bounds(inventory, Workload.of(requests(), 0.05))
    low, high = distserve.low(judge(), bounds), search(judge(), bounds)
    assert low is not None
    assert low.copies == 2
    assert low.unit_per_s == low.per_s / 2
    if slow:
        assert high is None, "a handoff takes longer than the promise"
    else:
        assert high is not None
        assert high.per_s >= low.per_s, (
            "one of two decode engines is not always full with the other"
        )


def test_a_full_link_and_a_full_engine_are_told_apart(tmp_path: Path) -> None:
    mix = mix_of({("H100-tp1", Role.PREFILL): 2, ("H100-tp1", Role.DECODE): 2})
    path = tmp_path / "inventory.yaml"
    late = {}
    for gbit_per_s, kv_tokens in ((16, 400_000), (400, 4000)):
        path.write_text(
            f"nodes: [{{name: n, number: 2, device: H100, gpus: 2, nic_gbit_per_s: {gbit_per_s}}}]"
        )
        fleet = placed(mix, load(path, model(tmp_path)))
        assert fleet is not None
        parts = [
            msgspec.structs.replace(
                part, profile=msgspec.structs.replace(part.profile, kv_tokens=kv_tokens)
            )
            for part in fleet.parts
        ]
        late[gbit_per_s] = judge().late(replace(fleet, parts=tuple(parts)), 12.0, 0)
    assert late[16].link > 0.2
    assert late[16].room < 0.1 * late[16].link
    assert late[400].room > 0.2
    assert late[400].link < 0.1 * late[400].room


def test_colocated_tunes_its_chunk(tmp_path: Path) -> None:
    inventory = one_device("H100", 2, model(tmp_path))
    found = judge()
    best = colocated(found, Bounds(inventory, Workload.of(requests(), 0.05)))
    assert best is not None
    assert best.chunk_tokens in (256, 512, 1024, 2048, 4096, 8192)
    assert {one.profile.costs.chunk_tokens for one in best.fleet.parts} == {best.chunk_tokens}
    (part,) = best.fleet.parts
    assert part.role is Role.DECODE, "alone, as behind the router"


def test_windows_that_are_over_before_the_promise_are_refused(tmp_path: Path) -> None:
    inventory = one_device("H100", 2, model(tmp_path))
    with pytest.raises(PlanError, match=r"requests 120: .* give more --requests"):
        make(inventory, requests(), Promise(5.0, 0.05), each=30)
    with pytest.raises(PlanError, match="has 39 requests, wanted are 40"):
        make(inventory, requests(39), PROMISE)


def test_a_promise_that_nobody_can_keep_is_refused_with_the_best_possible(tmp_path: Path) -> None:
    inventory = one_device("H100", 2, model(tmp_path))
    with pytest.raises(
        PlanError, match=r"no fleet keeps it at any rate; the best possible .* 1[0-9]{2} ms"
    ):
        make(inventory, requests(), Promise(0.01, 0.05), each=30)
    with pytest.raises(
        PlanError, match=r"per_s 500: .* best possible is [0-9.]+ requests a second"
    ):
        make(inventory, requests(240), PROMISE, each=60, per_s=500)


def test_nothing_is_found_where_nothing_fits(tmp_path: Path) -> None:
    inventory = one_device("H100", 1, model(tmp_path))
    bounds = Bounds(inventory, Workload.of(requests(), 0.05))
    assert search(judge(), bounds) is None, "one GPU cannot be disaggregated"
    assert best_of([], judge(), inventory) is None
    assert make(inventory, requests(240), PROMISE, each=60).chosen.search == "colocated"
