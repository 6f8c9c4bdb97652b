# SPDX-License-Identifier: Apache-2.0
"""`roles truth`: three vLLM engines on this machine, and what they cost."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from pd_bench.model import KV_BYTES_PER_TOKEN, MADE_UP_WEIGHTS, write_model
from pd_bench.report import BenchError, Say
from pd_bench.roles import truth
from pd_bench.roles.fleets import FleetKind
from pd_bench.roles.truth_live import Live, routed
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import play
from pd_bench.serve.stack import OUR_SCHEDULER
from pd_connector.tools.launch import VllmEngine, stop_services, wait_all
from pd_connector.tools.launch.service import log_folder
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.profile import Measurement, fit, save
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import connect
from scheduler_plugins.profile.measure import Profile, Wanted, measure, time_steps
from scheduler_plugins.router.policies.base import ASSUMED_TPOT_S, ASSUMED_TTFT_S

ENGINES = 3
PROMPTS, ANSWERS = 4.0, 4.0
"""Divisors of the traces' lengths."""
STEP_TOKENS = 2048
MOST_BATCH = 8
CACHE_GIB = 2
AT_REST = 8
AT_REST_SEED = 0
"""Seed of the measurement at rest. Later measurements use other seeds, because the engine has these prompts cached."""
USUAL = 0.98
"""This part of the requests is no longer than those that are measured."""
MODEL = "mock"
"""Name of the model: that of the mocks, so that requests are the same."""


def scaled(requests: Sequence[Waiting]) -> list[Waiting]:
    """The traces' requests in sizes for a CPU."""
    return truth.scaled(requests, PROMPTS, ANSWERS)


@contextmanager
def engines(
    requests: Sequence[Waiting], busy: Callable[[FleetKind], truth.Busy], say: Say
) -> Iterator[Live]:
    """Engines for these requests, measured.

    All share the machine, so a step takes longer while others are busy. Costs are first measured at rest, and then
    while the others are as busy as in the run.

    Args:
        busy: how busy they will be, by a simulation with these costs.
    """
    lengths = sorted(request.tokens + request.max_tokens for request in requests)
    longest, usual = lengths[-1], lengths[int(USUAL * len(lengths))]
    with tempfile.TemporaryDirectory(prefix="pd-connector-model-") as folder:
        model, logs = write_model(Path(folder)), log_folder()
        say(f"logs in {logs}")
        made = _made(model, longest + 64, logs)
        try:
            for engine in made:
                engine.start()
            wait_all(made)
            urls = [engine.base_url for engine in made]
            say("measuring an engine while the others rest")
            rested = asyncio.run(_at_rest(urls[0], usual))
            fleet = FleetKind(
                name="three vLLM engines",
                costs=rested.model,
                kv_tokens=float(rested.engine.cache_tokens),
                kv_bytes_per_token=KV_BYTES_PER_TOKEN,
                ttft_s=ASSUMED_TTFT_S,
                tpot_s=ASSUMED_TPOT_S,
                promised=False,
                engines=ENGINES,
            )
            save(logs / "costs.json", rested.model)
            live = Live(fleet, made, 1, logs / "costs.json", logs)
            handoff_s = _handoff_s(live, rested.model)
            say(f"{_described(rested.model)}; a handoff takes {handoff_s * 1e3:.0f} ms")
            others = busy(fleet := replace(fleet, latency_s=handoff_s))
            say(
                f"measuring it while {others.beside_prefill:.2f} others compute beside a prompt, and "
                f"{others.beside_decode:.2f} beside a decode step"
            )
            costs = asyncio.run(_costs_beside(urls, usual, requests, others))
            save(logs / "costs.json", costs)
            say(_described(costs))
            yield live._replace(fleet=replace(fleet, costs=costs))
        finally:
            stop_services(made)


