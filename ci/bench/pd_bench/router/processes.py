# SPDX-License-Identifier: Apache-2.0
"""A router in several processes, two ways: workers of one keeper (`--workers`), and equal routers (`--exchange`).

Equal routers have an index each, follow all KV events, and check all engines. They have a port each here, and requests
go to them in turn.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pd_bench.report import BenchError, Comparison
from pd_bench.router.contenders import Ours
from pd_bench.router.rotations import Say, cluster
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import play
from pd_bench.router.two import in_touch
from pd_bench.sample import Sample
from pd_connector.tools.launch import Port, Service

TTFT_BAR, CPU_BAR = 1.1, 1.3
WORKERS, EQUAL = "workers of a keeper", "equal routers"
IDLE_S = 5.0
"""Length of the measurement without requests."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Found(NamedTuple):
    """One run. CPU time and memory are those of all processes of the router."""

    ttft_s: float  # mean, in the trace's time
    cpu_s: float  # a request, as played
    added_cpu_s: float  # a request, without what the router takes when it is idle
    idle: float  # cores that it takes without requests
    memory_mib: float  # memory that two processes share counts once


def compare(
    contender: Ours,
    processes: int,
    requests: Sequence[Sent],
    rounds: int,
    speed: float,
    say: Say,
) -> list[Comparison]:
    """Equal routers beside workers, in turn, each in front of fresh engines.

    Raises:
        BenchError: a request failed.
    """
    runs: dict[str, list[_Found]] = {WORKERS: [], EQUAL: []}
    for number in range(rounds):
        for kind in tuple(runs)[:: -1 if number % 2 else 1]:
            runs[kind].append(found := _run(contender, kind, processes, requests, speed))
            say(
                f"round {number + 1}, {processes} {kind}: TTFT mean {found.ttft_s:.2f} s, CPU of a request "
                f"{1e3 * found.cpu_s:.2f} ms ({1e3 * found.added_cpu_s:.2f} ms beside {found.idle:.3f} cores when idle), "
                f"memory {found.memory_mib:.0f} MiB, load {os.getloadavg()[0]:.1f}"
            )
    where: dict[str, str | int | float] = {"processes": processes}
    rows: list[tuple[str, str, float, str, float | None]] = [
        ("TTFT mean", "ttft_s", 1.0, "s", TTFT_BAR),
        ("CPU of a request", "cpu_s", 1e3, "ms", CPU_BAR),
        ("CPU of a request, idle time subtracted", "added_cpu_s", 1e3, "ms", None),
        ("cores when idle", "idle", 1.0, "", None),
        ("memory", "memory_mib", 1.0, "MiB", None),
    ]
    return [
        Comparison(
            name,
            where,
            *(_sample(runs[kind], field, factor) for kind in (EQUAL, WORKERS)),
            unit,
            bar,
        )
        for name, field, factor, unit, bar in rows
    ]


def _sample(runs: Iterable[_Found], field: str, factor: float) -> Sample:
    return Sample(tuple(getattr(one, field) for one in runs)).scaled(factor)


def _run(
    contender: Ours, kind: str, processes: int, requests: Sequence[Sent], speed: float
) -> _Found:
    with ExitStack() as stack:
        if kind == EQUAL:
            ports = [stack.enter_context(Port()) for _ in range(processes)]
            routers = in_touch(contender, ports)
        else:
            args = ("--workers", str(processes))
            routers = [replace(contender, args=(*contender.args, *args))]
        running = stack.enter_context(cluster(routers, speed))
        began, begun = time.monotonic(), _cpu_s(running.routers)
        time.sleep(IDLE_S)
        idle = (_cpu_s(running.routers) - begun) / (time.monotonic() - began)
        began, begun = time.monotonic(), _cpu_s(running.routers)
        urls = [one.base_url for one in running.routers]
        outcomes = asyncio.run(play(urls, requests, speed))
        cpu_s, passed_s = _cpu_s(running.routers) - begun, time.monotonic() - began
        memory = _memory_bytes(running.routers)
    if failed := [one for one in outcomes if not one.served]:
        raise BenchError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    return _Found(
        statistics.mean(one.ttft_s for one in outcomes),
        cpu_s / len(outcomes),
        (cpu_s - idle * passed_s) / len(outcomes),
        idle,
        memory / 2**20,
    )


def _processes(routers: Iterable[Service]) -> list[int]:
    """The processes of these routers."""
    found = []
    for one in routers:
        assert one.family is not None, "the router runs"
        found += [one.family.pid, *_children(one.family.pid)]
    return found


def _children(pid: int) -> list[int]:
    direct = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, direct) for one in (child, *_children(child))]


def _cpu_s(routers: Iterable[Service]) -> float:
    """User and system time of all processes of the routers."""
    ticks = 0
    for pid in _processes(routers):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / _TICKS_PER_S


def _memory_bytes(routers: Iterable[Service]) -> int:
    found = 0
    for pid in _processes(routers):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                found += int(line.split()[1]) << 10
    return found
