# SPDX-License-Identifier: Apache-2.0
"""The order of the queue in real SGLang engines: four of SGLang's own policies, and ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path

from pd_bench.machine import Noise
from pd_bench.scheduler.live import (
    CHUNK_TOKENS,
    Contender,
    EngineSetup,
    Findings,
    RunningEngine,
    Say,
    outcome,
    warm_up,
)
from pd_bench.scheduler.live_queue import CACHED_PROFILES, POST_TOKENS, PROFILE_TOKENS
from pd_bench.scheduler.replay import Outcome, per_second
from pd_bench.scheduler.runs import Runs
from pd_bench.scheduler.sending import RequestRecord
from pd_bench.scheduler.sglang_bars import FCFS, OURS, THEIRS, comparisons
from pd_bench.scheduler.workload import poisson, shared_profiles
from pd_connector.tools.launch.progress import wait_all
from pd_connector.tools.launch.sglang import SglangEngine
from scheduler_plugins.profile.client import connect
from scheduler_plugins.qos.settings import SETTINGS_VARIABLE

PAGE_SIZE = 16
_UNDER_WAY = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
_RESET = "/flush_cache"
_SEED = 7

CONTENDERS = (
    *(Contender(name, ("--schedule-policy", name)) for name in THEIRS),
    Contender(OURS, ("--schedule-policy", "pd_scheduler"), f"scheduler: {{policy: {OURS}}}"),
)


async def compare(
    posts: int, loads: Sequence[float], rounds: int, folder: Path, say: Say
) -> Findings:
    """PrefillOnly's shape, 20 users x `posts`, at `loads` times what SGLang's FCFS drains.

    All engines run from the start and take turns, as in `live_queue`. At load 0.9 the bar of our mean time to the first
    token is the smallest mean of the others.
    """
    cache_tokens = CACHED_PROFILES * sum(PROFILE_TOKENS) // 2
    setup = EngineSetup(cache_tokens, PROFILE_TOKENS[1] + 500, folder)
    found = defaultdict[tuple[str, float], list[Outcome]](list)
    rates = []
    async with AsyncExitStack() as stack:
        services = [_service(one, setup, say) for one in CONTENDERS]
        for service in services:
            stack.enter_context(service)
        wait_all(services)
        engines = [
            await stack.enter_async_context(_running(one, service, setup, say))
            for one, service in zip(CONTENDERS, services, strict=True)
        ]
        noise = Noise([pid for engine in engines for pid in engine.pids])
        runs = Runs(rounds * (1 + len(loads) * len(engines)), say)
        for seed in range(_SEED, _SEED + rounds):
            requests = shared_profiles(
                seed, posts=posts, profile_tokens=PROFILE_TOKENS, post_tokens=POST_TOKENS
            )
            async with runs.run(f"what {FCFS} drains", len(requests)) as count:
                drained = await engines[0].serve(requests, page_size=PAGE_SIZE, answered=count)
            rates.append(per_second([one.ttft_s for one in drained]))
            say(f"capacity of {FCFS}: {rates[-1]:.1f} requests a second")
            for load, engine in product(loads, engines):
                timed = poisson(requests, load * rates[-1], seed)
                name = engine.contender.name
                async with runs.run(f"{name} at {load:g}", len(timed)) as count:
                    records = await engine.serve(timed, page_size=PAGE_SIZE, answered=count)
                result = outcome(records, _hit(records))
                found[name, load].append(result)
                say(
                    f"  {name} at {load:g}: mean {result.mean_s:.3f} s, p99 {result.p99_s:.3f} s, "
                    f"hit {result.hit:.2f}"
                )
        others_cores = noise.cores()
    compared = [one for load in loads for one in comparisons(load, found)]
    drains = ", ".join(f"{rate:.1f}" for rate in rates)
    return Findings(compared, [f"capacity: {drains} requests a second"], others_cores)


def _hit(records: Sequence[RequestRecord]) -> float:
    """The fraction of prompt tokens that came from the prefix cache, according to the answers."""
    answers = [one.answer for one in records if one.answer is not None]
    cached = sum(one.cached_tokens or 0 for one in answers)
    return cached / max(1, sum(one.prompt_tokens for one in answers))


def _service(contender: Contender, setup: EngineSetup, say: Say) -> SglangEngine:
    """One contender, not started."""
    folder = setup.folder / contender.name
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.yaml"
    settings.write_text(contender.settings or "")
    engine = SglangEngine(
        setup.model,
        name=contender.name,
        page_size=PAGE_SIZE,
        max_tokens=setup.cache_tokens,
        args=[
            f"--chunked-prefill-size={CHUNK_TOKENS}",
            f"--context-length={setup.max_model_len}",
            "--enable-cache-report",
            # SGLang's loop runs without pause, so each idle engine would take a core.
            "--sleep-on-idle",
            *contender.args,
        ],
        env={SETTINGS_VARIABLE: str(settings)},
        log_path=folder / "engine.log",
    )
    say(f"starting {contender.name} (log: {engine.log_path})")
    return engine


@asynccontextmanager
async def _running(
    contender: Contender, service: SglangEngine, setup: EngineSetup, say: Say
) -> AsyncIterator[RunningEngine]:
    """Connect to a started contender and warm it up. Raises BenchError: it does not work as expected."""
    async with connect(service.base_url) as client:
        processes = service.family.members() if service.family else []
        pids = [process.pid for process in processes]
        settings = setup.folder / contender.name / "settings.yaml"
        found = RunningEngine(
            contender, client, settings, pids, Noise(pids), under_way=_UNDER_WAY, reset=_RESET
        )
        say(f"warming {contender.name} up")
        await warm_up(found, setup.max_model_len)
        yield found
