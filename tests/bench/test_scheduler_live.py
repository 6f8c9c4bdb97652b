# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks with real engines make of the answers: pure parts, without an engine."""

from __future__ import annotations

import asyncio

import pytest

from pd_bench.report import BenchError
from pd_bench.scheduler import live_admission, live_qos, live_traffic
from pd_bench.scheduler.live_replay import Scale, scaled, summary
from pd_bench.scheduler.runs import Runs
from pd_bench.scheduler.sending import RequestRecord, prompt_ids
from pd_bench.scheduler.workload import shared_profiles
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import Timed
from scheduler_plugins.qos.classes import Slo
from scheduler_plugins.qos.file import parse
from scheduler_plugins.qos.rules import class_of

MODEL = CostModel(a=1e-3)
POOL = list(range(40))


def record(
    arrival_s: float, *times_s: float, tokens: int = 100, qos: str = "", status: int = 200
) -> RequestRecord:
    """A request sent on time at 100 s + `arrival_s`, whose tokens came at 100 s + `times_s`."""
    request = Waiting(id="r", tokens=tokens, block_hashes=(), arrival_s=arrival_s, qos=qos)
    stamps = tuple(100.0 + one for one in times_s)
    answer = Timed(status, 100.0 + arrival_s, stamps, 0.0, tokens, None, 0, "")
    return RequestRecord(request, answer, 0.0)


def test_each_run_says_which_it_is_how_far_and_how_long_the_rest_takes() -> None:
    lines, now_s = list[str](), 0.0

    async def both() -> None:
        nonlocal now_s
        runs = Runs(6, lines.append, every_s=0.02, clock=lambda: now_s)
        for name in ("fcfs", "lpm at 0.9"):
            async with runs.run(name, 2) as count:
                count()
                await asyncio.sleep(0.05)
            now_s += 120.0

    asyncio.run(both())
    assert lines[0] == "run 1 of 6: fcfs, 2 requests"
    assert lines[1] == "  run 1 of 6: 1 of 2 answered, 0 s"
    assert "run 2 of 6: lpm at 0.9, 2 requests; about 10 minutes left" in lines


def test_equal_hashes_give_equal_tokens_and_what_follows_is_its_own() -> None:
    one, other = (
        next(r for r in shared_profiles(0, users=2, posts=4) if r.id == name)
        for name in ("1-0", "1-3")
    )
    first, second = prompt_ids(one, 16, POOL), prompt_ids(other, 16, POOL)
    shared = sum(a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=True)) * 16
    assert (len(first), len(second)) == (one.tokens, other.tokens)
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:]


def test_shares_as_reserved_are_no_error() -> None:
    """In every second the classes get 0.1, 0.3 and 0.6 of it."""
    records = []
    for second in range(70):
        records.append(record(0.0, second + 0.1, tokens=100, qos="premium"))
        records.append(record(0.0, second + 0.4, tokens=300, qos="standard"))
        records.append(record(0.0, second + 1.0, tokens=600, qos="free"))
    worst, shares = live_qos.share_error(records, 100.0, 70.0, MODEL)
    assert worst == pytest.approx(0.0, abs=1e-6)
    assert shares["premium"] == pytest.approx(0.1)


def test_a_class_that_gets_nothing_is_off_by_its_reserve() -> None:
    records = [record(0.0, s + 1.0, tokens=1000, qos="standard") for s in range(70)]
    worst, _ = live_qos.share_error(records, 100.0, 70.0, MODEL)
    assert worst == pytest.approx(70.0)


def test_without_a_whole_window_nothing_is_claimed() -> None:
    with pytest.raises(BenchError, match="too short"):
        live_qos.share_error([record(0.0, 1.0, qos="free")], 100.0, 60.0, MODEL)


def test_a_promise_is_kept_only_if_both_halves_are() -> None:
    slo = Slo(ttft_ms=500, tpot_ms=100)
    assert live_admission.kept(record(0.0, 0.4, 0.5), slo)
    assert not live_admission.kept(record(0.0, 0.6, 0.65), slo)
    assert not live_admission.kept(record(0.0, 0.4, 0.6), slo)
    assert not live_admission.kept(record(0.0, status=429), slo)


def test_a_request_that_was_hung_up_on_counts_as_let_in_and_not_kept() -> None:
    hung = RequestRecord(record(0.0).request, None, 0.0)
    assert live_admission.admitted([hung, record(0.0, status=429)]) == [hung]
    assert not live_admission.kept(hung, Slo(ttft_ms=500))


def test_the_settings_that_are_written_lead_from_headers_to_classes() -> None:
    found = parse(live_traffic.settings(live_qos._YAML).encode())
    assert [one.name for one in found.scheduler.qos_classes] == ["premium", "standard", "free"]
    routes = found.request_router.routes
    assert class_of(routes, {"x-customer-tier": "standard"}) == "standard"
    assert class_of(routes, {}) == "free"


def test_a_trace_is_scaled_to_what_an_engine_takes() -> None:
    trace = [
        Waiting(id=str(n), tokens=5000, block_hashes=(), arrival_s=float(n), max_tokens=100)
        for n in range(11)
    ]
    found = scaled(trace, Scale(0.1, 5.0, False), 1000)
    assert {(one.tokens, one.max_tokens) for one in found} == {(500, 10)}
    assert found[-1].arrival_s - found[0].arrival_s == pytest.approx(11 / 5)
    with pytest.raises(BenchError, match="--scale"):
        scaled(trace, Scale(1.0, None, False), 1000)


def test_means_are_over_what_was_answered_and_refusals_are_told() -> None:
    records = [record(0.0, 0.2), record(1.0, 1.4, 1.6), record(2.0, status=429)]
    found = summary("url", records, 0.5)
    assert found.mean_s == pytest.approx(0.3)
    assert found.tpot_s == pytest.approx(0.2)
    assert dict(found.statuses) == {200: 2, 429: 1}
