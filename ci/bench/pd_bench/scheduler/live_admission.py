# SPDX-License-Identifier: Apache-2.0
"""Admission in real engines at twice the capacity: with the middleware's 429, and with every request admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pd_bench.report import Comparison, Say
from pd_bench.sample import Sample
from pd_bench.scheduler import live_traffic as traffic
from pd_bench.scheduler.live import (
    MIDDLEWARE,
    OURS,
    Contender,
    EngineSetup,
    Findings,
    RunningEngine,
    running,
)
from pd_bench.scheduler.overload import OVERLOAD, compared
from pd_bench.scheduler.sending import RequestRecord
from pd_bench.scheduler.workload import poisson
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import Slo

_SEED = 5
_BLOCK = traffic.PAGE_SIZE
_RELOADED_S = 2.5
"""Time after which both processes have certainly read a changed file."""
_SYSTEM_TOKENS = 1920
_OWN_TOKENS = 64
_ANSWER_TOKENS = 64
_TPOT_MS = 40.0
LEARNING = 1 / 6
"""Fraction of each run that does not count, on either side, because margins are still learnt."""


class PromisedRequests(NamedTuple):
    """A promise, and requests at twice the rate at which it can be kept."""

    name: str
    slo: Slo
    requests: Sequence[Waiting]


async def compare(duration_s: float, promised: Sequence[str], folder: Path, say: Say) -> Findings:
    """The same engine and requests with a promise and without; a run of `duration_s` each.

    Args:
        promised: `ttft` (prompts that share nothing, one token) and `tpot` (a long prompt that all
            share, 64 tokens).
    """
    setup = EngineSetup(traffic.CACHE_TOKENS, _SYSTEM_TOKENS + 500, folder)
    contender = Contender("ours", (*OURS, *MIDDLEWARE), _settings(Slo()))
    comparisons = list[Comparison]()
    async with running(contender, setup, say) as engine:
        for name in promised:
            promise = await _promise(name, engine, duration_s)
            controlled = await _run(engine, promise, promise.slo, duration_s)
            say(_line(promise, controlled, duration_s))
            free = await _run(engine, promise, Slo(), duration_s)
            say(_line(promise, free, duration_s))
            comparisons += _comparisons(promise, controlled, free, duration_s)
        others_cores = engine.noise.cores()
    note = f"the first {LEARNING * duration_s:.0f} s of each run do not count: margins are learnt"
    return Findings(comparisons, [note], others_cores)


async def _promise(name: str, engine: RunningEngine, duration_s: float) -> PromisedRequests:
    if name == "ttft":
        rate = OVERLOAD * await traffic.capacity(engine)
        # A dozen average prefills, as in the simulation.
        slo = Slo(ttft_ms=round(12e3 * OVERLOAD / rate))
        return PromisedRequests(name, slo, traffic.stream("", rate, duration_s, _SEED))
    rate = OVERLOAD * await _decode_capacity(engine)
    requests = _conversations(round(rate * duration_s))
    return PromisedRequests(
        name, Slo(ttft_ms=5000, tpot_ms=_TPOT_MS), poisson(requests, rate, _SEED)
    )


async def _decode_capacity(engine: RunningEngine) -> float:
    """Answers per second with the most requests at once that keep the promised time per token."""
    batch, best = 1, 0.0
    while batch <= 64:
        records = await engine.serve(_conversations(batch), page_size=_BLOCK)
        records = await engine.serve(_conversations(batch), page_size=_BLOCK)
        tpot_s = max(record.tpot_s for record in records)
        if tpot_s * 1e3 > _TPOT_MS:
            break
        best = batch / (_ANSWER_TOKENS * tpot_s)
        batch *= 2
    return best or 1e3 / _TPOT_MS / _ANSWER_TOKENS


def _conversations(count: int) -> list[Waiting]:
    shared = [("system", n) for n in range(_SYSTEM_TOKENS // _BLOCK)]
    return [
        Waiting(
            id=f"talk-{n}",
            tokens=_SYSTEM_TOKENS + _OWN_TOKENS,
            block_hashes=shared,
            arrival_s=0.0,
            max_tokens=_ANSWER_TOKENS,
        )
        for n in range(count)
    ]


async def _run(
    engine: RunningEngine, promise: PromisedRequests, slo: Slo, duration_s: float
) -> list[RequestRecord]:
    engine.settings.write_text(_settings(slo))
    await asyncio.sleep(_RELOADED_S)
    requests = [replace(request, qos="default") for request in promise.requests]
    return await engine.serve(requests, page_size=_BLOCK, until_s=duration_s, headers=traffic.tier)


def _settings(slo: Slo) -> str:
    promised = [
        f"{name}: {value}"
        for name, value in (("ttft_ms", slo.ttft_ms), ("tpot_ms", slo.tpot_ms))
        if value is not None
    ]
    text = f", slo: {{{', '.join(promised)}}}" if promised else ""
    return traffic.settings([f"{{name: default, reserved_fraction: 1.0{text}}}"])


def kept(record: RequestRecord, slo: Slo) -> bool:
    """Whether the promise to a request was kept."""
    if slo.ttft_ms is not None and record.ttft_s * 1e3 > slo.ttft_ms:
        return False
    return slo.tpot_ms is None or record.tpot_s * 1e3 <= slo.tpot_ms


def judged(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> list[RequestRecord]:
    """Requests that came after the margins were learnt, and early enough to be answered in time."""
    last_s = duration_s - (slo.ttft_ms or 0.0) / 1e3
    if slo.tpot_ms is not None:
        last_s -= _ANSWER_TOKENS * slo.tpot_ms / 1e3
    return [
        record for record in records if LEARNING * duration_s <= record.request.arrival_s <= last_s
    ]


def admitted(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The admitted requests, answered or not."""
    return [record for record in records if record.answer is None or record.answer.status == 200]


def _comparisons(
    promise: PromisedRequests,
    ours: Sequence[RequestRecord],
    free: Sequence[RequestRecord],
    duration_s: float,
) -> list[Comparison]:
    slo = promise.slo
    ours, free = judged(ours, slo, duration_s), judged(free, slo, duration_s)
    let_in = admitted(ours)
    good = sum(kept(record, slo) for record in let_in)
    attained = good / max(1, len(let_in))
    span_s = max(record.request.arrival_s for record in ours) - LEARNING * duration_s
    goodput = good / span_s
    without = max(sum(kept(record, slo) for record in admitted(free)) / span_s, 1e-3)
    params = {"promise": promise.name}
    return compared(params, Sample((attained,)), Sample((goodput,)), Sample((without,)))


def _line(promise: PromisedRequests, records: Sequence[RequestRecord], duration_s: float) -> str:
    came = judged(records, promise.slo, duration_s)
    let_in = admitted(came)
    good = sum(kept(record, promise.slo) for record in let_in)
    return (
        f"  {promise.name}: of {len(came)} requests {len(let_in)} were let in, and {good} of those "
        f"got what {promise.slo} says"
    )
