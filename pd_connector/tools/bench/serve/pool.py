# SPDX-License-Identifier: Apache-2.0
"""`bench serve --pool`: one stack with a KV pool beside one without, then again after its engines have died.

Each round, both stacks serve the same requests in turn. Then both engines of the stack with the pool are killed and
restarted, and the same requests come again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.bench.machine import Noise
from pd_connector.tools.bench.model import write_model, write_weights
from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from pd_connector.tools.bench.serve.measure import AT_ONCE, WARM_UPS, Plan, Say
from pd_connector.tools.bench.serve.sending import Answer, completion_rate, send
from pd_connector.tools.bench.serve.stack import PoolStack, StackSetup
from pd_connector.tools.bench.serve.trace import Line, TimedRequest, longest, read, timed
from pd_connector.tools.launch import stop_services, terminate_as_interrupt, wait_all
from pd_connector.tools.launch.service import log_folder

POOL, PLAIN, AGAIN = "with the pool", "no pool", "after kill -9"
BARS = {PLAIN: 1.1, POOL: 0.5}
"""Most mean TTFT, as a multiple of that on the other side: with the pool beside no pool, and after the engines have died
beside the time before."""
MEMORY = "4GiB"
EXACT = ("--dtype", "float32")
"""In bfloat16 an engine's answers differ from its own when it computes a prompt in other portions."""
_IN_USE_S = 180.0
_SAVED_S = 3.0
"""Saves of the last chunks end within this time."""


@dataclass(frozen=True)
class PoolServeFindings:
    """The results of all rounds.

    Attributes:
        first: with the pool beside no pool.
        again: after the engines have died beside the time before.
        named: decisions that named the pool after the engines had died, and requests.
        loaded: chunks that engines loaded after they had died.
        failed: by turn, then by the error's text.
    """

    first: Sequence[Comparison]
    again: Sequence[Comparison]
    capacity: float
    named: tuple[float, int]
    loaded: float
    failed: Mapping[str, Counter[str]]
    others_cores: float


