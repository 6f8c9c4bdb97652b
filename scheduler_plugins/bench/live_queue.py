# SPDX-License-Identifier: Apache-2.0
"""The order of the queue in real engines: vLLM's own two, static SRJF, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scheduler_plugins.bench import order
from scheduler_plugins.bench.live import OURS, Contender, Findings, Say, Stage, outcome, running
from scheduler_plugins.bench.replay import Outcome, per_second
from scheduler_plugins.sim.workload import poisson, shared_profiles

FCFS, MINE = "fcfs", order.OURS
PROFILE_TOKENS = (1100, 1700)
"""A tenth of PrefillOnly's, as in simulation."""
POST_TOKENS = 15
CACHED_PROFILES = 14
BLOCK_TOKENS = 16
_SEED = 7

CONTENDERS = (
    Contender(FCFS),
    Contender("priority", ("--scheduling-policy", "priority"), by_length=True),
    Contender("srjf", OURS, "scheduler: {policy: srjf}"),
    Contender(MINE, OURS, "scheduler: {policy: srjf_calibrated}"),
)


async def compare(posts: int, loads: Sequence[float], folder: Path, say: Say) -> Findings:
    """PrefillOnly's shape, 20 users x `posts`, at `loads` times what vLLM's FCFS drains.

    One run of each contender and load; the arrivals are the same for all contenders.
    """
    requests = shared_profiles(
        _SEED, posts=posts, profile_tokens=PROFILE_TOKENS, post_tokens=POST_TOKENS
    )
    cache_tokens = CACHED_PROFILES * sum(PROFILE_TOKENS) // 2
    stage = Stage(cache_tokens, PROFILE_TOKENS[1] + 500, folder)
    rate, found, others_cores = 0.0, dict[tuple[str, float], Outcome](), 0.0
    for contender in CONTENDERS:
        async with running(contender, stage, say) as engine:
            if not rate:
                records = await engine.serve(requests, block_tokens=BLOCK_TOKENS)
                rate = per_second([one.ttft_s for one in records])
                say(f"capacity of {contender.name}: {rate:.1f} requests a second")
            for load in loads:
                timed = poisson(requests, load * rate, _SEED)
                records, hit = await engine.hit(timed, block_tokens=BLOCK_TOKENS)
                found[contender.name, load] = outcome(records, hit)
                say(_line(contender.name, load, found[contender.name, load]))
            others_cores = max(others_cores, engine.noise.cores())
    comparisons = [
        comparison
        for load in loads
        for baseline in order.BASELINES
        for comparison in order.comparisons(
            load, baseline, [found[MINE, load]], [found[baseline, load]]
        )
    ]
    return Findings(comparisons, [f"capacity: {rate:.1f} requests a second"], others_cores)


def _line(name: str, load: float, found: Outcome) -> str:
    return (
        f"  {name} at {load:g}: mean {found.mean_s:.3f} s, p99 {found.p99_s:.3f} s, "
        f"hit {found.hit:.2f}"
    )
