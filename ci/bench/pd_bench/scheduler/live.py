# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, one after the other. Each gets the same requests at the same times."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pd_bench.harness import VLLM, require
from pd_bench.machine import Noise
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.scheduler.replay import Outcome, p99
from pd_bench.scheduler.sending import RequestRecord, send_all
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import VllmEngine
from pd_connector.tools.launch.engine import PAGE_TOKENS
from pd_connector.tools.launch.progress import wait_all
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import EngineClient, connect

OURS = ("--scheduler-cls", "scheduler_plugins.vllm.PrefixAwareScheduler")
MIDDLEWARE = ("--middleware", "scheduler_plugins.vllm.AdmissionMiddleware")
CHUNK_TOKENS = 512
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
RESET = "/reset_prefix_cache"
_IDLE_S = 60.0


@dataclass(frozen=True)
class Contender:
    """An engine with one way of scheduling.

    Args:
        args: arguments of vLLM's server, after the arguments that all contenders share.
        settings: content of the scheduler's YAML file; None for vLLM's own scheduler.
        by_length: requests carry `priority`: their length.
    """

    name: str
    args: Sequence[str] = ()
    settings: str | None = None
    by_length: bool = False


@dataclass(frozen=True)
class EngineSetup:
    """Settings that all contenders of a comparison share.

    Args:
        cache_tokens: room for KV.
        max_model_len: tokens of the longest request.
        folder: for logs and settings.
    """

    cache_tokens: int
    max_model_len: int
    folder: Path
    model: str = str(MODEL_DIR)


class Findings(NamedTuple):
    """Result of a comparison."""

    comparisons: list[Comparison]
    notes: list[str]
    others_cores: float  # CPU use of other programs during the run


@dataclass
class RunningEngine:
    """A started engine, idle, with a client."""

    contender: Contender
    client: EngineClient
    settings: Path
    noise: Noise
    """CPU use of other programs during the run."""
    under_way: Sequence[str] = UNDER_WAY
    """Metrics that are 0 when the engine is idle."""
    reset: str = RESET
    """Endpoint that resets its prefix cache."""
    _pool: list[int] = field(default_factory=list)

    async def serve(
        self,
        requests: Sequence[Waiting],
        *,
        page_size: int,
        until_s: float | None = None,
        headers: Callable[[Waiting], dict[str, str]] | None = None,
        answered: Callable[[], None] = lambda: None,
    ) -> list[RequestRecord]:
        """Send requests at their times, to an empty prefix cache.

        Args:
            requests: by arrival.
            page_size: of their hashes.
            until_s: disconnect all requests at this time, by the clock of the arrivals; None: never.
            headers: of each request.
            answered: called with each answer.
        """
        await self.drained()
        await self._reset()
        self._pool = self._pool or await self.client.pool()
        with _no_collection():
            return await send_all(
                self.client,
                requests,
                self._pool,
                page_size=page_size,
                until_s=until_s,
                headers=headers,
                by_length=self.contender.by_length,
                answered=answered,
            )

    async def hit(
        self, requests: Sequence[Waiting], **how: Any
    ) -> tuple[list[RequestRecord], float]:
        """Like `serve`. Also returns the fraction of prompt tokens that came from the prefix cache."""
        before = await self.client.metrics()
        records = await self.serve(requests, **how)
        grown = (await self.client.metrics()).since(before)
        return records, grown.total(HITS) / max(1.0, grown.total(QUERIES))

    async def drained(self) -> None:
        """Wait until the engine has nothing to do."""
        end_s = time.monotonic() + _IDLE_S
        while time.monotonic() < end_s:
            samples = await self.client.metrics()
            if not sum(samples.total(name) for name in self.under_way):
                return
            await asyncio.sleep(0.1)
        raise BenchError(f"{self.contender.name}: still busy after {_IDLE_S:.0f} s")

    async def _reset(self) -> None:
        answer = await self.client.post(self.reset)
        if answer != 200:
            raise BenchError(
                f"{self.contender.name}: {self.reset} was answered with {answer}; vLLM needs "
                "VLLM_SERVER_DEV_MODE=1 for it"
            )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's cyclic garbage collector is off here. With thousands of running requests it stops this process for
    hundreds of milliseconds, which would count as the engine's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@asynccontextmanager
async def running(
    contender: Contender, setup: EngineSetup, say: Say
) -> AsyncIterator[RunningEngine]:
    """Start one contender, warm it up, end it.

    Raises:
        StartError: it did not start; BenchError: it does not work as expected.
    """
    folder = setup.folder / contender.name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.yaml"
    args = [
        f"--max-num-batched-tokens={CHUNK_TOKENS}",
        "--disable-uvicorn-access-log",
        f"--num-gpu-blocks-override={setup.cache_tokens // PAGE_TOKENS}",
        *contender.args,
    ]
    if contender.settings is not None:
        settings.write_text(contender.settings)
        args += ["--additional-config", json.dumps({"pd_scheduler": str(settings)})]
    engine = VllmEngine(
        setup.model,
        connector=None,
        name=contender.name,
        max_model_len=setup.max_model_len,
        args=args,
        env={"VLLM_SERVER_DEV_MODE": "1"},
        log_path=folder / "engine.log",
    )
    say(f"starting {contender.name} (log: {engine.log_path})")
    with engine:
        wait_all([engine])
        async with connect(engine.base_url) as client:
            engine_running = RunningEngine(contender, client, settings, Noise())
            await warm_up(engine_running, setup.max_model_len)
            yield engine_running


async def warm_up(engine: RunningEngine, longest: int) -> None:
    """Send requests of many lengths, so a scheduler that learns costs knows them."""
    random = Random(1)
    requests = [
        Waiting(id=f"warm-{n}", tokens=tokens, block_hashes=(), arrival_s=n * 0.1, max_tokens=1)
        for n, tokens in enumerate(random.choices(range(20, longest * 3 // 4), k=40))
    ]
    await engine.serve(requests, page_size=1)


def outcome(records: Sequence[RequestRecord], hit: float) -> Outcome:
    """Mean, 99th percentile and hit rate. All requests must have been answered."""
    times = [record.ttft_s for record in records]
    return Outcome(sum(times) / len(times), p99(times), hit)


def check_possible() -> None:
    """Raises BenchError if no engine can be started."""
    require(VLLM)
