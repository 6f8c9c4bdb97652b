# SPDX-License-Identifier: Apache-2.0
"""Descriptors, threads and processes that a test leaves behind."""

import os

from pd_connector.tools.launch import Family
from support.waits import until

Census = tuple[int, int]


def census() -> Census:
    """Open descriptors and threads (ZeroMQ's own included) of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Physical memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for_leftovers(before: Census) -> None:
    """Wait until there are no more of either than before. The kernel lists a thread for a moment after it was joined, and
    libraries close things later. There can be fewer: what an earlier test left has ended meanwhile."""

    def gone() -> bool:
        return all(now <= then for now, then in zip(census(), before, strict=True))

    until(gone, f"no more descriptors and threads than {before}")


def survivors(family: Family) -> list[int]:
    """Pids of living members other than the started process."""
    return sorted(process.pid for process in family.members() if process.pid != family.pid)
