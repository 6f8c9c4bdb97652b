# SPDX-License-Identifier: Apache-2.0
"""CPU time that the router takes for a request and for a streamed event, in one process and in two.

Real processes on this machine: mock engines that answer at once, the router, and clients that keep their connections.
CPU time is counted for all processes of the router, including the supervisor of the workers. So other programs change
little.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import aiohttp

from pd_bench.machine import cpu_seconds
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample

REQUEST_LIMIT_S = 1.5e-3
EVENT_LIMIT_S = 45e-6
TWO_TO_ONE = 1.15
"""The most CPU time of a request with two workers, as a multiple of the time with one worker."""
PROMPT_BYTES = 4096
CLIENTS = 16
SPEEDS = ("50", "2")
"""Speeds of the mock engines for prefill and decode. Prompts take no time, and events come one by one, some
milliseconds apart."""
EVENTS = 200
"""Events of a long stream."""
_ROUTER = (
    "-c",
    "import sys; from scheduler_plugins.commands import main; sys.exit(main())",
)
_BARE = ("-m", "pd_bench.scheduler.bare_proxy")
_RUNNING = r"(?<=Running on )http://\S+"
_START_S = 120.0


async def compare(requests: int, streams: int, rounds: int, say: Say) -> list[Comparison]:
    """Measure one worker, two, and a proxy that does nothing else, in turn.

    Args:
        requests: short requests of each round.
        streams: streams of `EVENTS` tokens in each round.
        say: gets each measurement.
    """
    # By number of workers; 0 is the bare proxy.
    per_request: dict[int, list[float]] = {0: [], 1: [], 2: []}
    per_event: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for number in range(1, rounds + 1):
        for workers in per_request:
            async with _router(workers) if workers else _bare() as (url, pid):
                request_s, event_s = await _costs(url, pid, requests, streams)
            per_request[workers].append(request_s)
            per_event[workers].append(event_s)
            name = f"{workers} worker(s)" if workers else "bare proxy"
            costs = f"{1e3 * request_s:.2f} ms a request, {1e6 * event_s:.0f} us an event"
            say(f"round {number} of {rounds}, {name}: {costs}")
    of_request = {n: Sample(tuple(times)).scaled(1e3) for n, times in per_request.items()}
    of_event = {n: Sample(tuple(times)).scaled(1e6) for n, times in per_event.items()}
    allowed = Sample((REQUEST_LIMIT_S * 1e3,)), Sample((EVENT_LIMIT_S * 1e6,))
    bare: dict[str, str | int | float] = {"against": "a bare proxy"}
    limit: dict[str, str | int | float] = {"against": "allowed"}
    request, event = "CPU of a request of 4 KB", "CPU of a streamed event"
    times = []
    for n in (1, 2):
        where: dict[str, str | int | float] = {"workers": n}
        times += [
            Comparison(request, where | limit, of_request[n], allowed[0], "ms", 1.0),
            Comparison(request, where | bare, of_request[n], of_request[0], "ms"),
            Comparison(event, where | limit, of_event[n], allowed[1], "us", 1.0),
            Comparison(event, where | bare, of_event[n], of_event[0], "us"),
        ]
    against: dict[str, str | int | float] = {"workers": 2, "against": "one worker"}
    times.append(Comparison(request, against, of_request[2], of_request[1], "ms", TWO_TO_ONE))
    return times


async def _costs(url: str, pid: int, requests: int, streams: int) -> tuple[float, float]:
    """CPU seconds of a request, and of a streamed event."""
    await _send(url, requests // 4, 1, stream=False)
    begun = _cpu_s(pid)
    await _send(url, requests, 1, stream=False)
    request_s = (_cpu_s(pid) - begun) / requests
    begun = _cpu_s(pid)
    await _send(url, streams, 1, stream=True)
    short_s = _cpu_s(pid) - begun
    begun = _cpu_s(pid)
    await _send(url, streams, EVENTS, stream=True)
    return request_s, (_cpu_s(pid) - begun - short_s) / streams / (EVENTS - 1)


@asynccontextmanager
async def _router(workers: int) -> AsyncIterator[tuple[str, int]]:
    """A router in front of two mock engines: its URL and its process."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(_mock(speed)) for speed in SPEEDS]
        sides = ["--prefill", urls[0], "--decode", urls[1], "--port", "0"]
        router = await stack.enter_async_context(
            _process(*_ROUTER, "serve", *sides, "--workers", str(workers))
        )
        yield await _url_in(router.stderr, _RUNNING), router.pid


@asynccontextmanager
async def _bare() -> AsyncIterator[tuple[str, int]]:
    """The bare proxy in front of the mock engine that decodes."""
    async with _mock(SPEEDS[1]) as url, _process(*_BARE, url) as proxy:
        yield await _url_in(proxy.stderr, _RUNNING), proxy.pid


@asynccontextmanager
async def _mock(speed: str) -> AsyncIterator[str]:
    async with _process(*_ROUTER, "mock", "--speed", speed) as mock:
        yield await _url_in(mock.stdout, r"http://\S+")


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=pipe, stderr=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _url_in(stream: asyncio.StreamReader | None, pattern: str) -> str:
    """The first part of a process's output that matches. Raises BenchError: it ended, or takes too long."""
    assert stream is not None
    try:
        async with asyncio.timeout(_START_S):
            while line := (await stream.readline()).decode():
                if match := re.search(pattern, line):
                    return match.group()
    except TimeoutError:
        pass
    raise BenchError("a router or a mock engine did not start: try `pd-router serve` by hand")


async def _send(url: str, requests: int, tokens: int, *, stream: bool) -> None:
    """Send `requests` requests from `CLIENTS` clients, each with one connection."""
    numbers = iter(range(requests))

    async def client() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for number in numbers:
                prompt = f"{number} {monotonic()} ".ljust(PROMPT_BYTES, "x")
                body = {"prompt": prompt, "max_tokens": tokens, "stream": stream}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    content = await response.read()
                    if response.status != 200:
                        raise BenchError(
                            f"the router answered {response.status}: {content[:200]!r}"
                        )

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its living children."""
    return cpu_seconds((pid, *_children(pid)))


def _children(pid: int) -> Sequence[int]:
    direct = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [descendant for child in map(int, direct) for descendant in (child, *_children(child))]
