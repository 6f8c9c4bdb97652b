# SPDX-License-Identifier: Apache-2.0
"""The simulator beside two real engines of vLLM's and our router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pd_bench.model import KV_BYTES_PER_TOKEN, LAYERS, MADE_UP_WEIGHTS, write_model
from pd_bench.report import BenchError, Say
from pd_bench.router.truth import Seen
from pd_bench.serve.sending import Answer, completion_rate, send
from pd_bench.serve.stack import OUR_SCHEDULER
from pd_bench.serve.trace import Line, TimedRequest, read, timed
from pd_connector.tools.launch import RouterProcess, VllmEngine, stop_services, wait_all
from pd_connector.tools.launch.engine import Role
from pd_connector.tools.launch.service import log_folder
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import EngineClient, connect
from scheduler_plugins.profile.measure import Profile, Wanted, measure
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import Scenario

SCALE = 16.0
"""Divisor of the trace's lengths. With it, blocks of 512 tokens become pages of 32 tokens, which vLLM uses on a CPU."""
PAGE_TOKENS = 32
LOAD = 0.6
"""Load as a fraction of the prefill engine's capacity, by its cost model and without its cache."""
STEP_TOKENS = 2048
MOST_BATCH = 8
CACHE_GIB = 2
AT_REST = 8
MEMORY_BYTES_PER_S = 2e9
"""Assumed rate of KV, which passes through shared memory."""
_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, and the router in front of them."""

    prefill: VllmEngine
    decode: VllmEngine
    router: RouterProcess
    model: str
    """Its name as clients give it."""


def compare(trace: Path, requests: int, policy: str, say: Say) -> tuple[Seen, Seen]:
    """Run the same requests live and simulated, with costs measured before. Returns the figures of both.

    Both engines share the machine, so a prompt takes longer while the decode engine decodes. The prefill engine's
    capacity comes from its costs while the decode engine rests. The simulator gets the costs while the decode engine
    decodes as in the run.

    Raises:
        PDConnectorError: the trace cannot be read, an engine does not start, or a request failed.
    """
    lines = read(trace, requests)
    longest = int(max((line.input_length + line.output_length) / SCALE for line in lines))
    with _pair((longest // PAGE_TOKENS + 2) * PAGE_TOKENS, policy, say) as pair:
        say("measuring the costs of the prefill engine while the decode engine rests")
        costs = asyncio.run(_profile(pair.prefill.base_url, longest)).model
        mean_s = _mean_s(costs, lines)
        per_s = LOAD / mean_s
        sent = timed(lines, per_s, SCALE, seed=1)
        say(f"a prompt takes {mean_s:.3f} s on average; {per_s:.2f} requests a second")
        say("measuring them again while it decodes as it will")
        profile = asyncio.run(_profile_beside(pair, longest, lines, per_s))
        say(f"a prompt takes {_mean_s(profile.model, lines):.3f} s then")
        rest = timed(lines[:AT_REST], 1.0, SCALE, seed=2)
        _, idle = completion_rate(pair.router.client, pair.model, rest, at_once=1)
        handoff_s = _handoff_s(costs, rest, _served(idle))
        before = pair.prefill.metrics()
        answers = _served(send(pair.router.client, pair.model, sent))
        after = pair.prefill.metrics()
    hits, queries = (after.total(name) - before.total(name) for name in (_HITS, _QUERIES))
    live = Seen(statistics.mean(answer.ttft_s for answer in answers), hits / queries)
    say(f"besides its prefill a request at rest takes {handoff_s * 1e3:.0f} ms")
    return live, _simulated(sent, profile, handoff_s, policy)


@contextlib.contextmanager
def _pair(max_model_len: int, policy: str, say: Say) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="pd-connector-model-") as folder:
        model, logs = write_model(Path(folder)), log_folder()
        say(f"logs in {logs}")

        def engine(name: str, role: Role) -> VllmEngine:
            return VllmEngine(
                model,
                role,
                name=name,
                max_model_len=max_model_len,
                args=[
                    *MADE_UP_WEIGHTS,
                    *OUR_SCHEDULER,
                    "--max-num-batched-tokens",
                    str(STEP_TOKENS),
                ],
                env={"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB)},
                log_path=logs / f"{name}.log",
            )

        prefill, decode = engine("prefill", "kv_producer"), engine("decode", "kv_consumer")
        urls = [prefill.base_url], [decode.base_url]
        args = ["--policy", policy, "--log-level", "WARNING"]
        router = RouterProcess(*urls, args=args, log_path=logs / "router.log")
        try:
            for group in ([prefill, decode], [router]):
                for service in group:
                    service.start()
                wait_all(group)
            yield Pair(prefill, decode, router, prefill.client.model())
        finally:
            stop_services([prefill, decode, router])


def _mean_s(costs: CostModel, lines: Sequence[Line]) -> float:
    """Seconds of a prompt of the trace, without any cache."""
    return statistics.mean(costs.prefill_s(int(line.input_length / SCALE)) for line in lines)


async def _profile(url: str, longest: int) -> Profile:
    async with connect(url) as client:
        plan = Wanted(longest, MOST_BATCH, repeats=2, chunk_tokens=STEP_TOKENS)
        return await measure(client, plan, lambda done, total, what: None)


async def _profile_beside(pair: Pair, longest: int, lines: Sequence[Line], per_s: float) -> Profile:
    """The prefill engine's costs while the decode engine decodes the trace's answers, `per_s` a second."""
    async with connect(pair.decode.base_url) as client:
        decoding = asyncio.create_task(_decode(client, lines, per_s))
        try:
            return await _profile(pair.prefill.base_url, longest)
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)


async def _decode(client: EngineClient, lines: Sequence[Line], per_s: float) -> None:
    """Ask for answers of the trace's lengths, until cancelled. All share one prompt of the trace's mean length. It is
    computed once, because the run's decode engine computes no prompts either."""
    random = Random(0)
    pool = await client.pool()
    tokens = int(statistics.mean(recorded.input_length for recorded in lines) / SCALE)
    prompt = random.choices(pool, k=tokens)
    await client.complete(prompt, 1)
    async with asyncio.TaskGroup() as answers:
        for line in itertools.cycle(lines):
            most = max(2, round(line.output_length / SCALE))
            answers.create_task(client.complete(prompt, most))
            await asyncio.sleep(random.expovariate(per_s))