def _made(model: Path, longest: int, logs: Path) -> list[VllmEngine]:
    """The engines, not started yet. `longest`: the most tokens of a sequence."""
    args = [*MADE_UP_WEIGHTS, *OUR_SCHEDULER, "--served-model-name", MODEL]
    args += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    return [
        VllmEngine(
            model,
            "kv_both",
            name=f"engine{n}",
            max_model_len=longest,
            args=args,
            env={"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB)},
            log_path=logs / f"engine{n}.log",
        )
        for n in range(ENGINES)
    ]


async def _at_rest(url: str, longest: int) -> Profile:
    async with connect(url) as client:
        return await measure(client, _plan(longest), _silent, AT_REST_SEED)


async def _costs_beside(
    urls: Sequence[str], longest: int, requests: Sequence[Waiting], others: truth.Busy
) -> CostModel:
    """The costs of the first engine: of prompts and of decode steps, each while the others are as busy as then."""
    measured = list[Measurement]()
    kinds = (others.beside_prefill, _prefills), (others.beside_decode, _decodes)
    async with connect(urls[0]) as client:
        for seed, (beside, only) in enumerate(kinds, AT_REST_SEED + 1):
            async with _serving(urls[1:], requests, beside / len(urls[1:])):
                plan_measured = _plan(longest)
                measured += (await time_steps(client, plan_measured, _silent, seed, only)).measured
    return fit(measured, STEP_TOKENS)


def _plan(longest: int) -> Wanted:
    return Wanted(longest, MOST_BATCH, repeats=2, chunk_tokens=STEP_TOKENS)


def _silent(done: int, total: int, what: str) -> None:
    pass


def _prefills(load: StepLoad) -> bool:
    return load.tokens > 0


def _decodes(load: StepLoad) -> bool:
    return load.batch > 0


@asynccontextmanager
async def _serving(
    urls: Sequence[str], requests: Sequence[Waiting], part: float
) -> AsyncIterator[None]:
    """Each of these engines serves requests for a part of the time."""
    tasks = list[asyncio.Task[None]]()
    try:
        for n, url in enumerate(urls):
            if part > 0:
                tasks.append(asyncio.create_task(_serve(url, requests, min(1.0, part), Random(n))))
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    if failed := [result for result in ended if isinstance(result, Exception)]:
        raise failed[0]


async def _serve(url: str, requests: Sequence[Waiting], part: float, random: Random) -> None:
    """Have an engine serve one request after another for `part` of the time, until cancelled."""
    async with connect(url) as client:
        pool = await client.pool()
        while True:
            request, begun_s = random.choice(requests), time.perf_counter()
            await client.complete(random.choices(pool, k=request.tokens), request.max_tokens)
            took_s = time.perf_counter() - begun_s
            await asyncio.sleep(took_s * (1 - part) / part)


def _handoff_s(live: Live, costs: CostModel) -> float:
    """The time of a request at rest, without its prefill and its first decode step: HTTP, the router, and the
    handoff."""
    tokens, random = 300, Random(1)
    prompts = ["".join(random.choices("abcdefgh ", k=tokens)) for _ in range(2 * AT_REST)]
    sent = [Sent(n * 1.0, text, 2, tokens) for n, text in enumerate(prompts)]
    with routed(live, 1, "fixed") as router:
        answers = asyncio.run(play([router.base_url], sent, 1.0))[AT_REST:]
    if failed := [answer for answer in answers if not answer.served]:
        raise BenchError(f"a request at rest failed: {failed[0].status} {failed[0].error}")
    return max(
        0.0,
        statistics.median(answer.ttft_s for answer in answers) - costs.prefill_s(tokens) - costs.d0,
    )


def _described(costs: CostModel) -> str:
    return (
        f"a prompt of 1,000 tokens takes {costs.prefill_s(1000):.3f} s, a step of 4 x 500 tokens "
        f"{costs.decode_step_s(4, 2000) * 1e3:.1f} ms"
    )
