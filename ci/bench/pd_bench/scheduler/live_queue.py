# SPDX-License-Identifier: Apache-2.0
"""The order of the queue in real engines: vLLM's own two policies, static SRJF, and ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

from pd_bench.machine import Noise
from pd_bench.scheduler import order
from pd_bench.scheduler.live import (
    OURS,
    Contender,
    EngineSetup,
    Findings,
    Say,
    outcome,
    running,
)
from pd_bench.scheduler.replay import Outcome, per_second
from pd_bench.scheduler.runs import Runs
from pd_bench.scheduler.workload import poisson, shared_profiles

FCFS, MINE = "fcfs", order.OURS
PROFILE_TOKENS = (1100, 1700)
"""A tenth of PrefillOnly's, as in simulation."""
POST_TOKENS = 15
CACHED_PROFILES = 14
PAGE_SIZE = 16
_SEED = 7

CONTENDERS = (
    Contender(FCFS),
    Contender("priority", ("--scheduling-policy", "priority"), by_length=True),
    Contender("srjf", OURS, "scheduler: {policy: srjf}"),
    Contender(MINE, OURS, "scheduler: {policy: srjf_calibrated}"),
)


async def compare(
    posts: int, loads: Sequence[float], rounds: int, folder: Path, say: Say
) -> Findings:
    """PrefillOnly's shape, 20 users x `posts`, at `loads` times what vLLM's FCFS drains.

    All engines run from the start and take turns, so the machine's other load affects all of them. In each round all
    contenders get the same arrivals, which differ from earlier rounds. FCFS's drain rate is measured again each round.
    """
    cache_tokens = CACHED_PROFILES * sum(PROFILE_TOKENS) // 2
    setup = EngineSetup(cache_tokens, PROFILE_TOKENS[1] + 500, folder)
    found = defaultdict[tuple[str, float], list[Outcome]](list)
    rates = []
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running(one, setup, say)) for one in CONTENDERS]
        noise = Noise([pid for engine in engines for pid in engine.pids])
        runs = Runs(rounds * (1 + len(loads) * len(engines)), say)
        for seed in range(_SEED, _SEED + rounds):
            requests = shared_profiles(
                seed, posts=posts, profile_tokens=PROFILE_TOKENS, post_tokens=POST_TOKENS
            )
            async with runs.run(f"what {FCFS} drains", len(requests)) as count:
                drained = await engines[0].serve(requests, page_size=PAGE_SIZE, answered=count)
            rates.append(per_second([one.ttft_s for one in drained]))
            say(f"capacity of {CONTENDERS[0].name}: {rates[-1]:.1f} requests a second")
            for load, engine in product(loads, engines):
                timed = poisson(requests, load * rates[-1], seed)
                name = engine.contender.name
                async with runs.run(f"{name} at {load:g}", len(timed)) as count:
                    records, hit = await engine.hit(timed, page_size=PAGE_SIZE, answered=count)
                found[name, load].append(outcome(records, hit))
                say(_line(name, load, found[name, load][-1]))
        others_cores = noise.cores()
    comparisons = [
        comparison
        for load, baseline in product(loads, order.BASELINES)
        for comparison in order.comparisons(
            load, baseline, found[MINE, load], found[baseline, load]
        )
    ]
    drains = ", ".join(f"{rate:.1f}" for rate in rates)
    return Findings(comparisons, [f"capacity: {drains} requests a second"], others_cores)


def _line(name: str, load: float, found: Outcome) -> str:
    return (
        f"  {name} at {load:g}: mean {found.mean_s:.3f} s, p99 {found.p99_s:.3f} s, "
        f"hit {found.hit:.2f}"
    )
