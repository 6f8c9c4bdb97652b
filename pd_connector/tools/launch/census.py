# SPDX-License-Identifier: Apache-2.0
"""Number of processes, threads and open files of a family. A leak makes them grow."""

from __future__ import annotations

import os
from typing import NamedTuple

from pd_connector.tools.launch.family import Family


class Census(NamedTuple):
    """Counts over all living members of a family."""

    processes: int
    threads: int
    files: int

    @classmethod
    def of(cls, family: Family) -> Census:
        """Count now. If a member ends meanwhile, only what could be read counts."""
        pids = [process.pid for process in family.members()]
        threads = sum(_entries(f"/proc/{pid}/task") for pid in pids)
        return cls(len(pids), threads, sum(_entries(f"/proc/{pid}/fd") for pid in pids))


def _entries(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0
