# SPDX-License-Identifier: Apache-2.0
"""`roles truth`: three vLLM engines on this machine, and what they cost."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.bench.model import KV_BYTES_PER_TOKEN, MADE_UP_WEIGHTS, write_model
from pd_connector.tools.bench.serve.stack import OUR_SCHEDULER
from pd_connector.tools.launch import VllmEngine, stop_services, wait_all
from pd_connector.tools.launch.service import log_folder
from scheduler_plugins.bench.roles import truth
from scheduler_plugins.bench.roles.fleets import FleetKind
from scheduler_plugins.bench.roles.play import Say
from scheduler_plugins.bench.roles.truth_live import Live, routed
from scheduler_plugins.bench.scaled import Sent
from scheduler_plugins.bench.sending import play
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import save
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import EngineClient, connect
from scheduler_plugins.profile.measure import Profile, Wanted, measure
from scheduler_plugins.router.policies.base import ASSUMED_TPOT_S, ASSUMED_TTFT_S

ENGINES = 3
PROMPTS, ANSWERS = 4.0, 4.0
"""Divisors of the traces' lengths."""
STEP_TOKENS = 2048
MOST_BATCH = 8
CACHE_GIB = 2
AT_REST = 8
BUSY = 0.8
"""Part of the time that the other engines decode while one is measured. In the run all are as busy."""
MODEL = "mock"
"""Name of the model: that of the mocks, so that requests are the same."""


def scaled(requests: Sequence[Waiting]) -> list[Waiting]:
    """The traces' requests in sizes for a CPU."""
    return truth.scaled(requests, PROMPTS, ANSWERS)


@contextmanager
def engines(requests: Sequence[Waiting], say: Say) -> Iterator[Live]:
    """Engines for these requests, measured.

    All share the machine, so a step takes longer while others are busy. Costs are measured while the others decode.
    """
    longest = max(one.tokens + one.max_tokens for one in requests)
    with tempfile.TemporaryDirectory(prefix="pd-connector-model-") as folder:
        model, logs = write_model(Path(folder)), log_folder()
        say(f"logs in {logs}")
        args = [*MADE_UP_WEIGHTS, *OUR_SCHEDULER, "--served-model-name", MODEL]
        args += ["--max-num-batched-tokens", str(STEP_TOKENS)]
        made = [
            VllmEngine(
                model,
                "kv_both",
                name=f"engine{n}",
                max_model_len=longest + 64,
                args=args,
                env={"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB)},
                log_path=logs / f"engine{n}.log",
            )
            for n in range(ENGINES)
        ]
        try:
            for one in made:
                one.start()
            wait_all(made)
            urls = [one.base_url for one in made]
            say("measuring an engine while the others rest")
            at_rest = asyncio.run(_profile(urls[0], longest)).model
            say("measuring it while the others decode")
            found = asyncio.run(_profile_beside(urls, longest, requests, at_rest))
            save(logs / "costs.json", found.model)
            fleet = FleetKind(
                name="three vLLM engines",
                costs=found.model,
                kv_tokens=float(found.engine.cache_tokens),
                kv_bytes_per_token=KV_BYTES_PER_TOKEN,
                ttft_s=ASSUMED_TTFT_S,
                tpot_s=ASSUMED_TPOT_S,
                promised=False,
                engines=ENGINES,
            )
            live = Live(fleet, made, 1, logs / "costs.json", logs)
            handoff_s = _handoff_s(live, at_rest)
            say(f"{_told(found.model)}; a handoff takes {handoff_s * 1e3:.0f} ms")
            yield live._replace(fleet=replace(fleet, latency_s=handoff_s))
        finally:
            stop_services(made)


async def _profile(url: str, longest: int) -> Profile:
    async with connect(url) as client:
        wanted = Wanted(longest, MOST_BATCH, repeats=2, chunk_tokens=STEP_TOKENS)
        return await measure(client, wanted, lambda done, total, what: None)


async def _profile_beside(
    urls: Sequence[str], longest: int, requests: Sequence[Waiting], costs: CostModel
) -> Profile:
    """The costs of the first engine while each of the others decodes for a part of the time."""
    async with connect(urls[1]) as one, connect(urls[2]) as other:
        decoding = [
            asyncio.create_task(_decode(client, requests, costs)) for client in (one, other)
        ]
        try:
            return await _profile(urls[0], longest)
        finally:
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)


async def _decode(client: EngineClient, requests: Sequence[Waiting], costs: CostModel) -> None:
    """Have an engine decode for `BUSY` of the time, until cancelled. One prompt is computed, once."""
    tokens = round(statistics.mean(one.tokens for one in requests))
    answer = round(statistics.mean(one.max_tokens for one in requests))
    prompt = Random(0).choices(await client.pool(), k=tokens)
    await client.complete(prompt, 1)
    batch = MOST_BATCH // 2
    round_s = answer * costs.decode_step_s(batch, batch * tokens)
    while True:
        await asyncio.gather(*(client.complete(prompt, answer) for _ in range(batch)))
        await asyncio.sleep(round_s * (1 - BUSY) / BUSY)


def _handoff_s(live: Live, costs: CostModel) -> float:
    """The time of a request at rest, without its prefill and its first decode step: HTTP, the router, and the
    handoff."""
    tokens, random = 300, Random(1)
    prompts = ["".join(random.choices("abcdefgh ", k=tokens)) for _ in range(2 * AT_REST)]
    sent = [Sent(n * 1.0, text, 2, tokens) for n, text in enumerate(prompts)]
    with routed(live, 1, "fixed") as router:
        answers = asyncio.run(play([router.base_url], sent, 1.0))[AT_REST:]
    if failed := [one for one in answers if not one.served]:
        raise BenchError(f"a request at rest failed: {failed[0].status} {failed[0].error}")
    return max(
        0.0,
        statistics.median(one.ttft_s for one in answers) - costs.prefill_s(tokens) - costs.d0,
    )


def _told(costs: CostModel) -> str:
    return (
        f"a prompt of 1,000 tokens takes {costs.prefill_s(1000):.3f} s, a step of 4 x 500 tokens "
        f"{costs.decode_step_s(4, 2000) * 1e3:.1f} ms"
    )
