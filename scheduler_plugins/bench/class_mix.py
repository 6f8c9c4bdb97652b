# SPDX-License-Identifier: Apache-2.0
"""Premium users beside free ones who bring 3 times the capacity, with lengths that are made or recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from scheduler_plugins.bench import replay
from scheduler_plugins.bench.classes import CACHE_TOKENS, CLASSES
from scheduler_plugins.bench.replay import Setup, capacity, p99
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import ONLY
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.workload import lengths, poisson

LOADS = {"premium": 0.05, "standard": 0.15, "free": 3.0}
"""What each class brings, as a part of what the engine can do."""
MADE = "log-normal"
_TRACE_REQUESTS = 3000
_CALIBRATION = 2000


class Figures(NamedTuple):
    """What came out of one run; times to the first token of premium users' requests."""

    p99_s: float
    mean_s: float
    tokens_per_s: float  # of all classes together


@dataclass(frozen=True)
class ClassMix:
    """Requests that come at random, each of a class at random. They share no prefix, so that the
    cache keeps only what was preempted."""

    name: str
    recorded: Sequence[Waiting] = ()
    """Prompts to draw from; empty: lengths are made."""

    @classmethod
    def of_trace(cls, path: Path) -> ClassMix:
        """With the lengths of a trace. Raises TraceError."""
        return cls(path.stem, _apart(trace.load(path, _TRACE_REQUESTS)))

    def run(self, truth: CostModel, duration_s: float, seeds: Sequence[int]) -> list[Figures]:
        """One run for each seed.

        Args:
            truth: how long the engine's steps take.
            duration_s: of the arrivals where lengths are made; a trace is used up once.
        """
        page_size = trace.PAGE_SIZE if self.recorded else replay.PAGE_SIZE
        setup = Setup(classes=CLASSES, cache_tokens=CACHE_TOKENS, truth=truth, page_size=page_size)
        at_once = [
            replace(one, arrival_s=0.0, max_tokens=1)
            for one in self.recorded or lengths(0, _CALIBRATION)
        ]
        most = capacity(at_once, setup._replace(policy="fcfs", classes=ONLY))
        rate = sum(LOADS.values()) * most
        return [_figures(setup, self._stream(rate, duration_s, seed)) for seed in seeds]

    def _stream(self, rate: float, duration_s: float, seed: int) -> list[Waiting]:
        random = Random(seed)
        if self.recorded:
            requests = random.sample(self.recorded, len(self.recorded))
        else:
            requests = lengths(seed, round(rate * duration_s))
        names = random.choices(list(LOADS), weights=list(LOADS.values()), k=len(requests))
        coming = poisson([replace(one, max_tokens=1) for one in requests], rate, seed)
        return [replace(one, qos=qos) for one, qos in zip(coming, names, strict=True)]


def _figures(setup: Setup, requests: Sequence[Waiting]) -> Figures:
    served = setup.engine().run(requests)
    premium = [one.ttft_s for one in served if one.request.qos == "premium"]
    last_s = max(one.first_token_s or 0.0 for one in served)
    tokens = sum(one.request.tokens for one in served)
    return Figures(p99(premium), sum(premium) / len(premium), tokens / last_s)


def _apart(requests: Sequence[Waiting]) -> list[Waiting]:
    """The same prompts with blocks of their own."""
    found, first = [], 0
    for one in requests:
        stop = first + one.tokens // trace.PAGE_SIZE
        found.append(replace(one, block_hashes=range(first, stop)))
        first = stop
    return found
