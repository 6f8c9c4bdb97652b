# SPDX-License-Identifier: Apache-2.0
"""The guard: a small process that outlives its launcher, to end the families it left behind.

However the launcher dies (an exception, SIGKILL, a closed terminal), the kernel closes its end of a
pipe; the guard, reading the other end, then ends every process that carries the launcher's marker
(`proc.watch`). PR_SET_PDEATHSIG would not do: it reaches only direct children, and fires when the
*thread* that started them ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from typing import NamedTuple

from pd_connector.tools.launch import proc


class _Guard(NamedTuple):
    launcher: str  # id that everything this launcher starts is marked with
    process: subprocess.Popen[bytes]
    pipe: int  # our end, open for as long as we live


_guards: dict[int, _Guard] = {}  # by the launcher's own pid: a fork needs a guard of its own
_lock = threading.Lock()


def guarded() -> str:
    """The id of this launcher. Its guard is started when it is first asked for."""
    with _lock:
        guard = _guards.get(os.getpid())
        if guard is None or guard.process.poll() is not None:
            guard = _guards[os.getpid()] = _start(uuid.uuid4().hex)
        return guard.launcher


def _start(launcher: str) -> _Guard:
    reading, writing = os.pipe()
    environment = {k: v for k, v in os.environ.items() if k != proc.MARKER}
    process = subprocess.Popen(
        # Isolated and without site-packages: 10 ms and 10 MB.
        [sys.executable, "-I", "-S", proc.__file__, launcher, str(os.getpid())],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        # A group of its own: Ctrl-C, or a kill of the launcher's group, must not reach it.
        process_group=0,
    )
    os.close(reading)
    return _Guard(launcher, process, writing)
