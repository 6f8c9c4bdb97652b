# SPDX-License-Identifier: Apache-2.0
"""What an engine loses by a pool whose store is slow, or does not answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from pd_bench.handoff.pair import Prompts
from pd_bench.pool.engines import MEMORY, PooledEngines, begun, first_token, until
from pd_bench.report import Comparison, Say
from pd_bench.sample import Sample
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import VllmEngine

BAR = 1.05
"""Mean time to the first token, beside an engine without a pool."""
LEARNT_FROM = 4
"""Requests after which an engine knows what its store is like."""
MEASURED = 8
"""Requests that come then."""
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "20 MB/s": {"bytes_per_s": 20e6},
    "500 ms a call": {"call_s": 0.5},
    "silent": {"silent": True},
}
VARIABLE = "PD_BENCH_SLOW_POOL"
_MODULE = "pd_bench.pool.slow_connector"
_SAVES_S = 60.0


class SlowEngines(PooledEngines):
    """An engine that fills a pool, one with a slow store for each fault, and one without a pool. Made by `running`."""

    starts_s = 240.0

    def __init__(self, model: Path, shm: Path, logs: Path) -> None:
        super().__init__(shm)
        self._shm, self._model, self._logs = shm, model, logs
        self.writer = self._engine("writer", pool={"memory": MEMORY})
        self.plain = self._engine("plain")
        self.slow = {
            fault: self._engine(
                f"slow {place}",
                "SlowPoolConnector",
                {"kv_connector_module_path": _MODULE},
                {VARIABLE: json.dumps(settings)},
                pool={"memory": MEMORY},
            )
            for place, (fault, settings) in enumerate(FAULTS.items())
        }
        self.all = (self.writer, self.plain, *self.slow.values())

    def _engine(
        self,
        name: str,
        connector: str = "PDConnector",
        more: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        **config: Any,
    ) -> VllmEngine:
        return VllmEngine(
            self._model,
            "kv_both",
            connector,
            {"audit": "off", **config},
            more,
            name=name,
            env={SHM_VARIABLE: str(self._shm), "VLLM_CPU_KVCACHE_SPACE": "1", **(env or {})},
            log_path=self._logs / f"{name.replace(' ', '-')}.log",
        )

    def measure(self, prompt_tokens: int, say: Say) -> list[Comparison]:
        """Seconds until the first token of prompts that the pool has, from the fifth request on, one after another.

        Raises:
            BenchError: the pool does not have a prompt.
        """
        prompts = Prompts(self.writer.client)
        times: dict[str, list[float]] = {name: [] for name in ("plain", *self.slow)}
        for number in range(LEARNT_FROM + MEASURED):
            prompt = prompts.make(prompt_tokens)
            body = {"model": self.writer.client.model(), "prompt": prompt, "temperature": 0}
            expected = self.chunks() + prompt_tokens // CHUNK_TOKENS
            first_token(self.writer.client, body)
            until(
                lambda expected=expected: self.chunks() >= expected,  # type: ignore[misc]
                _SAVES_S,
                "the writer has not saved its prompt",
            )
            engines = [("plain", self.plain), *self.slow.items()]
            seconds = {
                name: first_token(engine.client, body)[0]
                for name, engine in (engines if number % 2 else reversed(engines))
            }
            shown = ", ".join(f"{name} {took_s:.3f} s" for name, took_s in seconds.items())
            say(f"{'learning' if number < LEARNT_FROM else 'run'}: {shown}")
            if number >= LEARNT_FROM:
                for name, took_s in seconds.items():
                    times[name].append(took_s * 1e3)
        plain = Sample((mean(times["plain"]),))
        params = {"tokens": prompt_tokens, "requests": MEASURED}
        return [
            Comparison(
                f"first token, {fault}", params, Sample((mean(times[fault]),)), plain, "ms", BAR
            )
            for fault in self.slow
        ]


@contextlib.contextmanager
def running(console: Console) -> Iterator[SlowEngines]:
    """Engines, ready, with a pool of their own.

    Raises:
        PDConnectorError: vLLM is missing, or an engine did not start.
    """
    with begun(SlowEngines, console) as engines, contextlib.closing(engines):
        engines.wait(console)
        yield engines
