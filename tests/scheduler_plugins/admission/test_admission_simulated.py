# SPDX-License-Identifier: Apache-2.0
"""Requests are let in if the promise will be kept for them, judged by when they will be served."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from pd_bench.scheduler.overload import PromisedLoad, attainment, goodput, serve
from scheduler_plugins.admission.control import AdmissionControl
from scheduler_plugins.admission.load import ClassLoad, Decoding, LoadReport
from scheduler_plugins.admission.predict import Prediction, Predictor
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.queue.work import BUCKETS, bucket_of

MODEL = CostModel(a=1e-3, d0=0.01, d1=0.001)
NONE = (0.0,) * BUCKETS


@dataclass
class Costs:
    model: CostModel = MODEL


def one_class(**slo: float) -> tuple[QosClass, ...]:
    return (QosClass(name="default", reserved_fraction=1.0, slo=Slo(**slo)),)


def waiting(*costs_s: float, arriving: float = 0.0, balance_s: float = 0.0) -> ClassLoad:
    work, rate = list(NONE), list(NONE)
    for cost_s in costs_s:
        work[bucket_of(cost_s)] += cost_s
    rate[0] = arriving
    tokens = round(sum(costs_s) * 1000)
    return ClassLoad(len(costs_s), tokens, tuple(work), tuple(rate), balance_s)


def report(load: ClassLoad, **more: object) -> LoadReport:
    return LoadReport(model=MODEL, prefill_left_s=0.0, classes={"default": load}, **more)  # type: ignore[arg-type]


def predictor(*, by_cost: bool) -> Predictor:
    return Predictor(classes={one.name: one for one in one_class()}, by_cost=by_cost)


def test_first_come_first_served_waits_for_all_that_waits() -> None:
    found = predictor(by_cost=False).predict(report(waiting(1.0, 0.1)), "default", 500, 100)
    assert found.wait_s == pytest.approx(1.1)
    assert found.prefill_s == pytest.approx(0.4)
    assert found.ttft_s == pytest.approx(1.5)


def test_a_short_request_waits_for_the_shorter_ones_only() -> None:
    short = predictor(by_cost=True).predict(report(waiting(1.0, 0.1)), "default", 500, 100)
    assert short.wait_s == pytest.approx(0.1)
    long = predictor(by_cost=True).predict(report(waiting(1.0, 0.1)), "default", 2000, 0)
    assert long.wait_s == pytest.approx(1.1)


def test_a_long_request_waits_for_shorter_ones_to_come_as_well() -> None:
    load = waiting(1.0, arriving=0.5)
    long = predictor(by_cost=True).predict(report(load), "default", 2000, 0)
    assert long.wait_s == pytest.approx(2.0)


def test_another_class_delays_by_what_it_has_or_by_its_share_whichever_is_less() -> None:
    classes = {
        "gold": QosClass(name="gold", reserved_fraction=0.5, priority=2),
        "free": QosClass(name="free", reserved_fraction=0.5, priority=1),
    }
    by_arrival = Predictor(classes=classes, by_cost=False)

    def wait_s(others: float, balance_s: float) -> float:
        loads = {"gold": waiting(1.0, balance_s=balance_s), "free": waiting(others)}
        state = LoadReport(model=MODEL, prefill_left_s=0.25, classes=loads)
        return by_arrival.predict(state, "gold", 100, 0).wait_s

    assert wait_s(0.2, 0.0) == pytest.approx(0.25 + 1.2)
    assert wait_s(50.0, 0.0) == pytest.approx(0.25 + 2.0)
    assert wait_s(50.0, 1.0) == pytest.approx(0.25 + 1.0), "it is owed that much"


def decoding(count: int, age_s: float) -> tuple[Decoding, ...]:
    return (Decoding(age_s, 100),) * count


def test_tpot_is_predicted_for_when_the_prefill_ends() -> None:
    """100 sequences that will have ended by then do not count, though they run now."""
    state = report(waiting(), decoding=decoding(100, age_s=10.0), decode_tokens=100.0)
    assert state.decode_s == pytest.approx(100 * 0.11)
    soon = predictor(by_cost=False).predict(state, "default", 100, 0)
    assert soon.tpot_s == pytest.approx(0.01 + 0.001 * 101)
    late = predictor(by_cost=False).predict(state, "default", 2000, 0)
    assert late.tpot_s == pytest.approx(0.01 + 0.001)


def test_those_who_are_prefilled_first_decode_by_then() -> None:
    state = report(waiting(0.5, 0.5), decoding=decoding(10, age_s=0.0), decode_tokens=1000.0)
    found = predictor(by_cost=False).predict(state, "default", 100, 0)
    assert found.tpot_s == pytest.approx(0.01 + 0.001 * (10 + 2 + 1))


def test_without_a_promise_everything_is_let_in() -> None:
    control = AdmissionControl(one_class(), by_cost=True)
    decision = control.decide(report(waiting(1000.0)), "default", 10**6, 0)
    assert decision.admit
    assert decision.retry_after_s == 0


def test_what_would_be_late_is_turned_away_until_it_would_not_be() -> None:
    control = AdmissionControl(one_class(ttft_ms=2000), by_cost=False)
    assert control.decide(report(waiting(1.5)), "default", 400, 0).admit
    refused = control.decide(report(waiting(6.0)), "any other name", 400, 0)
    assert not refused.admit
    assert refused.cause == "ttft"
    assert refused.retry_after_s == 5
    assert control.decide(report(waiting(6.0 - 5)), "default", 400, 0).admit


def test_cached_tokens_let_a_request_in() -> None:
    control = AdmissionControl(one_class(ttft_ms=1000), by_cost=False)
    assert not control.decide(report(waiting()), "default", 1500, 0).admit
    assert control.decide(report(waiting()), "default", 1500, 800).admit


def test_a_batch_that_is_too_large_turns_away_by_tpot() -> None:
    control = AdmissionControl(one_class(tpot_ms=50), by_cost=False)
    state = report(waiting(), decoding=decoding(60, age_s=0.0), decode_tokens=400.0)
    refused = control.decide(state, "default", 10, 0)
    assert refused.cause == "tpot"
    assert refused.retry_after_s >= 1
    state = report(waiting(), decoding=decoding(30, age_s=0.0), decode_tokens=400.0)
    assert control.decide(state, "default", 10, 0).admit


def test_a_prediction_that_is_always_too_low_is_corrected() -> None:
    control = AdmissionControl(one_class(ttft_ms=1000), by_cost=False)
    state = report(waiting(0.5))
    assert control.decide(state, "default", 100, 0).admit
    for _ in range(50):
        predicted = Prediction(0.5, 0.1, 0.0, True)
        control.first_token("default", predicted, 1.2)
    assert not control.decide(state, "default", 100, 0).admit


def test_the_correction_is_bounded_so_that_it_can_be_unlearnt() -> None:
    """Whatever a margin refuses is near enough to the promise to teach it."""
    control = AdmissionControl(one_class(ttft_ms=1000), by_cost=False)
    for _ in range(1000):
        control.first_token("default", Prediction(0.9, 0.0, 0.0, True), 100.0)
    assert control.decide(report(waiting(0.29)), "default", 1, 0).admit
    assert not control.decide(report(waiting(0.31)), "default", 1, 0).admit
    for _ in range(2500):
        control.first_token("default", Prediction(0.31, 0.0, 0.0, True), 0.31)
    assert control.decide(report(waiting(0.9)), "default", 1, 0).admit


def test_a_report_tells_what_waits_and_crosses_a_process_boundary() -> None:
    queue = WaitingQueue(create("fcfs"), set(), page_size=16, costs=Costs())
    queue.add(Waiting(id="a", tokens=300, block_hashes=(), arrival_s=1.0))
    queue.add(Waiting(id="b", tokens=700, block_hashes=(), arrival_s=2.0))
    made = LoadReport.of(queue, MODEL, 3.0, decoding=[Decoding(1.0, 5)])
    load = made.classes["default"]
    assert (load.waiting, load.tokens) == (2, 1000)
    assert sum(load.work_s) == pytest.approx(1.0)
    assert sum(load.arriving) > 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=LoadReport) == made
    queue.begin_scan()
    queue.pop()
    queue.remove("b")
    assert sum(queue.class_queue("default").work.waiting_s) == pytest.approx(0.0)


OVERLOADED = (
    PromisedLoad("ttft", Slo(ttft_ms=1000), 1, 36.0),
    PromisedLoad("tpot", Slo(ttft_ms=2000, tpot_ms=50), 400, 8.0),
)


@pytest.mark.parametrize("promise", OVERLOADED, ids=lambda one: one.name)
@pytest.mark.parametrize("policy", ["fcfs", "srjf_calibrated"])
def test_at_twice_the_capacity_promises_are_kept_and_worth_more(
    promise: PromisedLoad, policy: str
) -> None:
    admitted = serve(promise, policy, 60.0, 1, control=True)
    everything = serve(promise, policy, 60.0, 1, control=False)
    assert attainment(admitted, promise.slo) >= 0.95
    assert goodput(admitted, promise.slo) >= 1.3 * goodput(everything, promise.slo)


def test_rejections_do_not_come_in_gusts() -> None:
    """Once the batch is full, every 10 s admit about as many as the 10 s before."""
    served = serve(OVERLOADED[1], "fcfs", 240.0, 1, control=True)
    admitted = [0] * 24
    for one in served:
        if one.first_token_s is not None:
            admitted[min(23, int(one.request.arrival_s / 10))] += 1
    settled = admitted[6:23]
    mean = sum(settled) / len(settled)
    assert min(settled) > 0.25 * mean
    assert max(settled) < 2 * mean
