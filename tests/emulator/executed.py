# SPDX-License-Identifier: Apache-2.0
"""Cases executed in processes of their own, because kernels may be interpreted in that of the tests. They are forks of
one process for each Triton, which imports and compiles once what all need."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


def executed(
    *names: str, seed: int = 0, arguments: Sequence[str] = (), triton: Path | None = None
) -> dict[str, Any]:
    """What was wrong with each case; "" for a case that was right.

    Args:
        arguments: more of the command's, see `__main__.py`.
        triton: folder of another Triton than this environment's.
    """
    server, log = _server(triton)
    with tempfile.NamedTemporaryFile("r") as answer:
        _ask(server, [answer.name, *names, f"--seed={seed}", *arguments])
        status = server.stdout.readline().strip() if server.stdout else ""
        lines = answer.read().splitlines()
    log.seek(0)
    assert status == "0", "\n".join([*log.read().splitlines(), *lines])[-3000:]
    told = json.loads(lines[-1])  # behind what engines log
    assert triton is None or triton.name.endswith(told["triton"])
    found: dict[str, Any] = told["cases"]
    return found


def _ask(server: subprocess.Popen[str], arguments: list[str]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps(arguments) + "\n")
    server.stdin.flush()


def _end(server: subprocess.Popen[str]) -> None:
    """With the case that it executes: one that hangs would keep this process for ever."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@functools.cache
def _server(triton: Path | None) -> tuple[subprocess.Popen[str], IO[str]]:
    """A process that executes cases until its input ends, and what it has logged."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [triton, ROOT, ROOT / "kernels", environment.get("PYTHONPATH")]
    # A case is a fork, in which torch would wait for threads of its parent.
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    command = [sys.executable, "-m", "tests.emulator", "--serve"]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is closed when this process ends
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    server = subprocess.Popen(
        command, **pipes, text=True, env=environment, cwd=ROOT, process_group=0
    )
    atexit.register(_end, server)
    return server, log
