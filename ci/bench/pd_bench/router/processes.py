# SPDX-License-Identifier: Apache-2.0
"""A router in several processes (`--workers`), beside the same router by another version's code, or in one process."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pd_bench.harness import pids_of
from pd_bench.machine import cpu_seconds
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.router.contenders import Engines, Ours
from pd_bench.router.mocks import prefix_hits
from pd_bench.router.rotations import cluster
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import play
from pd_bench.sample import Sample
from pd_connector.tools.launch import RouterProcess, Service

TTFT_BAR, CPU_BAR = 1.1, 1.3
OURS, BASELINE = "this version", "baseline"
IDLE_S = 5.0
"""Length of the measurement without requests."""


class _Found(NamedTuple):
    """One run. CPU time and memory are those of all processes of the router."""

    ttft_s: float  # mean, in the trace's time
    hit: float  # part of the prompt tokens that prefill engines found in their caches
    cpu_s: float  # a request, as played
    added_cpu_s: float  # a request, without what the router takes when it is idle
    idle: float  # cores that it takes without requests
    memory_mib: float  # memory that two processes share counts once


class _Elsewhere(RouterProcess):
    """The router by the code in another folder."""

    code: Path

    def environment(self) -> dict[str, str]:
        # Else the folder in which the bench was started would come first.
        return {**super().environment(), "PYTHONPATH": str(self.code), "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class OtherCode(Ours):
    """Our router by the code in a folder, such as a worktree of an older version."""

    code: Path = Path()

    def router(self, engines: Engines) -> Service:
        made = super().router(engines)
        made.__class__ = _Elsewhere
        assert isinstance(made, _Elsewhere)
        made.code = self.code
        return made


def compare(
    policy: str,
    processes: int,
    code: Path | None,
    requests: Sequence[Sent],
    rounds: int,
    speed: float,
    say: Say,
) -> list[Comparison]:
    """Several processes beside the baseline, in turn, each in front of fresh engines.

    Args:
        code: folder with the packages of the baseline, which has as many processes; None: the baseline is this
            version in one process.

    Raises:
        BenchError: a request failed.
    """
    args = ("--workers", str(processes))
    ours_alone = Ours(OURS, policy=policy)
    contenders = {
        OURS: replace(ours_alone, args=args),
        BASELINE: ours_alone
        if code is None
        else OtherCode(BASELINE, policy=policy, args=args, code=code),
    }
    runs: dict[str, list[_Found]] = {kind: [] for kind in contenders}
    for number in range(rounds):
        for kind in tuple(runs)[:: -1 if number % 2 else 1]:
            runs[kind].append(run := _run(contenders[kind], requests, speed))
            say(
                f"round {number + 1}, {kind}: TTFT mean {run.ttft_s:.2f} s, hit {run.hit:.3f}, CPU of a request "
                f"{1e3 * run.cpu_s:.2f} ms ({1e3 * run.added_cpu_s:.2f} ms beside {run.idle:.3f} cores when idle), "
                f"memory {run.memory_mib:.0f} MiB, load {os.getloadavg()[0]:.1f}"
            )
    where: dict[str, str | int | float] = {"processes": processes}
    rows: list[tuple[str, str, float, str, float | None]] = [
        ("TTFT mean", "ttft_s", 1.0, "s", TTFT_BAR),
        ("hit", "hit", 1.0, "", None),
        ("CPU of a request", "cpu_s", 1e3, "ms", CPU_BAR),
        ("CPU of a request, idle time subtracted", "added_cpu_s", 1e3, "ms", None),
        ("cores when idle", "idle", 1.0, "", None),
        ("memory", "memory_mib", 1.0, "MiB", None),
    ]
    compared = []
    for name, field, factor, unit, bar in rows:
        ours, baseline = (_sample(runs[kind], field, factor) for kind in (OURS, BASELINE))
        compared.append(Comparison(name, where, ours, baseline, unit, bar))
    return compared


def _sample(runs: Iterable[_Found], field: str, factor: float) -> Sample:
    return Sample(tuple(getattr(run, field) for run in runs)).scaled(factor)


def _run(contender: Ours, requests: Sequence[Sent], speed: float) -> _Found:
    with cluster([contender], speed) as running:
        began, begun = time.monotonic(), _cpu_s(running.routers)
        time.sleep(IDLE_S)
        idle = (_cpu_s(running.routers) - begun) / (time.monotonic() - began)
        began, begun = time.monotonic(), _cpu_s(running.routers)
        before, urls = (
            prefix_hits(running.prefill),
            [service.base_url for service in running.routers],
        )
        outcomes = asyncio.run(play(urls, requests, speed))
        cpu_s, passed_s = _cpu_s(running.routers) - begun, time.monotonic() - began
        memory, hit = _memory_bytes(running.routers), prefix_hits(running.prefill).since(before)
    if failed := [outcome for outcome in outcomes if not outcome.served]:
        raise BenchError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    return _Found(
        statistics.mean(outcome.ttft_s for outcome in outcomes),
        hit,
        cpu_s / len(outcomes),
        (cpu_s - idle * passed_s) / len(outcomes),
        idle,
        memory / 2**20,
    )


def _cpu_s(routers: Iterable[Service]) -> float:
    """User and system time of all processes of the routers."""
    return cpu_seconds(pids_of(routers))


def _memory_bytes(routers: Iterable[Service]) -> int:
    size = 0
    for pid in pids_of(routers):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                size += int(line.split()[1]) << 10
    return size
