# SPDX-License-Identifier: Apache-2.0
"""Starts ranks within a tenth of a second, by forking a process that has imported everything.

`python -m chaos.nursery SOCKET` is that process. It obeys calls (`bench/party.py`). Python and torch take seconds of
CPU time to start, and each fault that kills a rank needs a new rank.
"""

import ctypes
import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import zmq

from chaos.agent import ChaosAgent
from chaos.known import LAYERS, content
from pd_bench.netns import Namespace
from pd_bench.party import obey
from pd_bench.wire.pair import PartyProcess
from pd_connector.tools.launch import Family
from pd_connector.tools.launch.engine import LINK_ONLY

START_S = 300.0
_FOLDER = str(Path(__file__).resolve().parents[1])
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_MOST_DESCRIPTORS = 1 << 12
_NAMESPACES = Path("/run/netns")


class Forked:
    """A rank as its launcher sees it. The rank is the child of another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = -1  # it has ended
        with suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)

    @property
    def returncode(self) -> int | None:
        """None while the rank runs. Its real exit code is not known here."""
        if self._handle >= 0 and select.select([self._handle], [], [], 0)[0]:
            self._forget()
        return None if self._handle >= 0 else 0

    def pause(self) -> None:
        """Stop the rank (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the rank go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the rank at once (SIGKILL), and wait until it is gone. Can be repeated."""
        self._signal(signal.SIGKILL)
        if self._handle >= 0:
            select.select([self._handle], [], [])
            self._forget()

    def _signal(self, number: int) -> None:
        if self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def _forget(self) -> None:
        os.close(self._handle)
        self._handle = -1


class Nursery:
    """Inside the `with` block any thread can start ranks. They end with the block.

    Raises:
        BenchError: on entry and later, when the process that forks fails.
    """

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="pd-chaos-")
            self._folder = Path(stack.enter_context(folder))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.destroy, linger=0)
            path, log = self._folder / "nursery", self._folder / "nursery.log"
            found = os.pathsep.join(filter(None, (_FOLDER, os.environ.get("PYTHONPATH"))))
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": found}
            command = [sys.executable, "-m", "chaos.nursery", str(path)]
            family = Family(command, env=env, log=log)
            self._forks = stack.enter_context(PartyProcess(family, context, path, log))
            self._forks.call("ready", START_S)
            self._calling = threading.Lock()
            self._started = 0
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        settings: Mapping[str, Any],
        namespace: Namespace | None = None,
    ) -> PartyProcess:
        """Start a rank. It need not be ready when this returns.

        Args:
            context: context of the socket over which the rank is called.
            settings: the arguments of `ChaosAgent`.
            namespace: network namespace of the rank; None for this process's.
        """
        with self._calling:
            self._started += 1
            path = self._folder / f"rank-{self._started}"
            log = path.with_suffix(".log")
            pid = self._forks.call(
                "start",
                path=str(path),
                log=str(log),
                settings=json.dumps(dict(settings)),
                namespace=namespace.name if namespace else "",
            )
        return PartyProcess(Forked(pid), context, path, log)

    def kill(self) -> None:
        """End every rank at once."""
        self._forks.family.kill()


class _Forks:
    """The process that forks. Its public methods are the calls."""

    def ready(self) -> None:
        """Answer when everything has been imported."""

    def start(self, path: str, log: str, settings: str, namespace: str) -> int:
        """Start a rank that obeys calls at `path`; returns its pid."""
        pid = os.fork()
        if pid:
            return pid
        try:
            _detach(log)
            if namespace:
                _enter(namespace)
            obey(ChaosAgent(**json.loads(settings)), path)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _detach(log: str) -> None:
    """Keep only the memory of the process that forked, and end with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.closerange(3, _MOST_DESCRIPTORS)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _enter(namespace: str) -> None:
    """Move this process to a network namespace. It uses only the link of that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    if libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"network namespace {namespace} cannot be entered")
    os.close(handle)
    os.environ.update(LINK_ONLY)


def main(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for ranks that have ended
    for layer in range(LAYERS):
        content(layer)
    gc.collect()
    gc.freeze()  # so ranks continue to share this memory
    obey(_Forks(), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
