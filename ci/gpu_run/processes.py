# SPDX-License-Identifier: Apache-2.0
"""A program with a time limit, ended with all its child processes."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MARKER = "PD_CONNECTOR_GPU_STEP"
"""Environment variable that marks the descendants of a step, because engines leave its process group."""

POLITE_S = 10.0


class Ended(NamedTuple):
    """The end of a program."""

    returncode: int
    seconds: float
    timed_out: bool


def run_limited(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path, limit_s: float
) -> Ended:
    """Run a program, and end all processes that it leaves behind.

    Args:
        command: program and arguments.
        cwd: its folder.
        env: the program's whole environment.
        log: file for the output of the program and its descendants; overwritten.
        limit_s: seconds after which the program is ended.
    """
    step = uuid.uuid4().hex
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            # SPT_NOENV: engines rename themselves, and would overwrite the environment in /proc.
            env={**env, MARKER: step, "SPT_NOENV": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            process.wait(limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_all(process, step)
    return Ended(process.returncode, time.monotonic() - started, timed_out)


def _end_all(process: subprocess.Popen[bytes], step: str) -> None:
    """Send SIGTERM to all that are left, and later SIGKILL to the rest."""
    deadline = time.monotonic() + POLITE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = members_of(step)
        _signal_all(members, number)
        while members and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.1)
            members = members_of(step)
    process.wait()


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