@dataclass(frozen=True)
class PoolServeBench:
    """One comparison.

    Args:
        trace: file in Mooncake's form.
        plan: loads, requests and rounds.
    """

    trace: Path
    plan: Plan

    def measure(self, console: Console) -> PoolServeFindings:
        """Measure everything. At the end no process and no chunk is left, whatever happens.

        Raises:
            PDConnectorError: nothing could be measured.
        """
        for module in ("vllm", "aiohttp"):
            if importlib.util.find_spec(module) is None:
                raise BenchError(f"{module} is not installed: use the environment that has it")
        lines = read(self.trace, self.plan.requests * self.plan.rounds)
        logs = log_folder()
        console.print(f"logs in {logs}", highlight=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(terminate_as_interrupt())
            shm = Path(tempfile.mkdtemp(prefix="pd-bench-", dir=memory_folder().parents[1]))
            stack.callback(shutil.rmtree, shm, ignore_errors=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-connector-model-"))
            model = write_model(Path(folder))
            write_weights(model)  # the pool keeps nothing of weights that are not from files
            most = longest(lines, self.plan.scale)
            setup = StackSetup(str(model), most, logs, (None, None), EXACT)
            env = {SHM_VARIABLE: str(shm)}
            pooled = PoolStack(POOL, setup, {"memory": MEMORY}, env)
            plain = PoolStack(PLAIN, setup, None, env)
            services = [*pooled.services, *plain.services]
            stack.callback(stop_services, services)
            for group in ([*pooled.engines, *plain.engines], [pooled.router, plain.router]):
                for service in group:
                    service.start()
                wait_all(group, console=console)

            def say(line: str) -> None:
                console.print(line, markup=False, highlight=False)

            return PoolMeasurement(pooled, plain, lines, self.plan, say, console).measure()


@dataclass
class _Turns:
    """The answers of one load, by round."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    tpot_s: dict[str, list[float]] = field(default_factory=dict)
    equal: dict[str, list[int]] = field(default_factory=dict)
    requests: int = 0


class PoolMeasurement:
    """Measures two stacks that are already running."""

    def __init__(
        self,
        pooled: PoolStack,
        plain: PoolStack,
        lines: Sequence[Line],
        plan: Plan,
        say: Say,
        console: Console,
    ) -> None:
        self._pooled, self._plain = pooled, plain
        self._lines = lines
        self._plan = plan
        self._say = say
        self._console = console
        self._model = pooled.engines[0].client.model()
        self._failed: dict[str, Counter[str]] = {one: Counter() for one in (POOL, PLAIN, AGAIN)}
        self._named = self._loaded = 0.0

    def measure(self) -> PoolServeFindings:
        """Measure everything.

        Raises:
            BenchError: an engine does not use the pool.
        """
        self._wait_for_pool()
        pids = [pid for stack in (self._pooled, self._plain) for pid in stack.pids]
        noise = Noise(pids)
        for stack in (self._pooled, self._plain):
            self._rate(stack, WARM_UPS, 1, seed=1)
        rates = [
            self._rate(stack, self._plan.requests, AT_ONCE, seed=2)  # and both have learnt costs
            for stack in (self._pooled, self._plain)
        ]
        capacity = rates[-1]
        self._say(f"{PLAIN}: {capacity:.2f} requests/s with {AT_ONCE} under way")
        turns = {load: _Turns() for load in self._plan.loads}
        others = [noise.cores()]
        for number in range(self._plan.rounds):
            for place, load in enumerate(self._plan.loads):
                seed = 100 + number * len(self._plan.loads) + place
                others.append(self._round(turns[load], number, load * capacity, seed))
        first, again = self._compared(turns)
        asked = sum(one.requests for one in turns.values())
        return PoolServeFindings(
            first, again, capacity, (self._named, asked), self._loaded, self._failed, max(others)
        )

    def _round(self, turns: _Turns, number: int, per_s: float, seed: int) -> float:
        """One round of one load. Returns the cores that other programs used."""
        lines = self._lines[number * self._plan.requests : (number + 1) * self._plan.requests]
        requests = timed(lines, per_s, self._plan.scale, seed)
        noise = Noise([pid for one in (self._pooled, self._plain) for pid in one.pids])
        found: dict[str, list[Answer]] = {}
        order = (self._plain, self._pooled)
        for stack in order if number % 2 else reversed(order):
            found[stack.name] = self._turn(stack, stack.name, requests)
        others = noise.cores()
        time.sleep(_SAVED_S)
        self._pooled.kill_engines()
        wait_all(self._pooled.services, console=self._console)
        self._wait_for_pool()
        named = self._pooled.named_pool()
        noise = Noise([pid for one in (self._pooled, self._plain) for pid in one.pids])
        found[AGAIN] = self._turn(self._pooled, AGAIN, requests)
        self._named += self._pooled.named_pool() - named
        self._loaded += self._pooled.loaded_chunks()
        turns.requests += len(requests)
        wanted = found[PLAIN]
        for name, answers in found.items():
            served = [one for one in answers if not one.failure]
            if not served:
                raise BenchError(f"{name}: no request was served; see the logs")
            turns.ttft_s.setdefault(name, []).append(statistics.mean(a.ttft_s for a in served))
            turns.tpot_s.setdefault(name, []).append(statistics.mean(a.tpot_s for a in served))
            same = (
                not one.failure and one.text == other.text
                for one, other in zip(answers, wanted, strict=True)
            )
            turns.equal.setdefault(name, []).append(sum(same))
        return max(others, noise.cores())

    def _turn(self, stack: PoolStack, name: str, requests: Sequence[TimedRequest]) -> list[Answer]:
        answers = send(stack.router.client, self._model, requests)
        failures = [one.failure for one in answers if one.failure]
        self._failed[name].update(failures)
        times = [one.ttft_s for one in answers if not one.failure]
        mean = f"mean TTFT {statistics.mean(times):.2f} s" if times else "nothing served"
        self._say(f"{name}: {mean}, {len(failures)} of {len(answers)} lost")
        return answers

    def _rate(self, stack: PoolStack, count: int, at_once: int, seed: int) -> float:
        requests = timed(self._lines[:count], 1.0, self._plan.scale, seed)
        rate, answers = completion_rate(stack.router.client, self._model, requests, at_once)
        if failure := next((one.failure for one in answers if one.failure), ""):
            raise BenchError(f"{stack.name}: {failure}; see {stack.router.log_path.parent}")
        return rate

    def _wait_for_pool(self) -> None:
        ends = time.monotonic() + _IN_USE_S
        while not self._pooled.uses_pool():
            if time.monotonic() > ends:
                raise BenchError(
                    f"the pool is not used, or the router does not know it, after {_IN_USE_S:g} s; see "
                    f"{self._pooled.router.log_path.parent}"
                )
            time.sleep(0.5)

    def _compared(self, turns: Mapping[float, _Turns]) -> tuple[list[Comparison], list[Comparison]]:
        """With the pool beside no pool, and after the engines' death beside the time before."""
        first, again = list[Comparison](), list[Comparison]()
        for load, one in turns.items():
            for found, name, beside in ((first, POOL, PLAIN), (again, AGAIN, POOL)):
                add = _adder(found, {"load": load})
                add("TTFT mean", one.ttft_s[name], one.ttft_s[beside], "s", BARS[beside], False)
                add("TPOT mean", one.tpot_s[name], one.tpot_s[beside], "s", None, False)
                asked = [self._plan.requests] * self._plan.rounds
                add("answers equal", one.equal[name], asked, "", 1.0, True)
        return first, again


def _adder(
    found: list[Comparison], params: Mapping[str, float]
) -> Callable[[str, Sequence[float], Sequence[float], str, float | None, bool], None]:
    def add(
        name: str,
        ours: Sequence[float],
        theirs: Sequence[float],
        unit: str,
        bar: float | None,
        more: bool,
    ) -> None:
        mine, others = (Sample(tuple(float(value) for value in side)) for side in (ours, theirs))
        found.append(Comparison(name, dict(params), mine, others, unit, bar, more))

    return add
