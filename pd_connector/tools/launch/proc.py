# SPDX-License-Identifier: Apache-2.0
"""Processes as `/proc` shows them, and the reaper's program, which ends processes that a launcher left behind.

Uses only the standard library, and is run by path: the reaper must start in a moment and stay small.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

MARKER = "PD_CONNECTOR_FAMILY"
"""Environment variable that every process of a family inherits: the ids of all families of the process, joined by
colons. It identifies a process that has lost its parent."""

POLITE_S = 5.0
"""Time between SIGTERM and SIGKILL, in which engines remove their shared memory."""
TRACKER_S = 5.0
"""Time for Python's resource trackers to clean up after the processes that they serve."""
UNKILLABLE_S = 30.0
"""Longest time for SIGKILL: a process inside a system call ends after the call."""


class Process(NamedTuple):
    """One process; `started` distinguishes it from a later process with the same pid."""

    pid: int
    started: int  # clock ticks since boot
    parent: int
    group: int
    state: str  # one letter, as in proc(5)

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"


def read(pid: int) -> Process | None:
    """The process with this pid; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name, in parentheses, may itself contain spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[2]), fields[0].decode())


def table() -> dict[int, Process]:
    """All processes, by pid."""
    processes = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in processes if process is not None}


def descendants(processes: dict[int, Process], roots: Iterable[int]) -> set[int]:
    """Pids of `roots` and of all their descendants in the table."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    members: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in members:
            members.add(pid)
            waiting += children.get(pid, ())
    return members


def families(pid: int) -> list[str]:
    """Ids of the families into which this process was born; empty if they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return []
    prefix = MARKER.encode() + b"="
    for variable in variables:
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode(errors="replace").split(":")
    return []


def signal_all(processes: Iterable[Process], number: int) -> None:
    """Send a signal to each process, unless its pid now belongs to another process."""
    for process in processes:
        now = read(process.pid)
        if now is None or now.started != process.started:
            continue
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def watch(launcher: str, parent: str) -> None:
    """Wait until the launcher has ended, then end all processes with its id (the reaper's program)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A fork of the launcher may hold the pipe open after the launcher's death, so both are watched.
    while os.getppid() == int(parent):
        readable, _, _ = select.select([sys.stdin.buffer], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    end(launcher)


def end(family: str, polite_s: float = POLITE_S) -> None:
    """End all processes marked with this id: SIGTERM, a bounded wait, SIGKILL."""
    signal_all(marked(family), signal.SIGTERM)
    signal_all(marked(family), signal.SIGCONT)
    deadline = time.monotonic() + polite_s
    while marked(family) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_all(lambda: marked(family))


def kill_all(members: Callable[[], list[Process]]) -> None:
    """Send SIGKILL to all members, again and again, because a process may start another meanwhile.

    Python's resource trackers get a moment more. They end after the processes that they serve, and remove the
    shared memory left in /dev/shm.

    Raises:
        TimeoutError: a process survives SIGKILL; the message has its pid.
    """
    started = time.monotonic()
    alone_since = None  # time since when only trackers are left
    while left := members():
        now = time.monotonic()
        if now - started > UNKILLABLE_S:
            raise TimeoutError(
                f"processes {[p.pid for p in left]} survive SIGKILL for {now - started:.0f} s: "
                "they hang in the kernel (see /proc/PID/stack)"
            )
        served = [p for p in left if not _is_tracker(p.pid)]
        if served:
            alone_since = None
        elif alone_since is None:
            alone_since = now
        elif now - alone_since > TRACKER_S:
            served = left
        signal_all(served, signal.SIGKILL)
        signal_all(left, signal.SIGCONT)
        time.sleep(0.02)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def marked(family: str) -> list[Process]:
    """Living processes that carry this id."""
    return [p for p in table().values() if p.alive and family in families(p.pid)]


if __name__ == "__main__":
    watch(*sys.argv[1:])
