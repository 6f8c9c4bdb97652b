# SPDX-License-Identifier: Apache-2.0
"""Admission at twice the capacity: promises kept, and their gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_bench.scheduler.replay import ENGINE, Setup, capacity
from pd_bench.scheduler.workload import lengths, poisson
from scheduler_plugins.admission.control import AdmissionControl
from scheduler_plugins.admission.load import Decoding, LoadReport
from scheduler_plugins.admission.predict import Prediction
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.sim.engine import Served, SimulatedEngine

OVERLOAD = 2.0
ATTAINED = 0.95
GOODPUT = 1.3
_SMOOTHING = 0.05
_CALIBRATION = 2000


class PromisedLoad(NamedTuple):
    """A promise, and a workload of `OVERLOAD` times the capacity."""

    name: str
    slo: Slo
    max_tokens: int
    per_s: float


def promises() -> list[PromisedLoad]:
    """One workload limited by prefill, one limited by decode."""
    prefill = capacity(lengths(0, _CALIBRATION), Setup("fcfs"))
    slo = Slo(ttft_ms=2000, tpot_ms=50)
    # The batch is so large that a token takes 50 ms. All of it is replaced in the time of one answer.
    batch = (0.05 - ENGINE.d0) / ENGINE.d1
    decode = batch / (400 * 0.05)
    return [
        PromisedLoad("ttft", Slo(ttft_ms=1000), 1, OVERLOAD * prefill),
        PromisedLoad("tpot", slo, 400, OVERLOAD * decode),
    ]


def compare(seeds: Sequence[int], duration_s: float) -> list[Comparison]:
    """Admitting only requests whose promise can be kept, against admitting all, with the same queue."""
    comparisons = []
    for promise in promises():
        for policy in ("fcfs", "srjf_calibrated"):
            runs = [serve(promise, policy, duration_s, seed, control=True) for seed in seeds]
            free = [serve(promise, policy, duration_s, seed, control=False) for seed in seeds]
            attained = Sample(tuple(attainment(run, promise.slo) for run in runs))
            ours = Sample(tuple(goodput(run, promise.slo) for run in runs))
            theirs = Sample(tuple(max(goodput(run, promise.slo), 1e-3) for run in free))
            params = {"promise": promise.name, "policy": policy}
            comparisons += compared(params, attained, ours, theirs)
    return comparisons


def serve(
    promise: PromisedLoad, policy: str, duration_s: float, seed: int, *, control: bool
) -> list[Served]:
    """Run one workload, with admission control or without."""
    requests = poisson(
        lengths(seed, round(promise.per_s * duration_s), max_tokens=promise.max_tokens),
        promise.per_s,
        seed,
    )
    classes = (QosClass(name="default", reserved_fraction=1.0, slo=promise.slo),)
    engine = Setup(policy, classes=classes).engine()
    if control:
        SimulatedAdmission(engine, classes)
    return engine.run(requests)


class SimulatedAdmission:
    """Admission control in front of a simulated engine."""

    def __init__(self, engine: SimulatedEngine, classes: Sequence[QosClass]) -> None:
        self._engine = engine
        self._control = AdmissionControl(classes, by_cost=engine.queue.policy.by_cost)
        self._decode_tokens = 0.0
        self._predicted: dict[str, Prediction] = {}
        engine.admit = self._admit
        engine.on_first_token = self._first_token
        engine.on_end = self._end

    def _admit(self, request: Waiting, busy_s: float) -> bool:
        now_s = request.arrival_s
        decoding = [
            Decoding(now_s - since_s, context)
            for since_s, context in self._engine.decode.decoding()
        ]
        report = LoadReport.of(
            self._engine.queue,
            ENGINE,
            now_s,
            prefill_left_s=busy_s,
            decoding=decoding,
            decode_tokens=self._decode_tokens,
        )
        decision = self._control.decide(report, request.qos, request.tokens, 0)
        if decision.admit and decision.prediction is not None:
            self._predicted[request.id] = decision.prediction
        return decision.admit

    def _first_token(self, served: Served) -> None:
        request = served.request
        self._control.first_token(request.qos, self._predicted[request.id], served.ttft_s)

    def _end(self, served: Served) -> None:
        request = served.request
        self._control.last_token(request.qos, self._predicted.pop(request.id), served.tpot_s)
        mean = self._decode_tokens or request.max_tokens
        self._decode_tokens = mean + _SMOOTHING * (request.max_tokens - mean)


def kept(served: Served, slo: Slo) -> bool:
    """Whether the promise to a request was kept."""
    ttft_ok = slo.ttft_ms is None or served.ttft_s * 1e3 <= slo.ttft_ms
    return ttft_ok and (slo.tpot_ms is None or served.tpot_s * 1e3 <= slo.tpot_ms)


def attainment(served: Sequence[Served], slo: Slo) -> float:
    """Fraction of admitted requests whose promise was kept."""
    admitted = [request for request in served if request.first_token_s is not None]
    return sum(kept(request, slo) for request in admitted) / max(1, len(admitted))


def goodput(served: Sequence[Served], slo: Slo) -> float:
    """Requests per second whose promise was kept, over the time of arrivals."""
    until_s = max(request.request.arrival_s for request in served)
    return sum(kept(request, slo) for request in served) / until_s


def compared(
    params: Mapping[str, str], attained: Sample, ours: Sample, theirs: Sample
) -> list[Comparison]:
    """Admitted requests that kept their promise beside the bar, and goodput beside admitting every request."""
    return [
        Comparison(
            "admitted and kept",
            {**params, "against": "wanted"},
            attained,
            Sample((ATTAINED,)),
            "",
            1.0,
            more_is_better=True,
        ),
        Comparison(
            "goodput",
            {**params, "against": "accept all"},
            ours,
            theirs,
            "/s",
            GOODPUT,
            more_is_better=True,
        ),
    ]
