# SPDX-License-Identifier: Apache-2.0
"""Sends a recorded workload to running engines."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.table import Table

from pd_bench.report import BenchError, Say
from pd_bench.scheduler.live import HITS, QUERIES
from pd_bench.scheduler.replay import p99
from pd_bench.scheduler.sending import RequestRecord, send_all
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.profile.client import EngineClient, connect
from scheduler_plugins.sim import trace


class Scale(NamedTuple):
    """The fit of a trace to an engine."""

    length: float  # factor of prompts and answers
    rate: float | None  # requests per second; None: as recorded
    priority: bool  # requests carry their length as vLLM's priority


class Replayed(NamedTuple):
    """The result of one engine; times in seconds."""

    url: str
    statuses: Counter[int]
    mean_s: float  # TTFT
    p99_s: float
    tpot_s: float  # mean over answers with more than one token
    hit: float  # part of the prompt tokens that came from the prefix cache


def scaled(requests: Sequence[Waiting], scale: Scale, longest_tokens: int) -> list[Waiting]:
    """The trace with scaled lengths and rate. No request is longer than the engine allows.

    Raises:
        BenchError: the longest request does not fit.
    """
    shortened = []
    for request in requests:
        tokens = max(1, round(request.tokens * scale.length))
        answer = max(1, round(request.max_tokens * scale.length))
        shortened.append(replace(request, tokens=tokens, max_tokens=answer))
    worst = max(request.tokens + request.max_tokens for request in shortened)
    if worst > longest_tokens:
        fits = scale.length * longest_tokens / worst
        raise BenchError(
            f"the longest request has {worst:,} tokens, the engine takes {longest_tokens:,}: "
            f"--scale {fits:.3g} fits, at most"
        )
    if scale.rate is None:
        return shortened
    return trace.at_rate(shortened, scale.rate, seed=0)


async def replay(
    urls: Sequence[str], requests: Sequence[Waiting], scale: Scale, api_key: str | None, say: Say
) -> list[Replayed]:
    """Send the same trace to each engine, one after the other."""
    replayed = []
    for url in urls:
        async with connect(url, api_key) as client:
            timed = scaled(requests, scale, client.longest_tokens)
            say(
                f"{url}: {len(timed)} requests in {timed[-1].arrival_s - timed[0].arrival_s:.0f} s, "
                f"{sum(request.tokens for request in timed) / len(timed):,.0f} tokens on average"
            )
            replayed.append(await _replay(client, timed, scale))
    return replayed


async def _replay(client: EngineClient, requests: Sequence[Waiting], scale: Scale) -> Replayed:
    pool = await client.pool()
    before = await client.metrics()
    begun_s = requests[0].arrival_s
    records = await send_all(
        client,
        [replace(request, arrival_s=request.arrival_s - begun_s) for request in requests],
        pool,
        page_size=max(1, round(trace.PAGE_SIZE * scale.length)),
        by_length=scale.priority,
        # The engine may have seen this trace before, so its cache is reset.
        salt=uuid.uuid4().hex,
    )
    await asyncio.sleep(0.2)
    grown = (await client.metrics()).since(before)
    return summary(client.url, records, grown.total(HITS) / max(1.0, grown.total(QUERIES)))


def summary(url: str, records: Sequence[RequestRecord], hit: float) -> Replayed:
    """Means over the requests answered with 200.

    Raises:
        BenchError: no request was.
    """
    statuses = Counter(record.answer.status for record in records if record.answer)
    times = [record.ttft_s for record in records if record.answer and record.answer.status == 200]
    if not times:
        raise BenchError(f"{url}: no request was answered; statuses: {dict(statuses)}")
    tpots = [record.tpot_s for record in records if record.tpot_s > 0]
    tpot_s = sum(tpots) / len(tpots) if tpots else 0.0
    return Replayed(url, statuses, sum(times) / len(times), p99(times), tpot_s, hit)


def table(replays: Sequence[Replayed]) -> Table:
    """A line for each engine; ratios are to the last one."""
    drawn = Table("engine", "answers", "mean TTFT s", "p99 s", "TPOT ms", "hit", "mean / last")
    for replayed in replays:
        answers = ", ".join(f"{count} x {status}" for status, count in replayed.statuses.items())
        drawn.add_row(
            replayed.url,
            answers,
            f"{replayed.mean_s:.3f}",
            f"{replayed.p99_s:.3f}",
            f"{replayed.tpot_s * 1e3:.1f}",
            f"{replayed.hit:.2f}",
            f"{replayed.mean_s / replays[-1].mean_s:.2f}",
        )
    return drawn
