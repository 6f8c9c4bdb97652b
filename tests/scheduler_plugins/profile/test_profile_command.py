# SPDX-License-Identifier: Apache-2.0
"""`pd-connector profile` against a server that takes exactly as long as a known cost model says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pd_connector.tools.cli.app import app
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.profile import Measurement, fit, load
from scheduler_plugins.profile import measure
from scheduler_plugins.profile.client import connect

web = pytest.importorskip("aiohttp.web", reason="aiohttp comes with any vLLM")

TRUTH = CostModel(a=8e-5, b=8e-8, c=8e-3, d0=1.2e-2, d1=2.4e-3)
"""Slow, beside what a busy machine adds."""
BLOCK = 16


class FakeVllm:
    """Answers as vLLM does, one prefill at a time, with a prefix cache."""

    def __init__(
        self,
        *,
        caches: bool = True,
        running: int = 0,
        key: str = "",
        speed: float = 1.0,
        together: int = 1,
    ) -> None:
        """`together`: tokens in an event, as vLLM's server sends them if it is late."""
        self.caches, self.running, self.key, self.speed = caches, running, key, speed
        self.together = together
        self.refuses = 0
        self._seen: set[tuple[int, ...]] = set()
        self._hits = 0
        self._decoding = 0

    def routes(self) -> Any:
        served = web.Application(client_max_size=1 << 24)
        served.router.add_get("/v1/models", self._models)
        served.router.add_get("/metrics", self._metrics)
        served.router.add_post("/tokenize", self._tokenize)
        served.router.add_post("/v1/completions", self._complete)
        return served

    async def _models(self, request: Any) -> Any:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "fake", "max_model_len": 1000}]})

    async def _metrics(self, request: Any) -> Any:
        labels = f'block_size="{BLOCK}",num_gpu_blocks="4000"'
        lines = [
            f"vllm:cache_config_info{{{labels}}} 1.0",
            f"vllm:num_requests_running {self.running}",
            "vllm:num_requests_waiting 0",
            f"vllm:prefix_cache_hits_total {self._hits}",
        ]
        return web.Response(text="\n".join(lines))

    async def _tokenize(self, request: Any) -> Any:
        return web.json_response({"tokens": list(range(50))})

    async def _complete(self, request: Any) -> Any:
        if self.refuses:
            return web.json_response({"error": "busy"}, status=self.refuses)
        body = await request.json()
        prompt = tuple(body["prompt"])
        cached = self._cached(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(TRUTH.prefill_s(len(prompt), cached) / self.speed)
        await response.write(_event(1))
        self._decoding += 1
        for token in range(2, body["max_tokens"] + 1):
            await asyncio.sleep(TRUTH.decode_step_s(self._decoding, 0) / self.speed)
            if token % self.together == 0 or token == body["max_tokens"]:
                await response.write(_event(token))
        self._decoding -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cached(self, prompt: tuple[int, ...]) -> int:
        if not self.caches:
            return 0
        found = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            if prompt[:end] in self._seen:
                found = end
            self._seen.add(prompt[:end])
        self._hits += found
        return found


def _event(tokens: int) -> bytes:
    told = {"choices": [{"text": "a"}], "usage": {"completion_tokens": tokens}}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


@pytest.fixture
def serve() -> Iterator[Any]:
    """Start fake engines; gives their URL."""
    loops = []

    def start(fake: FakeVllm) -> str:
        loop, ready, ports, runners = asyncio.new_event_loop(), threading.Event(), [], []

        async def run() -> None:
            runner = web.AppRunner(fake.routes())
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(site._server.sockets[0].getsockname()[1])
            ready.set()

        thread = threading.Thread(
            target=lambda: (loop.run_until_complete(run()), loop.run_forever()), daemon=True
        )
        thread.start()
        ready.wait()
        loops.append((loop, thread, runners[0]))
        return f"http://127.0.0.1:{ports[0]}"

    yield start
    for loop, thread, runner in loops:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def profile(url: str, out: Path, *more: str) -> Any:
    options = ["--longest-tokens", "600", "--most-batch", "4", "--repeats", "1", *more]
    return CliRunner().invoke(app, ["profile", "--url", url, "--out", str(out), *options])


@pytest.mark.quiet
def test_it_finds_what_things_cost_and_writes_what_the_scheduler_loads(
    serve, tmp_path, monkeypatch
) -> None:
    """Bounds are wide because a busy machine sleeps longer than it is told to."""
    monkeypatch.setattr(measure, "DECODED", 10)
    result = profile(serve(FakeVllm()), tmp_path / "cost.json")
    assert result.exit_code == 0, result.output
    model = load(tmp_path / "cost.json")
    assert model.prefill_s(600) == pytest.approx(TRUTH.prefill_s(600), rel=0.4)
    assert model.prefill_s(600, 528) == pytest.approx(TRUTH.prefill_s(600, 528), rel=0.5)
    assert model.decode_step_s(4, 0) == pytest.approx(TRUTH.decode_step_s(4, 0), rel=0.5)
    assert "not fitted" in result.output


def test_tokens_that_come_together_are_counted_one_by_one(serve) -> None:
    """Else a step of a busy server seems to take as long as all the steps whose tokens it sends together."""

    async def scenario() -> None:
        async with connect(serve(FakeVllm(together=4, speed=10.0))) as client:
            answer = await client.complete([1, 2, 3], 40)
        assert len(answer.token_s) == 40
        assert [len(list(same)) for _, same in groupby(answer.token_s)] == [1, 3, *[4] * 9]
        gaps = measure._gaps([answer])
        assert len(gaps) == 39
        assert sum(gaps) == pytest.approx(answer.token_s[-1] - answer.token_s[0])

    asyncio.run(scenario())


def test_a_step_takes_the_mean_time_without_a_pause() -> None:
    together = [0.0, 0.04] * 16
    assert measure.step_s(together) == pytest.approx(0.02)
    beside_others = [0.02, 0.02, 0.04] * 16
    assert measure.step_s(beside_others) == pytest.approx(0.0267, rel=0.05), "the median is 0.02"
    assert measure.step_s([0.02] * 31 + [5.0]) == pytest.approx(0.02)


def test_an_engine_without_a_prefix_cache_is_timed_without_cached_prefixes(serve, tmp_path) -> None:
    result = profile(serve(FakeVllm(caches=False, speed=10.0)), tmp_path / "cost.json")
    assert result.exit_code == 0, result.output
    assert "cached prefixes could not be timed" in result.output


def test_a_busy_engine_is_not_measured(serve, tmp_path) -> None:
    result = profile(serve(FakeVllm(running=3)), tmp_path / "cost.json")
    assert result.exit_code == 2
    assert "has 3 requests" in result.output
    assert not (tmp_path / "cost.json").exists()


def test_a_missing_key_is_named(serve, tmp_path) -> None:
    url = serve(FakeVllm(key="secret"))
    assert "--api-key" in profile(url, tmp_path / "cost.json").output


def test_nobody_there_is_named(tmp_path) -> None:
    result = profile("http://127.0.0.1:9", tmp_path / "cost.json")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "is this the base URL of a running vLLM" in said
    assert "ConnectionKey" not in said, "a line for people, and no object of aiohttp's"


def test_a_refusal_names_the_middleware(serve, tmp_path) -> None:
    fake = FakeVllm()
    fake.refuses = 429
    result = profile(serve(fake), tmp_path / "cost.json")
    assert result.exit_code == 2
    assert "--middleware" in result.output


def test_prompts_cut_into_chunks_pay_for_every_chunk() -> None:
    truth = CostModel(a=1e-4, c=0.05, d0=0.01, chunk_tokens=100)
    loads = [StepLoad.of([(0, tokens)]) for tokens in range(50, 2000, 60)]
    measured = [Measurement(one, truth.prefill_s(one.tokens)) for one in loads]
    found = fit(measured, 100)
    assert (found.a, found.c) == pytest.approx((truth.a, truth.c), rel=1e-3)
    assert found.error == pytest.approx(0, abs=1e-6)
    # Held to be one step each, they would not be understood.
    assert (fit(measured, 0).error or 0.0) > 0.01
