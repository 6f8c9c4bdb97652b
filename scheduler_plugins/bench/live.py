# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, one after the other, that are sent the same requests at the same times."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.bench.machine import Noise
from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import VllmEngine
from pd_connector.tools.launch.engine import PAGE_TOKENS
from pd_connector.tools.launch.progress import wait_all
from scheduler_plugins.bench.replay import Outcome, p99
from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.profile.client import EngineClient, Timed, at, connect

OURS = ("--scheduler-cls", "scheduler_plugins.vllm.PrefixAwareScheduler")
MIDDLEWARE = ("--middleware", "scheduler_plugins.vllm.AdmissionMiddleware")
CHUNK_TOKENS = 512
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_AHEAD_S = 0.5
_IDLE_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """An engine with one way of scheduling.

    Args:
        args: of vLLM's server, after those that all contenders have.
        settings: content of the scheduler's YAML file; None for vLLM's own scheduler.
        by_length: requests carry `priority`: their length.
    """

    name: str
    args: Sequence[str] = ()
    settings: str | None = None
    by_length: bool = False


@dataclass(frozen=True)
class TestBed:
    """What all contenders of a comparison have in common.

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
    """What a comparison found."""

    comparisons: list[Comparison]
    notes: list[str]
    others_cores: float  # used by other programs meanwhile


class RequestRecord(NamedTuple):
    """One request and its answer; None if it was still waiting when the time was over."""

    request: Waiting
    answer: Timed | None
    late_s: float  # how long after its time it was sent

    @property
    def ttft_s(self) -> float:
        """From the time at which it was to be sent; infinite if it got no token."""
        if self.answer is None or self.answer.status != 200:
            return float("inf")
        return self.answer.ttft_s + self.late_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 where there is none."""
        if self.answer is None or len(self.answer.token_s) < 2:
            return 0.0
        times = self.answer.token_s
        return (times[-1] - times[0]) / (len(times) - 1)


