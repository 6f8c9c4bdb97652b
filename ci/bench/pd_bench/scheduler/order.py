# SPDX-License-Identifier: Apache-2.0
"""The order of the queue: mean and tail of four policies, and the effect of lambda."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_bench.scheduler.replay import Outcome, Setup, capacity
from pd_bench.scheduler.workload import poisson, shared_profiles
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA
from scheduler_plugins.sim import trace

LOADS = (0.7, 0.9, 1.1)
BASELINES = ("fcfs", "priority", "srjf")
OURS = "srjf_calibrated"
LAMBDAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
MEAN_AT_09 = 1 / 3


class Workload(NamedTuple):
    """PrefillOnly's shape, at a tenth of its lengths."""

    users: int = 20
    posts: int = 50
    cached_profiles: float = 14.0
    """The number of average profiles that fit into the cache."""

    def setup(self, policy: str, lambda_: float = DEFAULT_LAMBDA) -> Setup:
        return Setup(policy, lambda_, cache_tokens=round(1400 * self.cached_profiles))

    def run(self, setup: Setup, load: float, seed: int) -> Outcome:
        """Serve it at `load` times the rate at which this engine drains all of it by FCFS."""
        requests = shared_profiles(seed, users=self.users, posts=self.posts)
        rate = load * capacity(requests, self.setup("fcfs")._replace(truth=setup.truth))
        return Outcome.of(setup.engine().run(poisson(requests, rate, seed)))


class SweepPoint(NamedTuple):
    """One lambda at one load: medians over the seeds."""

    load: float
    lambda_: float
    mean_s: float
    p99_s: float


class Recorded(NamedTuple):
    """A trace, on an engine whose cache holds `cache_tokens` tokens."""

    requests: Sequence[Waiting]
    cache_tokens: int

    def setup(self, policy: str, lambda_: float = DEFAULT_LAMBDA) -> Setup:
        return Setup(policy, lambda_, cache_tokens=self.cache_tokens, page_size=trace.PAGE_SIZE)

    def run(self, setup: Setup, load: float, seed: int) -> Outcome:
        """As `Workload.run`; the trace is played as fast as that takes."""
        rate = load * capacity(
            [replace(request, arrival_s=0.0) for request in self.requests], self.setup("fcfs")
        )
        return Outcome.of(setup.engine().run(trace.at_rate(self.requests, rate, seed)))


def compare(workload: Workload | Recorded, seeds: Sequence[int]) -> list[Comparison]:
    """Our policy against each baseline at each load, with one value per seed."""
    rows = []
    for load in LOADS:
        outcomes = {
            policy: [workload.run(workload.setup(policy), load, seed) for seed in seeds]
            for policy in (OURS, *BASELINES)
        }
        for baseline in BASELINES:
            rows += comparisons(load, baseline, outcomes[OURS], outcomes[baseline])
    return rows


def comparisons(
    load: float, baseline: str, ours: Sequence[Outcome], theirs: Sequence[Outcome]
) -> list[Comparison]:
    """Mean, tail and hits of one load, with its bars; one outcome for each run."""
    params: dict[str, str | int | float] = {"load": load, "against": baseline}
    at_09, fcfs = load == 0.9, baseline == "fcfs"
    mean_bar = None
    if at_09 and baseline != "priority":
        mean_bar = MEAN_AT_09 if fcfs else 1.0

    def sample(outcomes: Sequence[Outcome], field: str) -> Sample:
        return Sample(tuple(getattr(outcome, field) for outcome in outcomes))

    return [
        Comparison("mean", params, sample(ours, "mean_s"), sample(theirs, "mean_s"), "s", mean_bar),
        Comparison(
            "p99",
            params,
            sample(ours, "p99_s"),
            sample(theirs, "p99_s"),
            "s",
            1.0 if fcfs else None,
        ),
        Comparison(
            "prefix hit",
            params,
            sample(ours, "hit"),
            sample(theirs, "hit"),
            "",
            1.0 if fcfs else None,
            more_is_better=True,
        ),
    ]


def sweep(workload: Workload | Recorded, seeds: Sequence[int]) -> list[SweepPoint]:
    """Every lambda at every load."""
    points = []
    for load in LOADS:
        for lambda_ in LAMBDAS:
            setup = workload.setup(OURS, lambda_)
            outcomes = [workload.run(setup, load, seed) for seed in seeds]
            mean = Sample(tuple(outcome.mean_s for outcome in outcomes)).median
            p99 = Sample(tuple(outcome.p99_s for outcome in outcomes)).median
            points.append(SweepPoint(load, lambda_, mean, p99))
    return points
