# SPDX-License-Identifier: Apache-2.0
"""`bench serve --pool`: one stack with a KV pool beside one without, then again after its engines have died.

Each round, both stacks serve the same requests in turn. After the last round both engines of the stack with the pool are
killed and restarted, and all requests come again. Until then both stacks have the same past.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pd_bench.command_output import printing
from pd_bench.harness import VLLM, require
from pd_bench.machine import Noise
from pd_bench.model import KV_BYTES_PER_TOKEN, write_model, write_weights
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.serve.measure import AT_ONCE, WARM_UPS, Plan
from pd_bench.serve.pool_turns import AGAIN, PLAIN, POOL, Round, Turns, compared
from pd_bench.serve.sending import Answer, completion_rate, send
from pd_bench.serve.stack import PoolStack, StackSetup
from pd_bench.serve.trace import Line, TimedRequest, longest, read, timed
from pd_connector.errors import ConfigError
from pd_connector.pool.settings import SHM_VARIABLE, load, memory_folder
from pd_connector.tools.launch import stop_services, terminate_as_interrupt, wait_all
from pd_connector.tools.launch.service import log_folder

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
        lines = read(self.trace, self.plan.requests * self.plan.rounds)
        require(VLLM, ("aiohttp", "our router needs it: pip install 'pd-connector[router]'"))
        memory = memory_for(lines, self.plan)
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
            pooled = PoolStack(POOL, setup, {"memory": memory}, env)
            plain = PoolStack(PLAIN, setup, None, env)
            services = [*pooled.services, *plain.services]
            stack.callback(stop_services, services)
            for group in ([*pooled.engines, *plain.engines], [pooled.router, plain.router]):
                for service in group:
                    service.start()
                wait_all(group, console=console)

            say = printing(console)
            return PoolMeasurement(pooled, plain, lines, self.plan, shm, say, console).measure()


class PoolMeasurement:
    """Measures two stacks that are already running.

    Args:
        shm: folder in memory, where the pool is.
    """

    def __init__(
        self,
        pooled: PoolStack,
        plain: PoolStack,
        lines: Sequence[Line],
        plan: Plan,
        shm: Path,
        say: Say,
        console: Console,
    ) -> None:
        self._pooled, self._plain = pooled, plain
        self._lines = lines
        self._plan = plan
        self._shm = shm
        self._say = say
        self._console = console
        self._model = pooled.engines[0].client.model()
        self._failed: dict[str, Counter[str]] = {name: Counter() for name in (POOL, PLAIN, AGAIN)}

    def measure(self) -> PoolServeFindings:
        """Measure everything.

        Raises:
            BenchError: an engine does not use the pool.
        """
        self._wait_for_pool()
        noise = Noise()
        for stack in (self._pooled, self._plain):
            self._rate(stack, WARM_UPS, 1, seed=1)
        rates = [
            self._rate(stack, self._plan.requests, AT_ONCE, seed=2)  # and both have learnt costs
            for stack in (self._pooled, self._plain)
        ]
        capacity = rates[-1]
        self._say(f"{PLAIN}: {capacity:.2f} requests/s with {AT_ONCE} under way")
        rounds = [
            Round(load, number, self._requests(load * capacity, number, place))
            for number in range(self._plan.rounds)
            for place, load in enumerate(self._plan.loads)
        ]
        turns = {load: Turns() for load in self._plan.loads}
        others = [noise.cores()]
        both = {POOL: self._pooled, PLAIN: self._plain}
        turned = dict(reversed(both.items()))
        others += [
            self._serve(turns[round_.load], round_, turned if round_.number % 2 else both)
            for round_ in rounds
        ]
        time.sleep(_SAVED_S)
        self._pooled.kill_engines()
        wait_all(self._pooled.services, console=self._console)
        self._wait_for_pool()
        named = self._pooled.named_pool()
        others += [
            self._serve(turns[round_.load], round_, {AGAIN: self._pooled}) for round_ in rounds
        ]
        first, again = compared(turns)
        sent = sum(len(round_.requests) for round_ in rounds)
        decided = self._pooled.named_pool() - named, sent
        loaded = self._pooled.loaded_chunks()
        return PoolServeFindings(first, again, capacity, decided, loaded, self._failed, max(others))

    def _requests(self, per_s: float, number: int, place: int) -> list[TimedRequest]:
        lines = self._lines[number * self._plan.requests : (number + 1) * self._plan.requests]
        seed = 100 + number * len(self._plan.loads) + place
        return timed(lines, per_s, self._plan.scale, seed)

    def _serve(self, turns: Turns, round_: Round, stacks: Mapping[str, PoolStack]) -> float:
        """One round, served by each of these in turn. Returns the cores that other programs used."""
        others = list[float]()
        for name, stack in stacks.items():
            _use_memory(self._shm, _kv_bytes(round_.requests))
            noise = Noise()
            turns.add(name, self._turn(stack, name, round_.requests))
            others.append(noise.cores())
        return max(others)

    def _turn(self, stack: PoolStack, name: str, requests: Sequence[TimedRequest]) -> list[Answer]:
        answers = send(stack.router.client, self._model, requests)
        failures = [answer.failure for answer in answers if answer.failure]
        self._failed[name].update(failures)
        times = [answer.ttft_s for answer in answers if not answer.failure]
        if not times:
            raise BenchError(f"{name}: no request was served; see {stack.router.log_path.parent}")
        mean = statistics.mean(times)
        self._say(f"{name}: mean TTFT {mean:.2f} s, {len(failures)} of {len(answers)} lost")
        return answers

    def _rate(self, stack: PoolStack, count: int, at_once: int, seed: int) -> float:
        requests = timed(self._lines[:count], 1.0, self._plan.scale, seed)
        rate, answers = completion_rate(stack.router.client, self._model, requests, at_once)
        if failure := next((answer.failure for answer in answers if answer.failure), ""):
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


def memory_for(lines: Sequence[Line], plan: Plan) -> str:
    """The size of a pool that keeps all that is sent, so that nothing is evicted before the engines' death.

    Raises:
        BenchError: this machine does not have that, and a turn's KV in addition.
    """
    rounds = [
        timed(lines[at : at + plan.requests], 1.0, plan.scale, 0)
        for at in range(0, len(lines), plan.requests)
    ]
    turns = [_kv_bytes(requests_of) for requests_of in rounds]
    before = _kv_bytes(rounds[0][:WARM_UPS]) + turns[0]  # warm-ups, and to find the capacity
    gib = -(-(sum(turns) * len(plan.loads) + before) >> 30) + 1  # chunks have headers, too
    turn = -(-max(turns) >> 30)
    try:
        load({"memory": f"{gib + turn}GiB"})
    except ConfigError as error:
        raise BenchError(
            f"these requests need a pool of {gib} GiB, and {turn} GiB more for the KV of one turn: ask for fewer --requests or "
            f"--rounds, or for a larger --scale. {error}"
        ) from None
    return f"{gib}GiB"


def _kv_bytes(requests: Sequence[TimedRequest]) -> int:
    tokens = sum(len(request.prompt) + request.max_tokens for request in requests)
    return tokens * 2 * KV_BYTES_PER_TOKEN  # in float32


def _use_memory(folder: Path, nbytes: int) -> None:
    """Write this much to a folder, and give it back.

    A virtual machine may get memory from its host only when it is used first, and then at a tenth of the usual speed or
    less. A turn would measure that wherever it is the first to use some.
    """
    path, piece = folder / "used-before", bytes(8 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(piece))):
            file.write(piece)
    path.unlink()
