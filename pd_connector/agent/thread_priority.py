# SPDX-License-Identifier: Apache-2.0
"""Asks Linux and Python to prefer threads that move KV over engine threads that poll without pause.

No thread gets a lower priority than the engine's threads. Such a thread would keep Python's lock (GIL) while it waits for a
processor, and the agent and the engine would wait for it.
"""

import ctypes
import os
import platform
import sys
import threading
from pathlib import Path

_SYSCALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr
_SHORT_SLICE_NS = 100_000  # the shortest the kernel grants
_RESET_ON_FORK = 0x01
_NICE = -10
_IO_THREAD = "ZMQbg/IO"  # as ZeroMQ names its threads


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def prefer_short_slices() -> bool:
    """Give the calling thread short time slices; returns whether the kernel agreed.

    Threads that the caller starts inherit neither the slices nor its priority: threads that compile, or save pool
    chunks, would take the processors from the engine. Threads that load pool chunks ask for the priority themselves.

    An engine's processes poll shared memory for a second after each step. Since Linux 6.12 a thread that wakes goes before a
    running thread with a longer slice, so a chunk does not wait for milliseconds. The thread's share of the processor stays
    the same. Older kernels ignore or refuse the request.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return False
    attributes = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        policy=os.SCHED_OTHER,
        flags=_RESET_ON_FORK,
        nice=os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
        runtime=_SHORT_SLICE_NS,
    )
    return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), 0) == 0)


def prefer_own_threads() -> bool:
    """Give the calling thread and this process's ZeroMQ I/O threads a higher priority, if the process is allowed to.
    Returns whether it is. Call it when the sockets exist.

    An engine's pollers yield the processor and take it back at once. Beside them, encryption and copies of KV would get half
    a core. With many free cores nothing changes.
    """
    threads = list[int]()
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(_IO_THREAD):
                threads.append(int(task.name))
        except OSError:  # it has just ended
            continue
    return prefer_this_thread() and all(map(_prefer, threads))


def prefer_this_thread() -> bool:
    """Give the calling thread the higher priority, if the process is allowed to. Returns whether it is. For threads whose
    work a request waits for."""
    return _prefer(threading.get_native_id())


def _prefer(thread: int) -> bool:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except OSError:
        return False
    return True


def prefer_short_turns(longest_ms: float) -> None:
    """Limit the time for which another thread of this process keeps Python's lock (GIL) while the agent waits for it, in
    milliseconds.

    The agent's thread copies, sums and waits without the lock, and needs it again after each. An engine whose loop is Python
    gives it up only after `sys.getswitchinterval()`, by default 5 ms, several times for each chunk. The limit holds for all
    threads of the process. A lower limit that is set already stays.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), longest_ms / 1000))
