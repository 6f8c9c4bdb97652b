# SPDX-License-Identifier: Apache-2.0
"""Load that engines report: our scheduler's report (`GET /pd/load`), else vLLM's metrics.

The router's own counts come first, because they change at once. Reports add the work of other clients, and correct
wrong predictions.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from scheduler_plugins.admission.report import WILDCARDS, EngineReport, RankLoad, decode
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.engines.engine import BackendEngine

_MOST = 1e12
"""No engine has more requests. A larger number is none, and infinity cannot be rounded."""


class ReportedLoad(NamedTuple):
    """An engine's report of its own load."""

    queued_s: float | None = None  # of prefill; None: not reported
    waiting: int = 0
    batch: int = 0
    context: int = 0
    free_kv: float | None = None  # tokens; None: not reported
    block_tokens: int = 0  # 0: not reported
    blocks: int = 0
    costs: CostModel | None = None
    kv_events: tuple[str, str | None] | None = None  # of rank 0: endpoint, replay endpoint
    ranks: tuple[int, ...] = ()  # data-parallel ranks; empty: not reported


def from_report(raw: bytes, host: str) -> ReportedLoad | None:
    """Read an answer of `/pd/load`; None if it is not a load report.

    Args:
        host: the engine's host, for addresses that name none.
    """
    try:
        report = decode(raw)
    except msgspec.MsgspecError:
        return None
    if not all(_can_be(rank) for rank in report.ranks):
        return None
    with_costs = [rank for rank in report.ranks if rank.model.known]
    return ReportedLoad(
        queued_s=max((rank.queued_s for rank in report.ranks), default=None),
        waiting=sum(rank.waiting for rank in report.ranks),
        batch=sum(rank.batch for rank in report.ranks),
        context=sum(rank.context for rank in report.ranks),
        block_tokens=report.block_tokens,
        blocks=report.blocks,
        costs=with_costs[0].model if with_costs else None,
        kv_events=_addresses(report, host),
        ranks=tuple(sorted({rank.rank for rank in report.ranks})),
    )


def _can_be(rank: RankLoad) -> bool:
    """Whether a rank can have this load. An engine with less than none would get every request."""
    counts = rank.queued_s, rank.queued_tokens, rank.waiting, rank.batch, rank.context
    return not rank.model.problem and all(0 <= count <= _MOST for count in counts)


def from_metrics(text: bytes) -> ReportedLoad | None:
    """Find the few load metrics among vLLM's thousands; None if they are missing."""
    sums: dict[bytes, float] = {}
    usages = list[float]()  # one a rank; a request must fit into one rank
    try:
        for name, value in _GAUGES.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == b"kv_cache_usage_perc":
                usages.append(float(value))
    except ValueError:
        return None
    if any(not 0 <= total <= _MOST for total in sums.values()):
        return None
    described = _CACHE.search(text)
    info = dict(_LABELS.findall(described[1])) if described else {}
    if not sums and not info:
        return None
    block_tokens, blocks = (_number(info.get(name)) for name in (b"block_size", b"num_gpu_blocks"))
    used = min(usages, default=None)
    return ReportedLoad(
        waiting=round(sums.get(b"num_requests_waiting", 0)),
        batch=round(sums.get(b"num_requests_running", 0)),
        free_kv=(1 - used) * blocks * block_tokens if used is not None and blocks else None,
        block_tokens=block_tokens,
        blocks=blocks,
        ranks=tuple(sorted({int(rank) for rank in _RANKS.findall(text)})),
    )


def apply(engine: BackendEngine, report: ReportedLoad, now_s: float) -> None:
    """Update the router's view of an engine by its report."""
    if report.costs is not None:
        engine.costs, engine.costs_reported = report.costs, True
    if report.ranks:
        engine.ranks = report.ranks
    if report.block_tokens:
        engine.reported_block_tokens = report.block_tokens
    if report.free_kv is not None:
        engine.free_kv = report.free_kv
    if report.queued_s is not None:
        engine.load.reported(report.queued_s, report.batch, report.context, now_s)
    else:
        # Other clients' waiting requests are taken to have the mean length of ours.
        engine.load.reported_requests(report.waiting, report.batch, now_s)


_GAUGES = re.compile(
    rb"^vllm:(num_requests_waiting|num_requests_running|kv_cache_usage_perc)(?:\{[^}]*\})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)
# With several API servers, a rank has no gauge before its first step, but its cache info exists from the start.
_RANKS = re.compile(
    rb'^vllm:(?:num_requests_waiting|cache_config_info)\{[^}]*\bengine="(\d+)"', re.MULTILINE
)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABELS = re.compile(rb'(\w+)="([^"]*)"')


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _addresses(report: EngineReport, host: str) -> tuple[str, str | None] | None:
    ports = report.kv_events
    if ports is None:
        return None
    events, replay = (_reachable(address, host) for address in (ports.events, ports.replay))
    return (events, replay) if events is not None else None


def _reachable(address: str | None, host: str) -> str | None:
    """The address as other machines reach it; None if they cannot."""
    if address is None or not address.startswith("tcp://"):
        return None
    own_host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host if own_host in WILDCARDS else own_host}:{port}" if port != "0" else None