def _handoff_s(
    costs: CostModel, requests: Sequence[TimedRequest], answers: Sequence[Answer]
) -> float:
    """The time of a request at rest, without its prefill and its first decode step: HTTP, the router, and the
    handoff."""
    left = [
        answer.ttft_s - costs.prefill_s(len(request.prompt)) - costs.d0
        for request, answer in zip(requests, answers, strict=True)
    ]
    return max(0.0, statistics.median(left))


def _served(answers: Sequence[Answer]) -> Sequence[Answer]:
    if failed := [answer.failure for answer in answers if answer.failure]:
        raise BenchError(f"{len(failed)} of {len(answers)} requests failed, the first: {failed[0]}")
    return answers


def _simulated(
    sent: Sequence[TimedRequest], profile: Profile, handoff_s: float, policy: str
) -> Seen:
    scenario = Scenario(
        prefill=1,
        decode=1,
        level=2,
        costs=profile.model,
        cache_blocks=profile.engine.cache_tokens // PAGE_TOKENS,
        block_tokens=PAGE_TOKENS,
        kv_tokens=float(profile.engine.cache_tokens),
        network=Network(
            bytes_per_s=MEMORY_BYTES_PER_S,
            latency_s=handoff_s,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            layers=LAYERS,
        ),
    )
    served = scenario.cluster(policy).run([_waiting(n, request) for n, request in enumerate(sent)])
    cached = sum(request.cached_tokens for request in served)
    tokens = sum(request.request.tokens for request in served)
    return Seen(statistics.mean(request.ttft_s for request in served), cached / tokens)


def _waiting(number: int, request: TimedRequest) -> Waiting:
    """A request in the simulator's form. A letter is a token."""
    prompt = request.prompt
    ends = range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS)
    return Waiting(
        id=f"request {number}",
        tokens=len(prompt),
        block_hashes=[hash(prompt[:end]) for end in ends],
        arrival_s=request.at_s,
        max_tokens=request.max_tokens,
    )
