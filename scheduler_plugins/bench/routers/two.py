# SPDX-License-Identifier: Apache-2.0
"""Two routers in front of the same engines, beside one."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from scheduler_plugins.bench.routers.contenders import Contender
from scheduler_plugins.bench.routers.rotations import Say, cluster
from scheduler_plugins.bench.routers.scaled import Sent
from scheduler_plugins.bench.routers.sending import play

BAR = 1.1


def compare(
    contender: Contender, requests: Sequence[Sent], rounds: int, speed: float, say: Say
) -> list[Comparison]:
    """Mean TTFT with two routers, of which each gets every second request, and with one."""
    means: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for routers in (1, 2) if number % 2 else (2, 1):
            means[routers].append(mean := _mean_ttft(contender, requests, routers, speed))
            say(f"round {number + 1}, routers {routers}: mean TTFT {mean:.2f} s")
    two, one = (Sample(tuple(means[routers])) for routers in (2, 1))
    return [Comparison("TTFT mean, two routers", {}, two, one, "s", BAR)]


def _mean_ttft(contender: Contender, requests: Sequence[Sent], routers: int, speed: float) -> float:
    with cluster(contender, speed, routers) as running:
        urls = [one.base_url for one in running.routers]
        outcomes = asyncio.run(play(urls, requests, speed))
    if failed := [one for one in outcomes if not one.served]:
        raise BenchError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    return statistics.mean(one.ttft_s for one in outcomes)
