# SPDX-License-Identifier: Apache-2.0
"""What each part of the scheduler is worth: the same workload with it, and with it switched off.

A part that does not change its figure by 5 % in any of these engines is not worth its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from scheduler_plugins.bench import order
from scheduler_plugins.bench.class_mix import MADE, ClassMix
from scheduler_plugins.bench.replay import ENGINE
from scheduler_plugins.queue.fair_share import FairShare
from scheduler_plugins.queue.guards import Guards
from scheduler_plugins.sim import prefill as simulated

STEP_TOKENS = (512, 2048, 8192)
"""Prompt tokens that the engine computes in a step at most; vLLM's defaults are 2,048 and 8,192."""
_CLASS_PARTS = ("prefills that yield", "short steps", "guards")
_FIGURES = (
    ("premium p99 TTFT", "p99_s", "s"),
    ("premium mean TTFT", "mean_s", "s"),
    ("all classes", "tokens_per_s", "tokens/s"),
)

_OFF: dict[str, Callable[[], Any]] = {
    "prefills that yield": lambda: patch.object(FairShare, "should_yield", lambda *_: False),
    "short steps": lambda: patch.object(FairShare, "wants_short_steps", lambda *_: False),
    "guards": lambda: patch.object(Guards, "add", lambda *_: None),
    "shared steps": lambda: patch.object(simulated, "tokens_before", lambda *_: 0),
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """One part is switched off inside the block."""
    with _OFF[part]():
        yield


def compare(
    seeds: Sequence[int], duration_s: float, traces: Sequence[Path] = ()
) -> list[Comparison]:
    """Each part with its figures: users' classes for three of them, the order of the queue for one.

    Args:
        traces: recorded lengths for the classes, besides those that are made.
    """
    mixes = [ClassMix(MADE), *map(ClassMix.of_trace, traces)]
    return [*_of_classes(seeds, duration_s, mixes), *_of_order(seeds)]


def _of_classes(
    seeds: Sequence[int], duration_s: float, mixes: Sequence[ClassMix]
) -> Iterator[Comparison]:
    for mix in mixes:
        for tokens in STEP_TOKENS:
            truth = replace(ENGINE, chunk_tokens=tokens)
            ours = mix.run(truth, duration_s, seeds)
            for part in _CLASS_PARTS:
                with without(part):
                    theirs = mix.run(truth, duration_s, seeds)
                for name, field, unit in _FIGURES:
                    yield Comparison(
                        name,
                        {"lengths": mix.name, "step tokens": tokens, "without": part},
                        Sample(tuple(getattr(one, field) for one in ours)),
                        Sample(tuple(getattr(one, field) for one in theirs)),
                        unit,
                        more_is_better=field == "tokens_per_s",
                    )


def _of_order(seeds: Sequence[int]) -> Iterator[Comparison]:
    """PrefillOnly's workload at 0.9 of what FCFS drains."""
    workload = order.Workload()
    for tokens in STEP_TOKENS:
        setup = workload.setup(order.OURS)._replace(truth=replace(ENGINE, chunk_tokens=tokens))
        ours = [workload.run(setup, 0.9, seed).mean_s for seed in seeds]
        with without("shared steps"):
            theirs = [workload.run(setup, 0.9, seed).mean_s for seed in seeds]
        yield Comparison(
            "mean TTFT at 0.9",
            {"lengths": "PrefillOnly", "step tokens": tokens, "without": "shared steps"},
            Sample(tuple(ours)),
            Sample(tuple(theirs)),
            "s",
        )
