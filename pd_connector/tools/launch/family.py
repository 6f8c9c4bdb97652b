# SPDX-License-Identifier: Apache-2.0
"""A process and all its descendants, counted and ended together.

An engine is a handful of processes. Some of them outlive a parent that is killed, and then spin at full speed.
Members are therefore found in three ways that complement each other: by descent, by process group, and by a
marker in the environment. Processes that have lost their parent still inherit the marker.

A family gets a process group of its own, so that Ctrl-C reaches only the launcher, which then ends its families in
order. It does not get a session of its own: Linux schedules sessions as groups, and a transport's progress thread in
one session then starves beside an engine's polling loop in another.

The reaper is a small process that outlives its launcher, and ends the families that the launcher leaves behind.
However the launcher dies (an exception, SIGKILL, a closed terminal), the kernel closes its end of a pipe. The reaper
reads the other end, and then ends every process with the launcher's marker (`proc.watch`). PR_SET_PDEATHSIG is not
enough: it reaches only direct children, and fires when the *thread* that started them ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

from pd_connector.tools.launch import proc

POLITE_S = 15.0
"""How long a family may take to end after SIGTERM."""
LINGER_S = 2.0
"""How long processes left behind by an ended process may take to end."""
POLL_S = 0.05

Popen = Callable[..., "subprocess.Popen[bytes]"]


class Family:
    """A process started here, with all its descendants.

    Args:
        command: program and arguments.
        env: variables added to this process's own.
        log: file to which all output of the family is appended; None discards it.
        popen: starts the process, as `subprocess.Popen` does.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        popen: Popen = subprocess.Popen,
    ) -> None:
        self.id = uuid.uuid4().hex
        lineage = [os.environ.get(proc.MARKER, ""), launcher_id(), self.id]
        environment = {
            **os.environ,
            **(env or {}),
            proc.MARKER: ":".join(filter(None, lineage)),
            # Engines rename their processes. By default that overwrites the environment in /proc, and with it
            # the marker.
            "SPT_NOENV": "1",
        }
        self._seen: dict[int, proc.Process] = {}
        with open(log or os.devnull, "ab") as output:
            self._root = popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Pid of the process that was started, which is also its process group's id."""
        return self._root.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the started process; None while it runs. Its descendants may outlive it."""
        return self._root.poll()

    def members(self) -> list[proc.Process]:
        """All living members."""
        processes = proc.table()
        pids = {pid for pid in processes if self.id in proc.families(pid)}
        if self._root.returncode is None:
            # Until the root is reaped, its pid cannot belong to another process.
            pids |= {p.pid for p in processes.values() if p.group == self.pid}
            pids.add(self.pid)
        pids = proc.descendants(processes, pids)
        for pid, process in self._seen.items():
            if pid in processes and processes[pid].started == process.started:
                pids.add(pid)
        self._seen = {pid: processes[pid] for pid in pids}
        return [p for p in self._seen.values() if p.alive]

    def signal(self, number: int) -> None:
        """Send a signal to every member."""
        members = self.members()
        if self._root.poll() is None:
            with suppress(ProcessLookupError):  # it has just been forked, into our own group still
                os.killpg(self.pid, number)
                members = [p for p in members if p.group != self.pid]
        proc.signal_all(members, number)

    def pause(self) -> None:
        """Stop every member where it stands (SIGSTOP)."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused family continue (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask the started process to end; if it has ended, ask the processes it left behind."""
        if self._root.poll() is None:
            self._root.terminate()
        else:
            proc.signal_all(self.members(), signal.SIGTERM)
        self.resume()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the whole family has ended; False if a member is still there."""
        deadline = time.monotonic() + timeout_s
        while self._root.poll() is None or self.members():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def kill(self) -> None:
        """End every member at once (SIGKILL), and wait until all have ended.

        Raises:
            TimeoutError: a process survives SIGKILL; the message has its pid.
        """
        proc.kill_all(self.members)
        self._root.wait()

    def stop(self, polite_s: float = POLITE_S) -> None:
        """End the family: SIGTERM to the started process, a bounded wait, SIGKILL to all."""
        stop_all([self], polite_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def stop_all(families: Iterable[Family], polite_s: float = POLITE_S) -> None:
    """End several families at the same time, within the time limit for one."""
    families = list(families)
    try:
        for family in families:
            family.terminate()
        deadline = time.monotonic() + polite_s
        while any(f.returncode is None for f in families) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for family in families:
            family.terminate()
        deadline = time.monotonic() + min(polite_s, LINGER_S)
        for family in families:
            family.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for family in families:
            family.kill()


class Census(NamedTuple):
    """Counts over all living members of a family. A leak makes them grow."""

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


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread. Main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    previous = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
