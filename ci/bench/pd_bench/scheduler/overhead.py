# SPDX-License-Identifier: Apache-2.0
"""The time of the queue on the engine's thread in every step."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_bench.scheduler.replay import ENGINE, PAGE_SIZE, FixedCosts, p99
from pd_bench.scheduler.workload import shared_profiles
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import BlockHash
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.sim.cache import LruBlocks

LIMITS_S = {100: 50e-6, 10_000: 1e-3}
_POSTS = 50


def compare(steps: int = 1000) -> list[Comparison]:
    """Time of a step with 100 and with 10,000 waiting requests, against the limits."""
    comparisons = []
    for waiting, limit_s in LIMITS_S.items():
        times = step_times(waiting, steps)
        for name, value, bar in (
            ("mean step", sum(times) / len(times), 1.0),
            ("p99 step", p99(times), None),
        ):
            comparisons.append(
                Comparison(
                    name,
                    {"waiting": waiting, "against": "allowed"},
                    Sample((value * 1e6,)),
                    Sample((limit_s * 1e6,)),
                    "us",
                    bar,
                )
            )
    return comparisons


def step_times(waiting: int, steps: int, policy: str = "srjf_calibrated") -> list[float]:
    """Seconds that the queue takes in each of `steps` steps.

    In a step one request arrives and one leaves. The leaving request's blocks are stored in a full cache, so other
    blocks are evicted. The queue gets all these changes. Prompts share profiles of 1,100 to 1,700 tokens, 50 each.
    """
    users = -(-(waiting + steps) // _POSTS)
    requests = shared_profiles(1, users=users, posts=_POSTS)
    cache = LruBlocks(10 * 1400 // PAGE_SIZE)
    queue = WaitingQueue(
        create(policy), cache.hashes, page_size=PAGE_SIZE, costs=FixedCosts(ENGINE)
    )
    events: list[Sequence[BlockHash]] = []
    evictions: list[None] = []
    cache.on_added = events.append
    cache.on_removed = lambda: evictions.append(None)
    for request in requests[:waiting]:
        queue.add(request)
    times = []
    for coming in requests[waiting:][:steps]:
        begun_s = perf_counter()
        queue.add(coming)
        queue.begin_scan()
        queue.peek()
        taken = queue.pop()
        spent_s = perf_counter() - begun_s
        cache.store(taken.block_hashes)
        begun_s = perf_counter()
        for _ in evictions:
            queue.prefix_index.removed()
        for blocks in events:
            queue.prefix_index.added(blocks)
        times.append(spent_s + perf_counter() - begun_s)
        events.clear()
        evictions.clear()
    return times
