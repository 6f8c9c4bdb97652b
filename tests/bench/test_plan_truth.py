# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan truth`: the fleets that are played are the plan's, and both sides have the same requests."""

from __future__ import annotations

from math import isclose
from pathlib import Path

import pytest

from pd_bench.plan import truth, truth_engines
from pd_bench.report import BenchError
from pd_bench.router.sending import Outcome
from pd_bench.serve.sending import Answer
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.cost.model import CostModel, MixedCosts
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


PROFILE = EngineProfile(
    costs=CostModel(
        a=3e-4, c=0.01, d0=0.02, d1=1e-3, d2=1e-6, chunk_tokens=2048, mixed=MixedCosts(m0=0.02)
    ),
    kv_tokens=32_000,
    kv_bytes_per_token=32_768,
    layers=8,
)


@pytest.fixture(scope="module")
def apart() -> tuple[truth_engines.Inventory, list[truth_engines.Candidate], truth_engines.Case]:
    inventory = truth_engines.stock(PROFILE)
    fleets = truth_engines.fleets(inventory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truth_engines, "TTFTS", (3.0,))
        patch.setattr(truth_engines, "LOADS", (0.3, 0.5, 0.7))
        return inventory, fleets, truth_engines.furthest(inventory, fleets, WINDOW)


WINDOW = truth_engines.window_of(40)


def test_a_pair_and_two_chunk_sizes_are_started_on_a_core_each(apart) -> None:
    inventory, fleets, _ = apart
    engines = [truth_engines.engines_of(fleet, inventory) for fleet in fleets]
    assert [[engine.gpus for engine in pair] for pair in engines] == [[(0,), (1,)]] * 3
    assert [{str(engine.role) for engine in pair if not engine.alone} for pair in engines] == [
        {"prefill", "decode"},
        set(),
        set(),
    ]
    assert [pair[0].chunk_tokens for pair in engines] == [2048, *truth_engines.CHUNKS]


def test_the_rate_is_one_at_which_the_plan_sees_fleets_apart(apart, monkeypatch) -> None:
    inventory, fleets, case = apart
    judge = truth.Judge([WINDOW], case.promise)
    parts = [judge.kept(fleet.fleet, case.per_s, 0) for fleet in fleets]
    assert parts == case.predicted
    assert case.apart
    for better, worse in case.apart:
        assert parts[better] - parts[worse] >= 0.15
    assert max(parts) >= 0.9
    monkeypatch.setattr(truth_engines, "LOADS", (0.01,))
    monkeypatch.setattr(truth_engines, "TTFTS", (50.0,))
    monkeypatch.setattr(truth_engines, "TPOTS", (50.0,))
    with pytest.raises(BenchError, match="no two fleets 15 points apart"):
        truth_engines.furthest(inventory, fleets, WINDOW)


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (Answer(0.1, 0.001), 1.0),
        (Answer(99.0, 0.001), 0.0),
        (Answer(0.1, 9.0), 0.0),
        (Answer(failure="no", status=429), 0.0),
        (Answer(failure="no", status=500), None),
    ],
)
def test_requests_in_time_are_counted_and_a_failure_is_an_error(
    apart, tmp_path: Path, monkeypatch, answer: Answer, part: float | None
) -> None:
    """Without a process: all answers are alike."""
    inventory, (fleet, *_), case = apart

    class Running:
        client = None

        def __init__(self, *args) -> None: ...
        def __enter__(self):
            return Running, []

        def __exit__(self, *error) -> None: ...

    def send(client, model, sent) -> list[Answer]:
        assert [len(each.prompt) for each in sent] == [each.tokens for each in WINDOW.requests]
        return [answer] * len(sent)

    monkeypatch.setattr(truth_engines, "send", send)
    monkeypatch.setattr(truth_engines, "_running", Running)
    monkeypatch.setattr(truth_engines, "_warm_up", lambda *args: None)
    given = (fleet, case, inventory, WINDOW, tmp_path, tmp_path)
    if part is None:
        with pytest.raises(BenchError, match="40 of 40 requests failed, the first: no"):
            truth_engines.played(*given)
    else:
        assert truth_engines.played(*given) == (part, 40 if answer.failure else 0)
