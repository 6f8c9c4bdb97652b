# SPDX-License-Identifier: Apache-2.0
"""Benchmark of quality of service: the cost of free users for premium users, and the shares of classes."""

from __future__ import annotations

from collections.abc import Sequence

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_bench.scheduler.replay import ENGINE, Setup, capacity, p99
from pd_bench.scheduler.workload import lengths, merged, poisson
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.sim.engine import SimulatedStep

CLASSES = (
    QosClass(name="premium", reserved_fraction=0.10, priority=100),
    QosClass(name="standard", reserved_fraction=0.30, priority=50),
    QosClass(name="free", reserved_fraction=0.60, priority=10),
)
CACHE_TOKENS = 100_000
"""Prompts share nothing. The cache is only for preempted prefills."""
WINDOW_S = 30.0
PREMIUM_P99 = 1.3
SHARE_POINTS = 5.0
_CALIBRATION = 2000


def stream(
    qos: str, load: float, duration_s: float, seed: int, truth: CostModel = ENGINE
) -> list[Waiting]:
    """One class's requests, arriving at `load` times the engine's capacity."""
    setup = Setup("fcfs", cache_tokens=CACHE_TOKENS, truth=truth)
    rate = load * capacity(lengths(0, _CALIBRATION), setup)
    return poisson(lengths(seed, round(rate * duration_s)), rate, seed, qos)


def compare(seeds: Sequence[int], duration_s: float) -> list[Comparison]:
    """Premium beside free users who bring 3 times the capacity; and shares, all overloaded."""
    setup = Setup(classes=CLASSES, cache_tokens=CACHE_TOKENS)
    beside, alone, unprotected, missed = [], [], [], []
    for seed in seeds:
        premium = stream("premium", 0.05, duration_s, seed)
        rest = (
            stream("standard", 0.15, duration_s, seed + 1000),
            stream("free", 3.0, duration_s, seed + 2000),
        )
        together = merged(premium, *rest)
        alone.append(_premium_p99(setup, merged(premium)))
        beside.append(_premium_p99(setup, together))
        unprotected.append(_premium_p99(Setup("fcfs", cache_tokens=CACHE_TOKENS), together))
        overload = [
            stream(qos_class.name, 1.5, duration_s, seed + n) for n, qos_class in enumerate(CLASSES)
        ]
        missed.append(share_error(setup, merged(*overload), duration_s))
    return [
        Comparison(
            "premium p99 TTFT",
            {"free load": 3.0, "against": "premium alone"},
            Sample(tuple(beside)),
            Sample(tuple(alone)),
            "s",
            PREMIUM_P99,
        ),
        Comparison(
            "premium p99 TTFT",
            {"free load": 3.0, "against": "fcfs, one class"},
            Sample(tuple(beside)),
            Sample(tuple(unprotected)),
            "s",
        ),
        Comparison(
            "share error, any 30 s",
            {"free load": 1.5, "against": "allowed"},
            Sample(tuple(missed)),
            Sample((SHARE_POINTS,)),
            "points",
            1.0,
        ),
    ]


def share_error(setup: Setup, requests: Sequence[Waiting], duration_s: float) -> float:
    """The largest distance of a class from its reserve over any 30 s, in percentage points.

    The first 30 s do not count, because queues fill.
    """
    engine = setup.engine()
    steps: list[SimulatedStep] = []
    engine.on_step = steps.append
    engine.run(requests)
    seconds = round(duration_s)
    done = {qos_class.name: [0.0] * seconds for qos_class in CLASSES}
    for step in steps:
        start_s, end_s = step.start_s, step.end_s
        for second in range(int(start_s), min(seconds, int(end_s) + 1)):
            part = max(0.0, min(end_s, second + 1) - max(start_s, second)) / step.load.tokens
            for chunk in step.chunks:
                done[chunk.record.request.qos][second] += part * (chunk.stop - chunk.first)
    width, worst = round(WINDOW_S), 0.0
    for begin in range(width, seconds - width):
        for qos_class in CLASSES:
            share = sum(done[qos_class.name][begin : begin + width]) / width
            worst = max(worst, abs(share - qos_class.reserved_fraction) * 100)
    return worst


def _premium_p99(setup: Setup, requests: Sequence[Waiting]) -> float:
    served = setup.engine().run(requests)
    return p99([request.ttft_s for request in served if request.request.qos == "premium"])
