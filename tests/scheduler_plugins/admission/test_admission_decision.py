# SPDX-License-Identifier: Apache-2.0
"""Letting in and turning away, and what is learnt from those that were let in."""

from __future__ import annotations

from pathlib import Path

import pytest
from admission_fakes import SETTINGS, Bench, metric, usage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler_plugins.admission.control import AdmissionControl
from scheduler_plugins.admission.load import Decoding
from scheduler_plugins.admission.prompt import prompt_of
from scheduler_plugins.queue.work import BUCKETS

PROMPT = prompt_of({"prompt": list(range(300))})
SHORT = prompt_of({"prompt": [1, 2, 3]})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_can_be_served_in_time_reaches_the_engine(bench: Bench) -> None:
    bench.board.write(waiting_s=0.5)
    assert bench.premium().status == 200
    assert len(bench.server.bodies) == 1


def test_what_cannot_is_answered_with_429_and_reaches_nobody(bench: Bench) -> None:
    bench.board.write(waiting_s=4.0)
    before = metric("rejected_total", qos="premium", cause="ttft")
    got = bench.premium(tokens=400)
    assert got.status == 429
    assert int(got.headers["retry-after"]) >= 1
    assert bench.server.bodies == []
    assert metric("rejected_total", qos="premium", cause="ttft") == before + 1


def test_the_refusal_says_what_was_predicted_and_promised_and_what_to_do(bench: Bench) -> None:
    bench.board.write(waiting_s=4.0)
    got = bench.premium(tokens=400)
    assert got.error["code"] == 429
    for word in ("'premium'", "ms", "promised 1000 ms", f"Retry in {got.headers['retry-after']} s"):
        assert word in got.error["message"]


def test_a_class_without_an_slo_gets_all_in(bench: Bench) -> None:
    bench.board.write(waiting_s=1000.0)
    assert bench.post({"prompt": "a"}).status == 200


def test_without_any_slo_prompts_are_not_even_looked_at(tmp_path: Path, monkeypatch) -> None:
    bench = Bench(tmp_path, settings="scheduler: {policy: fcfs}")
    bench.board.write(waiting_s=1000.0)
    monkeypatch.setattr(bench.gate, "ask", None)
    assert bench.post({"prompt": "a"}).status == 200
    assert bench.server.last_body["vllm_xargs"] == {"qos": "default"}


def test_without_a_report_all_get_in_and_are_counted(bench: Bench) -> None:
    before = metric("admitted_without_report_total", qos="premium")
    assert bench.premium().status == 200
    assert metric("admitted_without_report_total", qos="premium") == before + 1


def test_a_report_that_does_not_know_the_class_yet_is_none(bench: Bench) -> None:
    bench.board.write(waiting_s=1000.0, classes=["free"])
    assert bench.premium().status == 200


def test_of_a_gust_within_one_report_only_so_many_get_in_as_can_be_served(bench: Bench) -> None:
    """Every request costs 0.3 s and 1 s is promised; none has begun to be answered."""
    bench.board.write()
    tickets = [bench.gate.ask("premium", PROMPT) for _ in range(20)]
    assert sum(ticket.decision.admit for ticket in tickets) == 3


def test_if_those_let_in_were_forgotten_all_of_a_gust_would_get_in(bench: Bench) -> None:
    bench.board.write()
    for _ in range(20):
        ticket = bench.gate.ask("premium", PROMPT)
        assert ticket.decision.admit
        bench.gate.done(ticket)


def test_a_new_report_has_them_itself(bench: Bench) -> None:
    bench.board.write()
    for _ in range(3):
        assert bench.gate.ask("premium", PROMPT).decision.admit
    assert not bench.gate.ask("premium", PROMPT).decision.admit
    bench.clock.now_s += 0.2
    bench.board.write()  # it says that nothing waits any more
    assert bench.gate.ask("premium", PROMPT).decision.admit


def test_a_refused_request_is_no_load(bench: Bench) -> None:
    bench.board.write(waiting_s=4.0)
    for _ in range(50):
        bench.premium(tokens=400)
    bench.board.write()
    assert bench.premium(tokens=400).status == 200


def test_a_request_that_the_engine_refuses_is_no_load_either(bench: Bench) -> None:
    bench.board.write()
    bench.server.status = 400
    for _ in range(20):
        assert bench.premium(tokens=300).status == 400


def test_an_answer_in_one_piece_tells_its_time(bench: Bench) -> None:
    bench.board.write()
    before = metric("admission_ttft_seconds_sum", qos="premium")
    bench.server.usage = usage(100, 1)
    bench.server.pieces = [(0.4, b"{}")]
    bench.premium()
    assert metric("admission_ttft_seconds_sum", qos="premium") == pytest.approx(before + 0.4)


def test_a_stream_tells_first_and_last_token(bench: Bench, monkeypatch) -> None:
    told: list[tuple[str, float]] = []
    for name in ("first_token", "last_token"):
        monkeypatch.setattr(
            AdmissionControl, name, lambda self, q, p, s, name=name: told.append((name, s))
        )
    bench.board.write()
    bench.server.streamed = True
    # A comment that keeps the connection alive is not a token.
    bench.server.pieces = [(0.1, b": ping\n\n"), (0.2, b"data: {}\n\n"), (0.9, b"data: [DONE]\n\n")]
    bench.server.usage = usage(100, 10)
    bench.premium(stream=True, max_tokens=10)
    assert [name for name, _ in told] == ["first_token", "last_token"]
    assert [seconds for _, seconds in told] == pytest.approx([0.3, 0.1])


