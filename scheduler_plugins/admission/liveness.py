# SPDX-License-Identifier: Apache-2.0
"""Whether the process that wrote a file still lives. This includes processes of containers that share /dev/shm.

Containers with `--ipc=host` see each other's files, but each has its own process numbers (a PID namespace). So a number
has a meaning only together with its namespace. Within one namespace, number and start time identify a process, because
numbers are used again. For a process in another namespace, the only sign of life is the lock on its file. The kernel
releases the lock when the process ends.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_START_TIME = 19
"""Index of the start time among the fields of /proc/PID/stat that follow the name."""


@cache
def pid_namespace() -> int:
    """Number of this process's PID namespace; 0 if the system has none."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


@cache
def user_namespace() -> str:
    """A suffix that differs between user namespaces; empty in the machine's own namespace."""
    with suppress(OSError):
        mapped = Path("/proc/self/uid_map").read_text().split()
        if mapped[:3] != ["0", "0", "4294967295"]:
            return f"-{Path('/proc/self/ns/user').stat().st_ino}"
    return ""


def start_ticks(pid: int) -> int:
    """Start time of a process of this namespace, in clock ticks since boot; 0 if unknown."""
    with suppress(OSError, IndexError, ValueError):
        # The name can contain anything, even a closing parenthesis.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[_START_TIME])
    return 0


def lives(pid: int, namespace: int, started: int) -> bool | None:
    """Whether a process lives; None if it is in another namespace and cannot be seen from here.

    Args:
        namespace: its `pid_namespace`; 0: this one.
        started: its `start_ticks`; 0: not known.
    """
    if namespace not in (0, pid_namespace()):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not started or start_ticks(pid) in (0, started)


def hold(file: int) -> None:
    """Lock a file for the life of this process. Waits while another process checks the lock."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether a process of any namespace holds the file's lock. True if this is unknown."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
