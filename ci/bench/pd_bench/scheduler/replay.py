# SPDX-License-Identifier: Apache-2.0
"""One workload through one simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.base import MAX_OVERTAKEN
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA
from scheduler_plugins.qos.classes import ONLY, QosClass
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.engine import Served, SimulatedEngine

PAGE_SIZE = 16
ENGINE = CostModel(a=6e-5, b=6e-10, c=5e-3, d0=0.01, d1=5e-4, d2=1e-8, chunk_tokens=512)
"""An invented engine of about 15,000 tokens per second. Ratios count, not seconds."""


@dataclass(frozen=True)
class FixedCosts:
    """A cost model that is known from the start."""

    model: CostModel = ENGINE


class Setup(NamedTuple):
    """Settings of a queue's run."""

    policy: str = "srjf_calibrated"
    lambda_: float = DEFAULT_LAMBDA
    cache_tokens: int = PAGE_SIZE
    classes: Sequence[QosClass] = ONLY
    max_overtaken: int = MAX_OVERTAKEN
    page_size: int = PAGE_SIZE
    truth: CostModel = ENGINE

    def engine(self) -> SimulatedEngine:
        """An idle engine with an empty cache, which takes from an empty queue."""
        cache = LruBlocks(max(1, self.cache_tokens // self.page_size))
        queue = WaitingQueue(
            create(self.policy, self.lambda_),
            cache.hashes,
            page_size=self.page_size,
            costs=FixedCosts(self.truth),
            classes=self.classes,
            max_overtaken=self.max_overtaken,
        )
        return SimulatedEngine(queue, cache, self.truth, page_size=self.page_size)


class Outcome(NamedTuple):
    """The results; times in seconds."""

    mean_s: float
    p99_s: float
    hit: float  # fraction of prompt tokens that came from the cache

    @classmethod
    def of(cls, served: Sequence[Served]) -> Outcome:
        times = [request.ttft_s for request in served]
        cached = sum(request.cached_tokens for request in served)
        tokens = sum(request.request.tokens for request in served)
        return cls(sum(times) / len(times), p99(times), cached / tokens)


def p99(values: Sequence[float]) -> float:
    """The value that 99 % do not exceed."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def per_second(times_s: Sequence[float]) -> float:
    """Rate of answers with these times, for requests that all arrived at 0.

    The first tenth does not count. It finds an empty cache and, in a real engine, a server that still reads the other
    requests.
    """
    times_s = sorted(times_s)
    first = len(times_s) // 10
    return (len(times_s) - 1 - first) / (times_s[-1] - times_s[first])


def capacity(requests: Sequence[Waiting], setup: Setup) -> float:
    """Requests per second if all arrive at the beginning."""
    return per_second([request.first_token_s or 0.0 for request in setup.engine().run(requests)])
