# SPDX-License-Identifier: Apache-2.0
"""Two routers in front of the same engines, beside one."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from pd_bench.report import BenchError, Comparison, Say
from pd_bench.router.contenders import Ours
from pd_bench.router.rotations import cluster
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import play
from pd_bench.sample import Sample
from pd_connector.tools.launch import Port

BAR = 1.1
ONE, TWO, DEAF = "one router", "two routers", "two that do not hear each other"


def compare(
    contender: Ours, requests: Sequence[Sent], rounds: int, speed: float, say: Say
) -> list[Comparison]:
    """Mean TTFT with two routers that each get every second request, and with one router.

    The control is two routers that do not hear each other. It shows the value of the exchange.
    """
    means: dict[str, list[float]] = {TWO: [], ONE: [], DEAF: []}
    for number in range(rounds):
        for kind in tuple(means)[:: -1 if number % 2 else 1]:
            means[kind].append(mean := _mean_ttft(contender, kind, requests, speed))
            say(f"round {number + 1}, {kind}: mean TTFT {mean:.2f} s")
    samples = {kind: Sample(tuple(seconds)) for kind, seconds in means.items()}
    return [
        Comparison(f"TTFT mean, {kind}", {}, samples[kind], samples[ONE], "s", bar)
        for kind, bar in ((TWO, BAR), (DEAF, None))
    ]


def _mean_ttft(contender: Ours, kind: str, requests: Sequence[Sent], speed: float) -> float:
    with ExitStack() as stack:
        ports = [stack.enter_context(Port()) for _ in range(2 if kind == TWO else 0)]
        routers = [contender, contender] if kind == DEAF else in_touch(contender, ports)
        running = stack.enter_context(cluster(routers, speed))
        urls = [router.base_url for router in running.routers]
        outcomes = asyncio.run(play(urls, requests, speed))
    if failed := [outcome for outcome in outcomes if not outcome.served]:
        raise BenchError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    return statistics.mean(outcome.ttft_s for outcome in outcomes)


def in_touch(contender: Ours, ports: Sequence[Port]) -> list[Ours]:
    """One router per port. At its port a router publishes what it has sent. Without ports, there is one router
    alone."""
    addresses = [f"tcp://127.0.0.1:{int(port)}" for port in ports]
    routers = []
    for address in addresses:
        fellows = [other for other in addresses if other != address]
        args = ("--exchange", address, "--fellows", *fellows)
        routers.append(replace(contender, args=(*contender.args, *args)))
    return routers or [contender]
