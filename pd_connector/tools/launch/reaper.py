# SPDX-License-Identifier: Apache-2.0
"""The reaper: a small process that outlives its launcher, and ends the families that the launcher leaves behind.

However the launcher dies (an exception, SIGKILL, a closed terminal), the kernel closes its end of a pipe. The reaper
reads the other end, and then ends every process with the launcher's marker (`proc.watch`). PR_SET_PDEATHSIG is not
enough: it reaches only direct children, and fires when the *thread* that started them ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from typing import NamedTuple

from pd_connector.tools.launch import proc


class _Reaper(NamedTuple):
    launcher: str  # id that marks everything this launcher starts
    process: subprocess.Popen[bytes]
    pipe: int  # the launcher's end, open as long as the launcher lives


_reapers: dict[int, _Reaper] = {}  # by the launcher's own pid: a fork needs its own reaper
_lock = threading.Lock()


def launcher_id() -> str:
    """The id of this launcher. The first call starts its reaper."""
    with _lock:
        reaper = _reapers.get(os.getpid())
        if reaper is None or reaper.process.poll() is not None:
            reaper = _reapers[os.getpid()] = _start(uuid.uuid4().hex)
        return reaper.launcher


def _start(launcher: str) -> _Reaper:
    reading, writing = os.pipe()
    environment = {k: v for k, v in os.environ.items() if k != proc.MARKER}
    process = subprocess.Popen(
        # Isolated and without site-packages: 10 ms and 10 MB.
        [sys.executable, "-I", "-S", proc.__file__, launcher, str(os.getpid())],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        # A group of its own: Ctrl-C, or a signal to the launcher's group, must not reach it.
        process_group=0,
    )
    os.close(reading)
    return _Reaper(launcher, process, writing)
