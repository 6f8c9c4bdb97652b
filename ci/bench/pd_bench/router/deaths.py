# SPDX-License-Identifier: Apache-2.0
"""Engines killed under load, to find lost requests, and tokens missing or sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pd_bench.report import Say
from pd_bench.router.contenders import Contender
from pd_bench.router.mocks import MockProcess
from pd_bench.router.rotations import cluster
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import Outcome, play
from pd_connector.tools.launch.client import Samples

DOWN_S = 5.0
"""Time from an engine's death to its restart."""
_RESUMED = "pd_router:resumed_streams_total"


@dataclass(frozen=True)
class Deaths:
    """The result of the run."""

    requests: int
    killed: int
    lost: Sequence[Outcome]
    miscounted: int  # answers with too few or too many tokens
    resumed: float  # streams that went on at another engine


def measure(
    contender: Contender, requests: Sequence[Sent], speed: float, every_s: float, say: Say
) -> Deaths:
    """Play the requests, and kill an engine every `every_s` real seconds. Prefill and decode engines die in turn, never
    two at once."""
    with cluster([contender], speed) as running:
        before = running.router.metrics()
        killed, outcomes = asyncio.run(
            _play(
                running.router.base_url,
                (running.prefill, running.decode),
                requests,
                speed,
                every_s,
                say,
            )
        )
        grown: Samples = running.router.metrics().since(before)
    lost = [outcome for outcome in outcomes if not outcome.served]
    miscounted = sum(
        outcome.tokens != request.max_tokens
        for outcome, request in zip(outcomes, requests, strict=True)
        if outcome.served
    )
    return Deaths(len(requests), killed, lost, miscounted, grown.total(_RESUMED))


async def _play(
    url: str,
    sides: Sequence[Sequence[MockProcess]],
    requests: Sequence[Sent],
    speed: float,
    every_s: float,
    say: Say,
) -> tuple[int, list[Outcome]]:
    killing = asyncio.create_task(_kill(sides, every_s, say))
    outcomes = await play([url], requests, speed)
    killing.cancel()
    (killed,) = await asyncio.gather(killing)
    return killed, outcomes


async def _kill(sides: Sequence[Sequence[MockProcess]], every_s: float, say: Say) -> int:
    """Kill engines until cancelled. Returns the number of deaths."""
    random, killed = Random(0), 0
    try:
        while True:
            await asyncio.sleep(every_s - DOWN_S)
            engine = random.choice(sides[killed % 2])
            await asyncio.to_thread(engine.kill)
            killed += 1
            say(f"killed {engine.name}")
            await asyncio.sleep(DOWN_S)
            await asyncio.to_thread(engine.start)
    except asyncio.CancelledError:
        return killed
