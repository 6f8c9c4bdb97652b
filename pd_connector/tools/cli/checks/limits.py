# SPDX-License-Identifier: Apache-2.0
"""Limits whose errors appear far away from their cause."""

from pd_connector.tools.cli.checks.facts import Facts
from pd_connector.tools.cli.checks.finding import Finding, Status

AREA = "limits"
FILES_WANTED = 4096
SHM_WANTED_BYTES = 256 << 20
MEMLOCK_WANTED_BYTES = 1 << 30


def check(facts: Facts) -> list[Finding]:
    """All findings of this area."""
    return [files(facts), shared_memory(facts), memlock(facts)]


def files(facts: Facts) -> Finding:
    """Open files. vLLM raises its own soft limit, so the hard limit counts."""
    limit = facts.limits.files
    shown = "unlimited" if limit is None else str(limit)
    if limit is None or limit >= FILES_WANTED:
        return Finding(AREA, "open files", Status.OK, shown)
    return Finding(
        AREA,
        "open files",
        Status.WARN,
        shown,
        f"{FILES_WANTED} at least are wanted: ulimit -n, or LimitNOFILE= of the service",
    )


def shared_memory(facts: Facts) -> Finding:
    """vLLM's processes and UCX communicate through /dev/shm; Docker gives it 64 MiB."""
    limits = facts.limits
    shown = f"{_mib(limits.shm_bytes)}, {_mib(limits.shm_free_bytes)} free"
    if limits.shm_free_bytes >= SHM_WANTED_BYTES:
        return Finding(AREA, "/dev/shm", Status.OK, shown)
    return Finding(
        AREA,
        "/dev/shm",
        Status.WARN,
        shown,
        f"{_mib(SHM_WANTED_BYTES)} free at least are wanted: start the container with --ipc=host "
        "or --shm-size=8g, or remove what ended engines left there",
    )


def memlock(facts: Facts) -> Finding:
    """RDMA pins the slabs; shared memory and TCP pin nothing."""
    limit = facts.limits.memlock_bytes
    shown = "unlimited" if limit is None else _mib(limit)
    if not facts.transports.rdma_devices:
        return Finding(AREA, "locked memory", Status.OK, f"{shown}; only RDMA needs more")
    if limit is None or limit >= MEMLOCK_WANTED_BYTES:
        return Finding(AREA, "locked memory", Status.OK, shown)
    return Finding(
        AREA,
        "locked memory",
        Status.WARN,
        shown,
        "RDMA registers buffers as locked memory: ulimit -l unlimited, or --ulimit memlock=-1",
    )


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / (1 << 20):,.0f} MiB"
