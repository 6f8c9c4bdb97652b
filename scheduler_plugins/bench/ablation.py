# SPDX-License-Identifier: Apache-2.0
"""What each part of the scheduler is worth: the same workload with it, and with it switched off.

A part that does not change its figure by 5 % in any of these engines is not worth its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from scheduler_plugins.bench import order
from scheduler_plugins.bench.classes import CACHE_TOKENS, CLASSES, stream
from scheduler_plugins.bench.replay import ENGINE, Outcome, Setup, p99
from scheduler_plugins.queue.fair_share import FairShare
from scheduler_plugins.sim import prefill as simulated
from scheduler_plugins.sim.workload import merged

STEP_TOKENS = (512, 2048, 8192)
"""Prompt tokens that the engine computes in a step at most; vLLM's defaults are 2,048 and 8,192."""
FREE_LOAD = 3.0

_OFF: dict[str, Callable[[], Any]] = {
    "prefills that yield": lambda: patch.object(FairShare, "should_yield", lambda *_: False),
    "short steps": lambda: patch.object(FairShare, "wants_short_steps", lambda *_: False),
    "shared steps": lambda: patch.object(simulated, "tokens_before", lambda *_: 0),
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """One part is switched off inside the block."""
    with _OFF[part]():
        yield


def compare(seeds: Sequence[int], duration_s: float) -> list[Comparison]:
    """Each part with its figure: users' classes for two of them, the order of the queue for one."""
    found = []
    for tokens in STEP_TOKENS:
        truth = replace(ENGINE, chunk_tokens=tokens)

        def premium_p99(truth: Any = truth) -> list[float]:
            return [_premium_p99(truth, duration_s, seed) for seed in seeds]

        def mean_ttft(truth: Any = truth) -> list[float]:
            return [_ordered(truth, seed).mean_s for seed in seeds]

        for part, name, figure in (
            ("prefills that yield", "premium p99 TTFT", premium_p99),
            ("short steps", "premium p99 TTFT", premium_p99),
            ("shared steps", "mean TTFT at 0.9", mean_ttft),
        ):
            ours = figure()
            with without(part):
                theirs = figure()
            params: dict[str, str | int | float] = {"step tokens": tokens, "without": part}
            found.append(Comparison(name, params, Sample(tuple(ours)), Sample(tuple(theirs)), "s"))
    return found


def _premium_p99(truth: Any, duration_s: float, seed: int) -> float:
    """Premium users beside free ones who bring 3 times the capacity."""
    streams = (("premium", 0.05), ("standard", 0.15), ("free", FREE_LOAD))
    together = merged(
        *(
            stream(qos, load, duration_s, seed + 1000 * n, truth)
            for n, (qos, load) in enumerate(streams)
        )
    )
    engine = Setup(classes=CLASSES, cache_tokens=CACHE_TOKENS, truth=truth).engine()
    return p99([one.ttft_s for one in engine.run(together) if one.request.qos == "premium"])


def _ordered(truth: Any, seed: int) -> Outcome:
    """PrefillOnly's workload at 0.9 of what FCFS drains."""
    workload = order.Workload()
    return workload.run(workload.setup(order.OURS)._replace(truth=truth), 0.9, seed)
