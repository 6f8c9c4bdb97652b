# SPDX-License-Identifier: Apache-2.0
"""`slo` asks for engines before promises break; the same objects run in the simulator."""

from __future__ import annotations

from math import pi, sin
from random import Random

import pytest

from scheduler_plugins.cost.closed import busy_part, engines_for_prompts, late_part
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.days import Days, DaysError
from scheduler_plugins.router.roles.registry import create
from scheduler_plugins.router.roles.scaling import Limits
from scheduler_plugins.router.roles.slo import trend
from scheduler_plugins.sim.scaling import Scaler, Starts
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.simulate import Scenario, simulate

P, D = Role.PREFILL, Role.DECODE
COSTS = CostModel(a=1e-3, c=0.02, d0=0.03, d1=1e-4, d2=1e-6, chunk_tokens=2048)
"""A prompt of 1,000 tokens takes a second."""


def requests(rate: float, seconds: float, last_s: float = 0.0) -> list[Waiting]:
    """Poisson arrivals, and one at the end."""
    random, now_s, times = Random(1), 0.0, list[float]()
    while (now_s := now_s + random.expovariate(rate)) < seconds:
        times.append(now_s)
    return [
        Waiting(id=str(n), tokens=1000, max_tokens=50, arrival_s=at_s, block_hashes=())
        for n, at_s in enumerate([*times, *([last_s] if last_s else [])])
    ]


def play(
    arriving: list[Waiting], prefill: int, decode: int, *, come: bool = True, most: int = 8
) -> tuple[list[Served], Scaler]:
    scenario = Scenario(
        prefill=prefill, decode=decode, level=2, costs=COSTS, ttft_slo_s=6.0, tpot_slo_s=0.1
    )
    limits = Limits({P: 1, D: 1}, {P: most, D: most}, {}, 120.0)
    cluster = scenario.cluster(DEFAULT)
    served = cluster.run(
        arriving,
        controller=RoleController(create("slo"), limits=limits),
        starts=Starts(make=scenario.node, start_s=30.0, come=come),
    )
    assert cluster.roles.scaler is not None
    return served, cluster.roles.scaler


def engines(scaler: Scaler, at_s: float, prefill: int) -> int:
    for change in scaler.scaled:
        if change.at_s <= at_s and change.scale.role is P:
            prefill = change.scale.engines
    return prefill


def test_engines_come_with_the_load_go_with_it_and_no_answer_is_cut() -> None:
    served, scaler = play(requests(2.0, 900, last_s=1800), 1, 1)
    assert engines(scaler, 600, 1) in (3, 4)
    assert engines(scaler, 900 + 600, 1) == 1, "minima within ten minutes"
    assert not sum(each.restarts for each in served)
    assert all(each.end_s is not None or each.rejected for each in served)
    late = [each for each in served if 300 < each.request.arrival_s < 900 and each.ttft_s > 6.0]
    assert len(late) < 20
    assert scaler.engine_s(1800) < 1800 * 4.5


def test_a_constant_load_moves_nothing() -> None:
    _, scaler = play(requests(2.0, 1500), 3, 1)
    assert len([change for change in scaler.scaled if change.at_s > 600]) <= 1


def test_engines_that_never_come_do_not_hold_up_scale_in() -> None:
    _, scaler = play(requests(2.0, 600, last_s=1500), 2, 2, come=False)
    assert any(change.scale.engines > 2 for change in scaler.scaled), "more were asked for"
    assert engines(scaler, 600 + 600, 2) == 1


def test_the_simulator_with_a_fixed_number_of_engines_refuses_it() -> None:
    with pytest.raises(ValueError, match="it starts and stops engines"):
        simulate(Scenario(level=2), requests(1.0, 10), roles="slo")


def counts(rate: float, slope: float = 0.0, bins: int = 60) -> list[float]:
    """Even requests of each ten seconds, with a little noise that is always the same."""
    return [10 * (rate + slope * 10 * n) + sin(2 * pi * n / 3) for n in range(bins)]


def test_a_slope_is_followed_and_noise_is_not() -> None:
    assert trend(counts(2.0), 60) == pytest.approx(2.0, abs=0.05)
    rising = 1.0 + 0.005 * 600
    assert trend(counts(1.0, 0.005), 60) == pytest.approx(rising + 0.005 * 60, rel=0.05)
    assert trend(counts(2.0)[:1], 60) == pytest.approx(2.0, abs=0.2)
    assert trend([], 60) == 0.0


def test_the_end_of_traffic_and_its_sudden_begin_are_seen_within_a_minute() -> None:
    assert trend([*counts(2.0)[6:], *[0.0] * 6], 60) == 0.0
    assert trend([*[1.0] * 54, *[40.0] * 6], 60) == pytest.approx(4.0)


def test_the_closed_form_of_waiting_is_erlangs() -> None:
    assert busy_part(1, 0.5) == pytest.approx(0.5)
    assert busy_part(2, 1.0) == pytest.approx(1 / 3)
    assert busy_part(3, 3.0) == 1.0
    assert late_part(1, 0.5, 1.0, 2.0, 0.0) == pytest.approx(0.5)
    assert engines_for_prompts(3.0, 1.0, 1.5, 5.0, 0.02, 10) in (4, 5)
    assert engines_for_prompts(3.0, 1.0, 1.5, 5.0, 0.02, 2) == 3, "never fewer than the load"


def test_earlier_days_count_from_the_second_on(tmp_path: object) -> None:
    days = Days()
    for day in range(3):
        assert (days.per_s("g", 0) is None) is (day < 2)
        for minute in range(1440):
            days.add("g", minute, 60.0 * (1 + day) if minute < 720 else 0.0)
    assert days.per_s("g", 100) == pytest.approx(2.0)
    assert days.per_s("g", 1000) == 0.0
    assert days.per_s("other", 100) is None
    for _ in range(20):
        days.add("g", 100, 600.0)
    assert days.per_s("g", 100) is not None


def test_a_file_of_days_is_read_again_and_another_one_is_refused(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "days.json"
    days = Days.load(path)
    for _ in range(2):
        for minute in range(1440):
            days.add("g", minute, 120.0)
    days.save(path)
    assert Days.load(path).per_s("g", 5) == 2.0
    for text in ('{"g": {"sums": [1], "days": [1]}}', "{", "[]", '{"g": {"sums": [], "x": 1}}'):
        path.write_text(text)
        with pytest.raises(DaysError, match="name another file"):
            Days.load(path)
