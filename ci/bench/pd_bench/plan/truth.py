# SPDX-License-Identifier: Apache-2.0
"""A plan's fleets, simulated and played in real time by mock engines behind the plan's router file."""

from __future__ import annotations

import asyncio
import string
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from pd_bench.report import BenchError
from pd_bench.router import sending
from pd_bench.router.mocks import MockProcess
from pd_bench.router.scaled import Sent
from pd_connector.tools.launch import RouterProcess, Service, stop_services, wait_all
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import save
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.files import engines_of, router_file
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import Judge, Promise, windows_of
from scheduler_plugins.planner.inventory import Budget, Inventory, PlanNode
from scheduler_plugins.planner.plan import SEARCHES
from scheduler_plugins.planner.search import Candidate
from scheduler_plugins.sim.links import Network, Place
from scheduler_plugins.sim.mock.server import BYTES_PER_TOKEN
from scheduler_plugins.sim.simulate import Scenario

ENGINES = 8
PROMISE = Promise(2.0, 0.12)
PROMPT, ANSWER = 300, 30
"""Mean tokens. Lengths go from half to one and a half times the mean."""
PROFILE = EngineProfile(
    costs=CostModel(a=2e-3, c=0.02, d0=0.04, d1=2e-3, d2=2e-6, chunk_tokens=256),
    kv_tokens=20_000,
    kv_bytes_per_token=131_072,
    layers=32,
)
"""An invented engine: a prompt of 300 tokens takes 0.64 s. It is slow, so a few requests a second fill eight."""
MOST_FAILED = 0.01
BLOCK_TOKENS = 16
_LETTERS = string.ascii_lowercase + " "


class Played(NamedTuple):
    """Parts of the requests in time."""

    predicted: float
    live: float
    refused: int  # requests, live

    @property
    def points(self) -> float:
        """How far apart they are."""
        return 100 * abs(self.predicted - self.live)


@dataclass(frozen=True)
class Case:
    """A fleet at a rate."""

    search: str
    candidate: Candidate
    per_s: float


def inventory() -> Inventory:
    """One node with eight of the engines."""
    place, network = Place("", "node"), Network()
    return Inventory(
        (PlanNode(place, "mock", ENGINES),),
        {"mock-tp1": PROFILE},
        network.node_bytes_per_s,
        network.bytes_per_s,
        network.bytes_per_s,
        Budget(),
    )


def requests(number: int, prompt: int = PROMPT, answer: int = ANSWER) -> list[Waiting]:
    """Poisson arrivals, one a second on average. They share no prefixes. `prompt`, `answer`: mean tokens."""
    random, at_s, made = Random(5), 0.0, list[Waiting]()
    for n in range(number):
        at_s += random.expovariate(1.0)
        tokens, more = (round(mean * random.uniform(0.5, 1.5)) for mean in (prompt, answer))
        made.append(
            Waiting(id=str(n), tokens=tokens, block_hashes=(), arrival_s=at_s, max_tokens=more)
        )
    return made


def cases(judge: Judge, stock: Inventory, times: Sequence[float]) -> list[Case]:
    """The plan's disaggregated fleet and the one whose engines do both, at multiples of their highest rates."""
    every = [request for window in judge.windows for request in window.requests]
    bounds = Bounds(stock, Workload.of(every, judge.promise.tpot_s))
    judge.first_per_s = bounds.of(front(bounds)[0]) / 4
    made = list[Case]()
    for name in ("planner", "colocated"):
        best = SEARCHES[name](judge, bounds)
        if best is None:
            raise BenchError(f"{name}: no fleet keeps the promise; the invented engine is too slow")
        made += [Case(name, best, best.per_s * by) for by in times]
    return made


def planned(number: int) -> tuple[Judge, Inventory]:
    """A judge with windows of this many requests, and what there is."""
    return Judge(windows_of(requests(4 * number), number), PROMISE), inventory()


def played(case: Case, judge: Judge, stock: Inventory, logs: Path) -> Played:
    """The part of the first window's requests in time: predicted, and of mock engines in real time."""
    arrivals = Scenario(fleet=case.candidate.fleet, level=2).arrivals(
        judge.windows[0].requests, per_s=[case.per_s]
    )
    predicted = judge.kept(case.candidate.fleet, case.per_s, 0)
    sent = [_sent(request, f"{case.search} {case.per_s}") for request in arrivals]
    with _running(case.candidate, stock, logs) as router:
        outcomes = asyncio.run(sending.play([router.base_url], sent, 1.0))
    failed = [each for each in outcomes if not each.served and each.status != 429]
    if len(failed) > MOST_FAILED * len(outcomes):
        raise BenchError(
            f"{case.search}: {len(failed)} of {len(outcomes)} requests failed, the first: {failed[0].status} "
            f"{failed[0].error}; see {logs}"
        )
    refused = sum(each.status == 429 for each in outcomes)
    in_time = sum(
        each.served and each.ttft_s <= PROMISE.ttft_s and each.tpot_s <= PROMISE.tpot_s
        for each in outcomes
    )
    return Played(predicted, in_time / len(outcomes), refused)


@contextmanager
def _running(candidate: Candidate, stock: Inventory, logs: Path) -> Iterator[Service]:
    """The fleet's engines as mocks, and a router with the plan's file."""
    planned_engines = engines_of(candidate, stock)
    mocks = list[MockProcess]()
    rate = Network().node_bytes_per_s * Network().kv_bytes_per_token / PROFILE.kv_bytes_per_token
    try:
        for n, engine in enumerate(planned_engines):
            costs = logs / f"costs{engine.chunk_tokens}.json"
            if not costs.exists():
                save(costs, next(p.profile.costs for p in candidate.fleet.parts))
            args = ["--kv-tokens", str(PROFILE.kv_tokens), "--block-tokens", str(BLOCK_TOKENS)]
            args += ["--cache-blocks", str(round(PROFILE.kv_tokens / BLOCK_TOKENS))]
            args += ["--bytes-per-s", str(rate)]
            mocks.append(MockProcess(f"engine{n}", costs, 1.0, logs / f"engine{n}.log", args))
            mocks[-1].start()
        wait_all(mocks)
        started = [
            engine._replace(port=mock.port)
            for engine, mock in zip(planned_engines, mocks, strict=True)
        ]
        (logs / "router.yaml").write_bytes(router_file(started, PROMISE, ""))
        router = ConfiguredRouter(logs, hands_over=not planned_engines[0].alone)
        try:
            yield router.start().wait_ready()
        finally:
            stop_services([router])
    finally:
        stop_services(mocks)


class ConfiguredRouter(RouterProcess):
    """A router with the plan's file and the costs in this folder."""

    def __init__(self, logs: Path, *, hands_over: bool) -> None:
        super().__init__([], [], hands_over=hands_over, log_path=logs / "router.log")
        costs = next(logs.glob("costs*.json"))
        self._given = ["--config", str(logs / "router.yaml"), "--profile", str(costs)]

    def command(self) -> list[str]:
        address = ["--host", self.host, "--port", str(self.port)]
        return [sys.executable, "-m", "scheduler_plugins.router", *address, *self._given]


def _sent(request: Waiting, run: str) -> Sent:
    """Every prompt is new in every run."""
    letters = Random(f"{run} {request.id}").choices(_LETTERS, k=request.tokens * BYTES_PER_TOKEN)
    return Sent(request.arrival_s, "".join(letters), request.max_tokens, request.tokens)
