# SPDX-License-Identifier: Apache-2.0
"""Prompts that share nothing, and the capacity and costs of real engines with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from pd_bench.scheduler.live import CHUNK_TOKENS, RunningEngine
from pd_bench.scheduler.replay import per_second
from pd_bench.scheduler.workload import lengths, poisson
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import fit
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.measure import Prober

MEDIAN_TOKENS = 400
LONGEST_TOKENS = 4 * MEDIAN_TOKENS
"""Longer prompts are cut. A CPU needs seconds for the longest prompts of `lengths`. One of them would be a tenth of the
work in 30 s, the window for shares."""
PAGE_SIZE = 16
CACHE_TOKENS = 40_000
HEADER = "x-customer-tier"
_CALIBRATION = 150


def stream(qos: str, rate: float, duration_s: float, seed: int) -> list[Waiting]:
    """Requests of one class for one token each, `rate` a second."""
    return poisson(_prompts(seed, max(2, round(rate * duration_s))), rate, seed, qos)


def tier(request: Waiting) -> dict[str, str]:
    """The header by which a route recognises the class."""
    return {HEADER: request.qos}


async def capacity(engine: RunningEngine, count: int = _CALIBRATION) -> float:
    """Requests of such a stream that the engine answers per second when all wait from the start."""
    records = await engine.serve(_prompts(0, count), page_size=PAGE_SIZE)
    return per_second([record.ttft_s for record in records])


async def costs(engine: RunningEngine) -> CostModel:
    """Costs of prompts on this otherwise idle engine, measured from outside."""
    await engine.drained()
    prober = Prober(engine.client, await engine.client.pool(), Random(3))
    tokens = [round(LONGEST_TOKENS / 1.5**n) for n in range(11)]
    measured = [
        measurement
        for n in tokens
        for _ in range(2)
        for measurement in await prober.prefills(n, ())
    ]
    return fit(measured, CHUNK_TOKENS)


def _prompts(seed: int, count: int) -> list[Waiting]:
    return [
        replace(tokens, tokens=min(tokens.tokens, LONGEST_TOKENS))
        for tokens in lengths(seed, count, median_tokens=MEDIAN_TOKENS)
    ]


def settings(classes: Sequence[str]) -> str:
    """The scheduler's file: these classes (each a YAML mapping), recognised by their header. The last class is for all
    other requests.
    """
    names = [text.split("name:")[1].split(",")[0].strip(" }") for text in classes]
    routes = [f'{{match: {{header: "{HEADER}: {name}"}}, qos: {name}}}' for name in names]
    routes.append(f"{{match: {{}}, qos: {names[-1]}}}")
    return "\n".join(
        [
            "scheduler:",
            "  qos_classes:",
            *(f"    - {line}" for line in classes),
            "request_router:",
            "  routes:",
            *(f"    - {line}" for line in routes),
        ]
    )
