# SPDX-License-Identifier: Apache-2.0
"""Quality of service in real engines: the cost of free users for premium users, and the shares of classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample
from pd_bench.scheduler import live_traffic as traffic
from pd_bench.scheduler.classes import CLASSES, PREMIUM_P99, SHARE_POINTS, WINDOW_S
from pd_bench.scheduler.live import (
    MIDDLEWARE,
    OURS,
    Contender,
    EngineSetup,
    Findings,
    RunningEngine,
    running,
)
from pd_bench.scheduler.replay import p99
from pd_bench.scheduler.sending import RequestRecord
from pd_bench.scheduler.workload import merged
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting

FREE_LOAD = 3.0
PREMIUM_LOAD = 0.05
STANDARD_LOAD = 0.15
OVERLOAD = 3.0
"""Load of each class relative to its reserve, when shares are measured."""
_SEED = 11
_ROUNDS = 3
_BLOCK = traffic.PAGE_SIZE

_YAML = [
    f"{{name: {each.name}, reserved_fraction: {each.reserved_fraction}, priority: {each.priority}}}"
    for each in CLASSES
]


async def compare(duration_s: float, shares_s: float, folder: Path, say: Say) -> Findings:
    """Premium alone, beside free users who bring 3 times the capacity, and shares in overload.

    Args:
        duration_s: of each of the first two, in `_ROUNDS` parts that take fair_share, so that what the
            machine does meanwhile hits both; and of one such part with vLLM's own scheduler.
        shares_s: of the last; its first 30 s do not count, so it must be longer than that.
    """
    setup = EngineSetup(traffic.CACHE_TOKENS, traffic.LONGEST_TOKENS + 100, folder)
    ours = Contender("ours", (*OURS, *MIDDLEWARE), traffic.settings(_YAML))
    async with running(ours, setup, say) as engine:
        model = await traffic.costs(engine)
        rate = await traffic.capacity(engine)
        say(f"capacity: {rate:.1f} requests a second; error of the cost model {model.error:.1%}")
        part_s = duration_s / _ROUNDS
        alone, beside = [], []
        for n in range(_ROUNDS):
            premium, together = _requests(rate, part_s, _SEED + 10 * n)
            alone += await _premium(engine, premium, part_s)
            beside += await _premium(engine, together, part_s)
            say(
                f"premium, p99 of {len(alone)}: alone {p99(alone):.3f} s, beside {p99(beside):.3f} s"
            )
        worst = await _share_error(engine, rate, shares_s, model, say)
        others_cores = engine.noise.cores()
    async with running(Contender("vLLM"), setup, say) as engine:
        unprotected_s = p99(await _premium(engine, together, part_s))
        say(f"premium beside free users with vLLM's own scheduler: p99 {unprotected_s:.3f} s")
        others_cores = max(others_cores, engine.noise.cores())
    comparisons = [
        _p99s(p99(beside), p99(alone), "premium alone", PREMIUM_P99),
        _p99s(p99(beside), unprotected_s, "vLLM's scheduler", None),
        Comparison(
            "share error, any 30 s",
            {"load": OVERLOAD, "against": "allowed"},
            Sample((worst,)),
            Sample((SHARE_POINTS,)),
            "points",
            1.0,
        ),
    ]
    return Findings(comparisons, [f"capacity: {rate:.1f} requests a second"], others_cores)


def _requests(rate: float, duration_s: float, seed: int) -> tuple[list[Waiting], list[Waiting]]:
    """The premium users' requests, and all requests. Both lists have the same premium requests."""
    premium = traffic.stream("premium", PREMIUM_LOAD * rate, duration_s, seed)
    rest = (
        traffic.stream("standard", STANDARD_LOAD * rate, duration_s, seed + 1),
        traffic.stream("free", FREE_LOAD * rate, duration_s, seed + 2),
    )
    return merged(premium), merged(premium, *rest)


async def _premium(
    engine: RunningEngine, requests: Sequence[Waiting], duration_s: float
) -> list[float]:
    """TTFT of the premium requests among these; of one without an answer as long as was waited."""
    # The last premium requests may need their time. All other requests are disconnected.
    until_s = duration_s + 10.0
    records = await engine.serve(requests, page_size=_BLOCK, until_s=until_s, headers=traffic.tier)
    return [min(record.ttft_s, until_s) for record in records if record.request.qos == "premium"]


async def _share_error(
    engine: RunningEngine, rate: float, shares_s: float, model: CostModel, say: Say
) -> float:
    streams = [
        traffic.stream(each.name, OVERLOAD * each.reserved_fraction * rate, shares_s, _SEED + n)
        for n, each in enumerate(CLASSES, start=10)
    ]
    records = await engine.serve(
        merged(*streams), page_size=_BLOCK, until_s=shares_s, headers=traffic.tier
    )
    begun_s = min(
        record.answer.sent_s - record.late_s - record.request.arrival_s
        for record in records
        if record.answer
    )
    worst, shares = share_error(records, begun_s, shares_s, model)
    say("shares: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    return worst


def share_error(
    records: Sequence[RequestRecord], begun_s: float, duration_s: float, model: CostModel
) -> tuple[float, dict[str, float]]:
    """The largest distance of a class from its reserve over any 30 s, in percentage points.

    The work of a prefill comes from the cost model, and counts in the time before its first token. The first 30 s do
    not count, because queues fill.

    Returns:
        That, and each class's share of all of it.

    Raises:
        BenchError: no window contains work.
    """
    seconds = int(duration_s)
    done = {qos_class.name: [0.0] * (seconds + 1) for qos_class in CLASSES}
    for record in records:
        if record.answer is None or not record.answer.token_s:
            continue
        cost_s = model.prefill_s(record.request.tokens)
        end_s = record.answer.token_s[0] - begun_s
        for second in range(max(0, int(end_s - cost_s)), min(seconds, int(end_s)) + 1):
            part_s = min(end_s, second + 1) - max(end_s - cost_s, second)
            done[record.request.qos][second] += max(0.0, part_s)
    width, worst = round(WINDOW_S), -1.0
    totals = dict.fromkeys(done, 0.0)
    # The last 2 s may contain work of unfinished prompts.
    for begin in range(width, seconds - width - 1):
        work = {name: sum(times[begin : begin + width]) for name, times in done.items()}
        whole = sum(work.values())
        for qos in CLASSES:
            if whole:
                apart = abs(work[qos.name] / whole - qos.reserved_fraction)
                worst = max(worst, apart * 100)
            totals[qos.name] += work[qos.name]
    if worst < 0:
        raise BenchError(
            f"{seconds} s are too short for a window of {width} s after the first 30 s"
        )
    return worst, {name: work / sum(totals.values()) for name, work in totals.items()}


def _p99s(ours_s: float, theirs_s: float, against: str, bar: float | None) -> Comparison:
    params: dict[str, str | int | float] = {"load": FREE_LOAD, "against": against}
    return Comparison("premium p99 TTFT", params, Sample((ours_s,)), Sample((theirs_s,)), "s", bar)
