# SPDX-License-Identifier: Apache-2.0
"""The CPU time of requests at a router that moves roles, beside a router that knows nothing of role policies.

Both routers run in front of the same two mock engines, and are asked in turn. CPU time (user and system) is the router's
own, so what other programs do changes little.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import aiohttp

from pd_bench.machine import cpu_seconds
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.router import scaled
from pd_bench.router.mocks import MockProcess
from pd_bench.sample import Sample
from pd_connector.tools.launch import RouterProcess, stop_services, wait_all
from pd_connector.tools.launch.service import log_folder
from scheduler_plugins.cost.profile import save

BAR = 1.03
"""The most CPU time with roles, as a multiple of the time without."""
PER = 10_000
"""CPU time is reported for this number of requests."""
PROMPT_BYTES = 4096
CLIENTS = 16
SPEED = 50.0
"""Speed of the mock engines, so that prompts take no time."""
_UNKNOWING = """
import sys
from scheduler_plugins.router.__main__ import main
from scheduler_plugins.router.engines.observed import SharedHistory
for name in ("arrived", "prefilled", "answered", "refused", "overflowed"):
    setattr(SharedHistory, name, lambda *event: None)
sys.exit(main())
"""
_NUMBERS = count()


class UnknowingRouter(RouterProcess):
    """A router without a role policy that notes no request for one."""

    def command(self) -> list[str]:
        usual = super().command()
        return [sys.executable, "-c", _UNKNOWING, *usual[usual.index("--host") :]]


def compare(requests: int, rounds: int, say: Say) -> Comparison:
    """Measure both routers in turn.

    Args:
        requests: of each round and router.
        say: gets each round.

    Raises:
        PDConnectorError: a process does not start, or a request failed.
    """
    with _routers() as (ours, without):
        for side in (ours, without):
            asyncio.run(_send(side.base_url, requests // 4))
        took: dict[RouterProcess, list[float]] = {ours: [], without: []}
        for number in range(1, rounds + 1):
            for side, seconds in took.items():
                begun_s = cpu_s(side)
                asyncio.run(_send(side.base_url, requests))
                seconds.append((cpu_s(side) - begun_s) / requests * PER)
            last = ", ".join(f"{side.name} {seconds[-1]:.2f} s" for side, seconds in took.items())
            say(f"round {number} of {rounds}, CPU time of {PER:,} requests: {last}")
    samples = [Sample(tuple(seconds)) for seconds in took.values()]
    params: dict[str, str | int | float] = {"against": "without roles"}
    return Comparison(f"CPU of {PER:,} requests", params, samples[0], samples[1], "s", BAR)


@contextmanager
def _routers() -> Iterator[tuple[RouterProcess, RouterProcess]]:
    logs = log_folder()
    save(costs := logs / "costs.json", scaled.whole_costs())
    engines = [MockProcess(f"engine{n}", costs, SPEED, logs / f"engine{n}.log") for n in range(2)]
    urls = [engine.base_url for engine in engines]
    sides = urls[:1], urls[1:]
    ours = RouterProcess(
        *sides, name="with roles", args=["--roles", "pressure"], log_path=logs / "ours.log"
    )
    without = UnknowingRouter(*sides, name="without roles", log_path=logs / "without.log")
    try:
        for engine in engines:
            engine.start()
        wait_all(engines)
        yield ours.start().wait_ready(), without.start().wait_ready()
    finally:
        stop_services([ours, without])
        stop_services(engines)


async def _send(url: str, requests: int) -> None:
    """Send new prompts from `CLIENTS` clients, each with one connection."""
    left = iter(range(requests))

    async def client() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for _ in left:
                prompt = f"{next(_NUMBERS)} ".ljust(PROMPT_BYTES, "x")
                body = {"model": "mock", "prompt": prompt, "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    raise BenchError(f"the router answered {answer.status}: {text[:200]}")

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def cpu_s(router: RouterProcess) -> float:
    """CPU time of a router's process until now, in seconds."""
    assert router.family is not None
    return cpu_seconds((router.family.pid,))