@dataclass
class RunningEngine:
    """A started engine, idle, with a client."""

    contender: Contender
    client: EngineClient
    settings: Path
    pids: Sequence[int]
    noise: Noise
    """What programs other than this engine do meanwhile."""
    _pool: list[int] = field(default_factory=list)

    async def serve(
        self,
        requests: Sequence[Waiting],
        *,
        page_size: int,
        until_s: float | None = None,
        headers: Callable[[Waiting], dict[str, str]] | None = None,
    ) -> list[RequestRecord]:
        """Send requests at their times, to an empty prefix cache.

        Args:
            requests: by arrival.
            page_size: of their hashes.
            until_s: hang up on everything then, by the clock of the arrivals; None: never.
            headers: of each request.
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
            )

    async def hit(
        self, requests: Sequence[Waiting], **how: Any
    ) -> tuple[list[RequestRecord], float]:
        """As `serve`; and the part of all prompt tokens that came from the prefix cache."""
        before = await self.client.metrics()
        found = await self.serve(requests, **how)
        grown = (await self.client.metrics()).since(before)
        return found, grown.total(HITS) / max(1.0, grown.total(QUERIES))

    async def drained(self) -> None:
        """Wait until the engine has nothing to do."""
        end_s = time.monotonic() + _IDLE_S
        while time.monotonic() < end_s:
            samples = await self.client.metrics()
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            if not sum(samples.total(name) for name in names):
                return
            await asyncio.sleep(0.1)
        raise BenchError(f"{self.contender.name}: still busy after {_IDLE_S:.0f} s")

    async def _reset(self) -> None:
        answer = await self.client.post("/reset_prefix_cache")
        if answer != 200:
            raise BenchError(
                f"{self.contender.name}: /reset_prefix_cache was answered with {answer}; the engine "
                "needs VLLM_SERVER_DEV_MODE=1"
            )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cyclic collector here: with thousands of requests under way it stops for
    hundreds of milliseconds, which would count as the engine's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def send_all(
    client: EngineClient,
    requests: Sequence[Waiting],
    pool: Sequence[int],
    *,
    page_size: int,
    until_s: float | None = None,
    headers: Callable[[Waiting], dict[str, str]] | None = None,
    by_length: bool = False,
    salt: str | None = None,
) -> list[RequestRecord]:
    """Send requests at their times, and wait for the answers.

    Args:
        requests: by arrival.
        pool: token ids to make prompts of.
        page_size: of their hashes.
        until_s: hang up on everything then, by the clock of the arrivals; None: never.
        headers: of each request.
        by_length: each has the length of its prompt as vLLM's `priority`.
        salt: requests with another one, or none, share no KV with these.

    Raises:
        BenchError: one was answered with neither 200 nor 429.
    """
    prompts = [prompt_ids(one, page_size, pool) for one in requests]
    begun_s = time.perf_counter() + _AHEAD_S

    async def one(request: Waiting, prompt: list[int]) -> RequestRecord:
        due_s = begun_s + request.arrival_s
        await at(due_s)
        extra: dict[str, Any] = {"priority": len(prompt)} if by_length else {}
        if salt is not None:
            extra["cache_salt"] = salt
        given = headers(request) if headers else {}
        answer = await client.complete(prompt, request.max_tokens, headers=given, **extra)
        if answer.status not in (200, 429):
            raise BenchError(f"{client.url}: {answer.status}: {answer.error}")
        return RequestRecord(request, answer, answer.sent_s - due_s)

    pairs = zip(requests, prompts, strict=True)
    tasks = [asyncio.create_task(one(request, prompt)) for request, prompt in pairs]
    left_s = None if until_s is None else begun_s + until_s - time.perf_counter()
    done, pending = await asyncio.wait(tasks, timeout=left_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return [
        task.result() if task in done else RequestRecord(request, None, 0.0)
        for request, task in zip(requests, tasks, strict=True)
    ]


@asynccontextmanager
async def running(contender: Contender, stage: TestBed, say: Say) -> AsyncIterator[RunningEngine]:
    """Start one contender, warm it up, end it.

    Raises:
        StartError: it did not start; BenchError: it does not do what it should.
    """
    folder = stage.folder / contender.name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.yaml"
    args = [
        f"--max-num-batched-tokens={CHUNK_TOKENS}",
        "--disable-uvicorn-access-log",
        f"--num-gpu-blocks-override={stage.cache_tokens // PAGE_TOKENS}",
        *contender.args,
    ]
    if contender.settings is not None:
        settings.write_text(contender.settings)
        args += ["--additional-config", json.dumps({"pd_scheduler": str(settings)})]
    engine = VllmEngine(
        stage.model,
        connector=None,
        name=contender.name,
        max_model_len=stage.max_model_len,
        args=args,
        env={"VLLM_SERVER_DEV_MODE": "1"},
        log_path=folder / "engine.log",
    )
    say(f"starting {contender.name} (log: {engine.log_path})")
    with engine:
        wait_all([engine])
        async with connect(engine.base_url) as client:
            processes = engine.family.members() if engine.family else []
            pids = [process.pid for process in processes]
            found = RunningEngine(contender, client, settings, pids, Noise(pids))
            await _warm_up(found, stage.max_model_len)
            yield found


async def _warm_up(engine: RunningEngine, longest: int) -> None:
    """Requests of many lengths, so that a scheduler that learns costs knows them."""
    random = Random(1)
    requests = [
        Waiting(id=f"warm-{n}", tokens=tokens, block_hashes=(), arrival_s=n * 0.1, max_tokens=1)
        for n, tokens in enumerate(random.choices(range(20, longest * 3 // 4), k=40))
    ]
    await engine.serve(requests, page_size=1)


def prompt_ids(request: Waiting, page_size: int, pool: Sequence[int]) -> list[int]:
    """The request's prompt: equal hashes give equal tokens, what is after them is its own."""
    tokens = list[int]()
    for block in request.block_hashes:
        tokens += _block(block, page_size, pool)
    own = Random(f"own {request.id}").choices(pool, k=max(0, request.tokens - len(tokens)))
    return [*tokens, *own][: request.tokens]


def _block(block: BlockHash, page_size: int, pool: Sequence[int]) -> list[int]:
    return Random(f"block {block}").choices(pool, k=page_size)


def outcome(records: Sequence[RequestRecord], hit: float) -> Outcome:
    """Mean, 99th percentile and hit rate of requests that were all answered."""
    times = [one.ttft_s for one in records]
    return Outcome(sum(times) / len(times), p99(times), hit)


def check_possible() -> None:
    """Raises BenchError where no engine can be started."""
    if find_spec("vllm") is None:
        raise BenchError("vllm is not installed: use the environment that has it")
