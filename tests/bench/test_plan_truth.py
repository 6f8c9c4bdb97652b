# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan truth`: the fleets that are played are the plan's, and both sides have the same requests."""

from __future__ import annotations

from math import isclose
from pathlib import Path

import pytest

from pd_bench.plan import truth
from pd_bench.router.sending import Outcome
from scheduler_plugins.router.policies.base import Role


class Router:
    base_url = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def planned() -> tuple[truth.Judge, truth.Inventory, list[truth.Case]]:
    judge, stock = truth.planned(60)
    return judge, stock, truth.cases(judge, stock, (1.0,))


def test_both_kinds_of_fleets_are_played_with_all_engines(planned) -> None:
    _, stock, cases = planned
    assert [case.search for case in cases] == ["planner", "colocated"]
    for case in cases:
        engines = truth.engines_of(case.candidate, stock)
        assert len(engines) == truth.ENGINES
        assert all(engine.alone for engine in engines) is (case.search == "colocated")
    assert {engine.role for engine in truth.engines_of(cases[0].candidate, stock)} == {
        Role.PREFILL,
        Role.DECODE,
    }


@pytest.mark.parametrize(("late", "points"), [(0, 0.0), (6, 10.0)])
def test_what_is_late_live_is_seen(
    planned, tmp_path: Path, monkeypatch, late: int, points: float
) -> None:
    """Without a process: answers are what the simulation says, but for some that are late."""
    judge, stock, (case, _) = planned
    served = judge.served(case.candidate.fleet, case.per_s, 0)
    sent_at = [each.request.arrival_s for each in served]
    answers = [
        Outcome(200, each.ttft_s, each.ttft_s + each.tpot_s * 10, 11)
        if not each.rejected
        else Outcome(429)
        for each in served
    ]
    in_time = [
        n
        for n, each in enumerate(served)
        if not each.rejected and each.ttft_s <= truth.PROMISE.ttft_s
    ]
    for n in in_time[:late]:
        answers[n] = Outcome(200, 99.0, 100.0, 11)

    async def play(urls, sent, speed):
        assert all(isclose(a.at_s, b) for a, b in zip(sent, sent_at, strict=True))
        return answers

    class Running:
        def __init__(self, *args) -> None: ...
        def __enter__(self) -> type[Router]:
            return Router

        def __exit__(self, *error) -> None: ...

    monkeypatch.setattr(truth.sending, "play", play)
    monkeypatch.setattr(truth, "_running", Running)
    both = truth.played(case, judge, stock, tmp_path)
    assert both.points == pytest.approx(points)
