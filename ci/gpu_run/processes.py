# SPDX-License-Identifier: Apache-2.0
"""A program with a time limit, ended with all its child processes."""

import os
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MARKER = "PD_CONNECTOR_GPU_STEP"
"""Environment variable that marks the descendants of a step, because engines leave its process group."""

POLITE_S = 10.0
"""Seconds that processes have to end by themselves."""

KILLED_S = 3.0
"""Seconds until a killed process must be gone. A process that waits for a hung driver never goes."""

LOOK_S = 5.0
"""Seconds between two looks at a running program."""

MOST_BYTES = 256 << 20
KEPT_BYTES = 1 << 18
"""A running program's output above the first size is cut to its end of the second size."""


class Ended(NamedTuple):
    """The end of a program."""

    returncode: int | None  # None: it could not be ended
    seconds: float
    timed_out: bool


def run_limited(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    limit_s: float,
    look: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a program, and end all processes that it leaves behind.

    Args:
        command: program and arguments.
        cwd: its folder.
        env: the program's whole environment.
        log: file for the output of the program and its descendants; overwritten.
        limit_s: seconds after which the program is ended. Its Python processes then write where they were.
        look: called every few seconds while the program runs.
    """
    step = uuid.uuid4().hex
    started = time.monotonic()
    log.unlink(missing_ok=True)
    with log.open("ab") as output:  # appended to, so that it can be cut while it grows
        process = subprocess.Popen(
            command,
            cwd=cwd,
            # SPT_NOENV: engines rename themselves, and would overwrite the environment in /proc.
            # PYTHONFAULTHANDLER: a crash in compiled code says where in Python it was.
            env={**env, MARKER: step, "SPT_NOENV": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        timed_out = True
        try:
            _no_core_file(process.pid)
            timed_out = not _waited(process, log, limit_s, look)
        finally:
            _end_all(process, step, signal.SIGABRT if timed_out else signal.SIGTERM)
    return Ended(process.returncode, time.monotonic() - started, timed_out)


def end_of(log: Path, most: int) -> bytes:
    """The last bytes of a file, at most `most`."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def _no_core_file(pid: int) -> None:
    """A core file of a process with a GPU can fill the disk."""
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except OSError:  # it has ended
        return


def _waited(
    process: subprocess.Popen[bytes], log: Path, limit_s: float, look: Callable[[], None]
) -> bool:
    """Wait for the program; returns whether it ended within its limit."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            process.wait(max(0.0, min(LOOK_S, deadline - time.monotonic())))
            return True
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                return False
        if log.stat().st_size > MOST_BYTES:
            kept = end_of(log, KEPT_BYTES)
            os.truncate(log, 0)
            with log.open("ab") as output:
                output.write(kept)
        look()


def _end_all(process: subprocess.Popen[bytes], step: str, first: int) -> None:
    """Send a first signal to all that are left, and later SIGKILL to the rest."""
    for number, patience_s in ((first, POLITE_S), (signal.SIGKILL, KILLED_S)):
        deadline = time.monotonic() + patience_s
        members = members_of(step)
        _signal_all(members, number)
        while members and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.1)
            members = members_of(step)
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        return


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def members_of(step: str) -> list[int]:
    """Pids of living processes that carry the marker of a step."""
    wanted = f"{MARKER}={step}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found
