# SPDX-License-Identifier: Apache-2.0
"""What benchmarks with real engines share: whether the machine can run them, their processes, and waits with an end.

Alternating sides, medians, bars and tables are in `sample` and `report`, other programs' load in `machine.Noise`, and
network namespaces in `netns`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from pd_bench.machine import cpu_seconds
from pd_bench.report import BenchError
from pd_connector.tools.launch import Service

T = TypeVar("T")

VLLM = ("vllm", "install vLLM, or use the environment that has it")
NIXL = ("nixl", "the baseline needs it: pip install 'pd-connector[nixl]'")


def missing_module(*modules: tuple[str, str]) -> str:
    """What is wrong if the first of these (module, what to do) is not installed; empty if all are."""
    for module, advice in modules:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: {advice}"
    return ""


def require(*modules: tuple[str, str]) -> None:
    """Raises BenchError if one of these (module, what to do) is not installed."""
    if problem := missing_module(*modules):
        raise BenchError(problem)


def pids_of(services: Iterable[Service]) -> list[int]:
    """Processes of the services that run, with their children."""
    families = [service.family for service in services if service.family]
    return [process.pid for family in families for process in family.members()]


class Processes:
    """The processes of services that are measured together. They are listed once, at the first use."""

    def __init__(self, services: Callable[[], Iterable[Service]]) -> None:
        """`services`: returns the services once they run."""
        self._services = services
        self._pids: list[int] = []

    def cpu_seconds(self) -> float:
        """CPU time that they have used."""
        self._pids = self._pids or pids_of(self._services())
        return cpu_seconds(self._pids)


def wait_for(
    look: Callable[[], T | None], limit_s: float, problem: Callable[[], str], pause_s: float
) -> T:
    """The first result of `look` that is not None. Raises BenchError with `problem` after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while (result := look()) is None:
        if time.monotonic() > deadline_s:
            raise BenchError(problem())
        time.sleep(pause_s)
    return result