def test_a_longer_answer_in_one_piece_is_split_as_predicted(bench: Bench, monkeypatch) -> None:
    told: dict[str, float] = {}
    for name in ("first_token", "last_token"):
        monkeypatch.setattr(
            AdmissionControl, name, lambda self, q, p, s, name=name: told.update({name: s})
        )
    bench.board.write()
    predicted = 0.1 + 9 * (0.01 + 1e-3)
    bench.server.pieces = [(2 * predicted, b"{}")]
    bench.server.usage = usage(100, 10)
    bench.premium(max_tokens=10)
    assert told == pytest.approx({"first_token": 0.2, "last_token": 0.022})


def test_predictions_that_are_always_too_low_are_raised_until_they_hold(bench: Bench) -> None:
    """Every request takes three times what is predicted: 0.36 s of prediction is soon too much."""
    bench.server.usage = usage(360, 1)
    bench.server.pieces = [(1.08, b"{}")]
    statuses = []
    for _ in range(60):
        bench.board.write()
        statuses.append(bench.premium(tokens=360).status)
    assert statuses[0] == 200
    assert statuses[-1] == 429


def test_an_error_of_the_engine_teaches_nothing(bench: Bench) -> None:
    bench.server.status, bench.server.pieces = 500, [(50.0, b"{}")]
    for _ in range(60):
        bench.board.write()
        assert bench.premium(tokens=360).status == 500


def test_engine_figures_reach_the_metrics_when_they_are_asked_for(bench: Bench) -> None:
    bench.board.write(waiting_s=2.0)
    bench.post(b"", "/metrics")
    assert metric("waiting", qos="premium") == 8
    assert metric("waiting_work_seconds", qos="premium") == pytest.approx(2.0)


def _load(bench: Bench, *, arriving_s: float, decoding: int = 0, idle: bool = False) -> None:
    """A report with nothing waiting, `arriving_s` of prefill per second, and `decoding` sequences."""
    bench.board.write()
    post = bench.board.post
    load = replace(post.report.classes["premium"], arriving=(arriving_s,) + (0.0,) * (BUCKETS - 1))
    report = replace(
        post.report,
        classes={**post.report.classes, "premium": load},
        decoding=tuple(Decoding(0.0, 100) for _ in range(decoding)),
        decode_tokens=50.0,
    )
    bench.board.post = replace(post, report=report, idle=idle)


TPOT = SETTINGS.replace("ttft_ms: 1000", "ttft_ms: 60000, tpot_ms: 40")


def test_prefill_that_shares_the_engine_slows_decoding(tmp_path: Path) -> None:
    """Eleven sequences decode in 21 ms a token alone, in 42 ms beside prefill half of the time."""
    bench = Bench(tmp_path, settings=TPOT)
    _load(bench, arriving_s=0.0, decoding=10)
    assert bench.gate.ask("premium", SHORT).decision.admit
    bench = Bench(tmp_path, settings=TPOT)
    _load(bench, arriving_s=0.5, decoding=10)
    decision = bench.gate.ask("premium", SHORT).decision
    assert (decision.admit, decision.cause) == (False, "tpot")


def test_what_was_let_in_a_moment_ago_counts_as_well(tmp_path: Path) -> None:
    """Before the report's averages of 30 s have noticed."""
    bench = Bench(tmp_path, settings=TPOT)
    for _ in range(7):
        _load(bench, arriving_s=0.0, decoding=10)
        ticket = bench.gate.ask("premium", prompt_of({"prompt": list(range(100))}))
        bench.gate.done(ticket)
        bench.clock.now_s += 0.15
    _load(bench, arriving_s=0.0, decoding=10)
    assert not bench.gate.ask("premium", SHORT).decision.admit


def test_after_overload_an_engine_that_has_become_idle_lets_in_again(tmp_path: Path) -> None:
    """Its last report stays, rates and all: they must not go on refusing."""
    bench = Bench(tmp_path, settings=TPOT)
    _load(bench, arriving_s=2.0, idle=True)
    bench.clock.now_s += 1.0
    assert bench.gate.ask("premium", SHORT).decision.admit


def test_if_it_were_still_busy_it_would_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path, settings=TPOT)
    _load(bench, arriving_s=2.0)
    bench.clock.now_s += 1.0
    assert not bench.gate.ask("premium", SHORT).decision.admit


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.2, 3.0]),
            st.integers(1, 3000),
            st.sampled_from([200, 400, 500]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_whatever_comes_every_request_gets_one_answer_and_the_load_goes_home(
    tmp_path: Path, steps: list
) -> None:
    bench = Bench(tmp_path)
    for wait_s, tokens, status, reported in steps:
        bench.clock.now_s += wait_s
        if reported:
            bench.board.write(waiting_s=tokens / 1000)
        bench.server.status = status
        reached = len(bench.server.bodies)
        got = bench.premium(tokens=tokens)
        if got.status == 429:
            assert int(got.headers["retry-after"]) >= 1
            assert len(bench.server.bodies) == reached
        else:
            assert got.status == status
            assert len(bench.server.bodies) == reached + 1
    bench.clock.now_s += 60.0
    bench.board.write()
    assert bench.premium(tokens=50).status == bench.server.status


@pytest.mark.parametrize(("loads", "status"), [(True, 200), (False, 429)])
def test_an_engine_without_a_connector_computes_what_a_client_says_is_elsewhere(
    bench: Bench, loads: bool, status: int
) -> None:
    """5,000 tokens take five seconds here, and one is promised."""
    bench.middleware._loads = loads
    bench.board.write()
    assert bench.premium(5000, kv_transfer_params={"do_remote_prefill": True}).status == status
