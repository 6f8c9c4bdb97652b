# SPDX-License-Identifier: Apache-2.0
"""The order of the queue in real SGLang engines: four of SGLang's own policies, and ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pd_bench.machine import Noise
from pd_bench.report import Say
from pd_bench.scheduler.live import (
    CHUNK_TOKENS,
    Contender,
    EngineSetup,
    Findings,
    RunningEngine,
    warm_up,
)
from pd_bench.scheduler.live_queue import CACHED_PROFILES, PAGE_SIZE, PROFILE_TOKENS, take_turns
from pd_bench.scheduler.sending import RequestRecord
from pd_bench.scheduler.sglang_bars import OURS, THEIRS, comparisons
from pd_connector.tools.launch.progress import wait_all
from pd_connector.tools.launch.sglang import SglangEngine
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import connect
from scheduler_plugins.qos.settings import SETTINGS_VARIABLE

_UNDER_WAY = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
_RESET = "/flush_cache"

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
    async with AsyncExitStack() as stack:
        services = [_service(contender, setup, say) for contender in CONTENDERS]
        for service in services:
            stack.enter_context(service)
        wait_all(services)
        engines = [
            await stack.enter_async_context(_running(contender, service, setup, say))
            for contender, service in zip(CONTENDERS, services, strict=True)
        ]
        turns = await take_turns(engines, _serve, posts, loads, rounds, say)
    compared = [row for load in loads for row in comparisons(load, turns.outcomes)]
    return Findings(compared, [turns.capacity], turns.others_cores)


async def _serve(
    engine: RunningEngine, requests: Sequence[Waiting], **how: Any
) -> tuple[list[RequestRecord], float]:
    records = await engine.serve(requests, **how)
    return records, _hit(records)


def _hit(records: Sequence[RequestRecord]) -> float:
    """The fraction of prompt tokens that came from the prefix cache, according to the answers."""
    answers = [record.answer for record in records if record.answer is not None]
    cached = sum(answer.cached_tokens or 0 for answer in answers)
    return cached / max(1, sum(answer.prompt_tokens for answer in answers))


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
        settings = setup.folder / contender.name / "settings.yaml"
        engine = RunningEngine(
            contender, client, settings, Noise(), under_way=_UNDER_WAY, reset=_RESET
        )
        say(f"warming {contender.name} up")
        await warm_up(engine, setup.max_model_len)
        yield engine
