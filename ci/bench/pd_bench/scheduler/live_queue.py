# SPDX-License-Identifier: Apache-2.0
"""The order of the queue in real engines: vLLM's own two policies, static SRJF, and ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pd_bench.machine import Noise
from pd_bench.report import Say
from pd_bench.scheduler import order
from pd_bench.scheduler.live import (
    OURS,
    Contender,
    EngineSetup,
    Findings,
    RunningEngine,
    outcome,
    running,
)
from pd_bench.scheduler.replay import Outcome, per_second
from pd_bench.scheduler.runs import Runs
from pd_bench.scheduler.sending import RequestRecord
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


Serve = Callable[..., Awaitable[tuple[list[RequestRecord], float]]]
"""Serves requests on an engine, as `RunningEngine.hit`."""


class Turns(NamedTuple):
    """The outcomes of engines that took turns."""

    outcomes: Mapping[tuple[str, float], list[Outcome]]  # by engine and load, one a round
    capacity: str  # of the first engine in each round, for the report
    others_cores: float  # cores that other programs used meanwhile


async def compare(
    posts: int, loads: Sequence[float], rounds: int, folder: Path, say: Say
) -> Findings:
    """PrefillOnly's shape, 20 users x `posts`, at `loads` times what vLLM's FCFS drains.

    All engines run from the start and take turns, so the machine's other load affects all of them. In each round all
    contenders get the same arrivals, which differ from earlier rounds. FCFS's drain rate is measured again each round.
    """
    cache_tokens = CACHED_PROFILES * sum(PROFILE_TOKENS) // 2
    setup = EngineSetup(cache_tokens, PROFILE_TOKENS[1] + 500, folder)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(running(contender, setup, say))
            for contender in CONTENDERS
        ]
        turns = await take_turns(engines, RunningEngine.hit, posts, loads, rounds, say)
    comparisons = [
        comparison
        for load, baseline in product(loads, order.BASELINES)
        for comparison in order.comparisons(
            load, baseline, turns.outcomes[MINE, load], turns.outcomes[baseline, load]
        )
    ]
    return Findings(comparisons, [turns.capacity], turns.others_cores)


async def take_turns(
    engines: Sequence[RunningEngine],
    serve: Serve,
    posts: int,
    loads: Sequence[float],
    rounds: int,
    say: Say,
) -> Turns:
    """Serve the same arrivals on each running engine in turn. The first engine orders by arrival: it sets the capacity.

    Args:
        serve: serves requests on an engine. Returns their records, and the fraction of prompt tokens that were cached.
        loads: multiples of the capacity.
    """
    outcomes = defaultdict[tuple[str, float], list[Outcome]](list)
    rates = []
    noise = Noise()
    runs = Runs(rounds * (1 + len(loads) * len(engines)), say)
    for seed in range(_SEED, _SEED + rounds):
        requests = shared_profiles(
            seed, posts=posts, profile_tokens=PROFILE_TOKENS, post_tokens=POST_TOKENS
        )
        async with runs.run(f"what {FCFS} drains", len(requests)) as count:
            drained = await engines[0].serve(requests, page_size=PAGE_SIZE, answered=count)
        rates.append(per_second([record.ttft_s for record in drained]))
        say(f"capacity of {FCFS}: {rates[-1]:.1f} requests a second")
        for load, engine in product(loads, engines):
            timed = poisson(requests, load * rates[-1], seed)
            name = engine.contender.name
            async with runs.run(f"{name} at {load:g}", len(timed)) as count:
                records, hit = await serve(engine, timed, page_size=PAGE_SIZE, answered=count)
            result = outcome(records, hit)
            outcomes[name, load].append(result)
            say(
                f"  {name} at {load:g}: mean {result.mean_s:.3f} s, p99 {result.p99_s:.3f} s, "
                f"hit {result.hit:.2f}"
            )
    drains = ", ".join(f"{rate:.1f}" for rate in rates)
    return Turns(outcomes, f"capacity: {drains} requests a second", noise.cores())
