# SPDX-License-Identifier: Apache-2.0
"""Whether the process that wrote a file still lives, containers that share /dev/shm included.

Containers that run with `--ipc=host` see each other's files, but each has process numbers of its own (a
PID namespace). So a number means something only together with its namespace. Within one namespace a
process is known by its number and its start time, since numbers are used again. Of a process elsewhere it
is known only whether it still holds the lock on its file: the kernel lets go of it when the process ends.
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
    """A suffix that tells user namespaces apart; empty in the machine's own."""
    with suppress(OSError):
        mapped = Path("/proc/self/uid_map").read_text().split()
        if mapped[:3] != ["0", "0", "4294967295"]:
            return f"-{Path('/proc/self/ns/user').stat().st_ino}"
    return ""


def start_ticks(pid: int) -> int:
    """When a process of this namespace started, in clock ticks since boot; 0 if it is not known."""
    with suppress(OSError, IndexError, ValueError):
        # The name may hold anything, also a closing parenthesis.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[_START_TIME])
    return 0


def lives(pid: int, namespace: int, started: int) -> bool | None:
    """Whether a process lives; None if it runs in another namespace and cannot be seen from here.

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
    """Lock a file for as long as this process lives. Waits while somebody looks at the lock."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether some process, in any namespace, holds the file. True if that cannot be told."""
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
