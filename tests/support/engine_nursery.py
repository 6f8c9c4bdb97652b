# SPDX-License-Identifier: Apache-2.0
"""Starts engines for tests within a second or two: as forks of a process that has imported the engine.

An engine's start is mostly that import, once in each of its processes: 8 of 10 seconds of a core each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from pd_connector.config import CONFIG_VARIABLE
from pd_connector.tools.launch import engine, proc, sglang
from pd_connector.tools.launch.engine import on_cpu
from pd_connector.tools.launch.family import launcher_id
from pd_connector.tools.launch.sglang import sglang_on_cpu
from support import engine_forks

START_S = 600.0


class Variables(NamedTuple):
    """What an engine's environment may be, if it is to be forked.

    Attributes:
        fixed: what libraries read while they are imported, and what it must be.
        late: what is read only when the engine runs; each engine has its own.
    """

    fixed: Mapping[str, str]
    late: frozenset[str]


VARIABLES = {
    "vllm": Variables(
        {
            **engine.CPU_ENVIRONMENT,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        },
        frozenset(
            {
                "PD_CONNECTOR_SHM",
                "PD_KERNELS_MLA",
                "PYTHONPATH",
                # A test that builds a model sets it.
                "TORCHINDUCTOR_CACHE_DIR",
                "TORCH_COMPILE_DISABLE",
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
                "VLLM_CACHE_ROOT",
                "VLLM_ENABLE_V1_MULTIPROCESSING",
                "VLLM_SERVER_DEV_MODE",
                "VLLM_SSM_CONV_STATE_LAYOUT",
                "VLLM_USE_V2_MODEL_RUNNER",
                # Imports read it for caches that engines of tests do not use.
                "XDG_CACHE_HOME",
            }
        ),
    ),
    "sglang": Variables(
        {
            **sglang.CPU_ENVIRONMENT,
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        },
        frozenset(
            {
                CONFIG_VARIABLE,
                "PD_CONNECTOR_SHM",
                "PD_SCHEDULER_CONFIG",
                "PD_TEST_FAULTS",
                "PYTHONPATH",
                "SGLANG_CPU_OMP_THREADS_BIND",
                "SGLANG_DISABLED_MODEL_ARCHS",
                "SGLANG_MAMBA_CONV_DTYPE",
                # A test that builds a model sets it.
                "TORCHINDUCTOR_CACHE_DIR",
            }
        ),
    ),
}
_ALWAYS = {"SPT_NOENV": "1"}  # as every family has it
_OWN = ("TRITON_INTERPRET",)
"""Variables that imports read, and that engines may have: those that have one are forks of a process that has it."""
_IMPORTED_FIRST = ("sitecustomize.py", "vllm", "torchvision")
"""A folder of `PYTHONPATH` that has one of these decides what an engine imports."""
_LATE = {proc.MARKER, "PYTEST_CURRENT_TEST"}


class Forked:
    """The first process of a forked engine, as `subprocess.Popen` shows one. Its parent is the nursery."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._look(0)

    def wait(self) -> int:
        """Wait until it has ended. Returns how."""
        code = self._look(None)
        assert code is not None
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGTERM)

    def _look(self, timeout_ms: int | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._handle, select.POLLIN)
            if waiting.poll(timeout_ms):
                self.returncode = self._nursery.ask({"ended": self.pid})
                os.close(self._handle)
        return self.returncode


class Nursery:
    """The process that forks engines of one kind, as tests see it. It ends with this process.

    Args:
        own: variables of these engines that imports read (`read_by_imports`).
    """

    def __init__(self, kind: str, python: str, own: Mapping[str, str]) -> None:
        self._variables = VARIABLES[kind]
        self.server = engine_forks.KINDS[kind].server
        self.environment = {**os.environ, **_ALWAYS, **self._variables.fixed, **own}
        self._asking = threading.Lock()
        self._calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._calls.settimeout(START_S)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-P", engine_forks.__file__, kind],
                stdin=theirs,
                env=self.environment
                | {proc.MARKER: launcher_id().ljust(engine_forks.MARKER_BYTES, ":")},
                process_group=0,
            )

    def unlike(self, env: Mapping[str, str]) -> set[str]:
        """Variables because of which an engine with this environment cannot be forked here."""
        own = {
            name
            for name in self.environment.keys() | env.keys()
            if self.environment.get(name) != env.get(name)
        }
        return own - self._variables.late - _LATE

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: int) -> Forked:
        """Start an engine. What it prints goes to the open file `log`."""
        call = {"argv": [*argv], "env": {**env}, "folder": os.getcwd()}
        return Forked(self, self.ask(call, log))

    def ask(self, call: Mapping[str, Any], *files: int) -> int:
        """Make one call, and return its answer."""
        with self._asking:
            socket.send_fds(self._calls, [json.dumps(call).encode()], files)
            answer = self._calls.recv(engine_forks.MOST_BYTES)
        if not answer:
            raise RuntimeError(
                f"the process that forks engines ended with code {self._process.wait()}: see its output above"
            )
        return int(answer)


@cache
def nursery(kind: str, python: str, own: tuple[tuple[str, str], ...] = ()) -> Nursery:
    """The nursery of this test session, started when it is first asked for."""
    return Nursery(kind, python, dict(own))


def read_by_imports(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables because of which an engine is forked of another process than the usual one."""
    own = [(name, env[name]) for name in _OWN if name in env]
    folders = [
        folder
        for folder in env.get("PYTHONPATH", "").split(os.pathsep)
        if folder and any(Path(folder, name).exists() for name in _IMPORTED_FIRST)
    ]
    return tuple(own + [("PYTHONPATH", os.pathsep.join(folders))] * bool(folders))


def fork_engine(
    command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **others: Any
) -> Forked | subprocess.Popen[bytes]:
    """`Service.popen` of engines of tests. A CPU build in the environment of its kind is forked; all else is started.

    Raises:
        ValueError: an import reads a variable of this engine: it would be ignored in a fork. A test that needs it
            has an engine that is not forked.
    """
    kind = _kind(command)
    if kind is None:
        return subprocess.Popen(command, env=env, stdout=stdout, **others)
    forks = nursery(kind, command[0], read_by_imports(env))
    if unlike := forks.unlike(env):
        raise ValueError(
            f"variables {sorted(unlike)} differ from those of the process that engines are forked of: name them in "
            "VARIABLES if only a running engine reads them, else start the engine without `fork_engine`"
        )
    return forks.start(command[3:], env, stdout.fileno())


def _kind(command: Sequence[str]) -> str | None:
    """The kind of engine that a command starts, if it can be forked."""
    python, server = command[0], command[2]
    if server == engine_forks.KINDS["vllm"].server and python == sys.executable and on_cpu():
        return "vllm"
    if server == engine_forks.KINDS["sglang"].server and sglang_on_cpu(python):
        return "sglang"
    return None
