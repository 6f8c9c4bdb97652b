# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a router, restarts workers that end, and ends all. It serves no client and watches no engine.

Workers are forks, so they share the memory of the code, and start at once. The supervisor therefore has no event loop
and no thread.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

from scheduler_plugins.router.client.admin_auth import AdminAuth
from scheduler_plugins.router.peer_routers.all_metrics import note_end
from scheduler_plugins.router.peer_routers.counts import clear_row, new_table
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.server import cannot_listen, say_running
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile
from scheduler_plugins.router.workers.worker import LISTENING, Pipes, work

logger = logging.getLogger(__name__)

STEADY_S = 10.0
"""A worker that served for at least this time is restarted at once. A worker that ends earlier is restarted after a
pause."""
LONGEST_PAUSE_S = 30.0
_GRACE_S = 5.0
_LOOK_S = 0.05
"""Pause between two looks whether a worker listens, or is due."""
_MOST_REASON_BYTES = 4096
_FORKS = get_context("fork")


def supervise(config: RouterConfig, settings: SettingsFile | None = None) -> None:
    """Run the router in several processes until SIGINT, SIGTERM or SIGHUP. Raises OSError if it cannot listen."""
    with ExitStack() as stack:
        ends = stack.enter_context(_awaited_signals())
        port = stack.enter_context(_reserved(config.host, config.port))
        admin_port = config.admin_port
        if admin_port is not None:
            admin_port = stack.enter_context(_reserved(config.admin_host, admin_port, "admin-"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-router-")))
        auth = AdminAuth(config.admin_key)
        each = replace(
            config,
            port=port,
            admin_port=admin_port,
            admin_key=auth.token,
            connections=-(-config.connections // config.workers),
            bodies_mib=max(config.body_mib, config.bodies_mib // config.workers),
        )
        supervisor = Supervisor(each, settings, folder)
        stack.callback(supervisor.close)
        gc.freeze()  # a collection would write to the pages that workers share
        supervisor.start()
        if not supervisor.until_listening(ends):
            return
        say_running(config, port)
        stack.enter_context(auth.published(config, port))
        supervisor.keep(ends)


@dataclass(eq=False)
class _Worker:
    """One worker's place, and the process in it."""

    number: int
    process: ForkProcess | None = None
    """None: no process runs."""
    report: int = -1
    """Our end of the pipe for `worker.Pipes.report`."""
    listens: bool = False
    reason: str = ""
    """Why it could not listen; empty: that is not known."""
    begun_s: float = 0.0
    due_s: float = 0.0
    """When it is started again, if no process runs."""
    pause_s: float = 0.0
    ends: int = 0
    """How often a process has ended."""


class Supervisor:
    """The workers of one router."""

    def __init__(self, config: RouterConfig, settings: SettingsFile | None, folder: Path) -> None:
        """Start nothing yet.

        Args:
            config: the settings of one worker.
            folder: for the workers' sockets and metrics.
        """
        self._config, self._settings, self._folder = config, settings, folder
        self._router_id = secrets.token_hex(8)
        self._counts = new_table(config.workers)
        self.workers = [_Worker(number) for number in range(config.workers)]
        # Workers wait at the other end: the system closes ours when this process ends, whatever its end.
        self._theirs, self._ours = os.pipe()

    def start(self) -> None:
        """Start all workers."""
        for worker in self.workers:
            self._start(worker)

    def until_listening(self, ends: set[signal.Signals]) -> bool:
        """Wait until all workers listen. Returns False if a signal ends the router first. Raises OSError: a worker cannot
        listen."""
        while not all(worker.listens for worker in self.workers):
            if _signal(ends, _LOOK_S):
                return False
            self._look()
            for worker in self.workers:
                if worker.reason:
                    raise OSError(worker.reason)
        return True

    def keep(self, ends: set[signal.Signals]) -> None:
        """Restart workers that end, until a signal ends the router."""
        while True:
            due = [worker.due_s for worker in self.workers if worker.process is None]
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            if not all(worker.listens for worker in self.workers):
                wait_s = _LOOK_S
            if _signal(ends, wait_s):
                return
            self._look()

    def close(self) -> None:
        """Let all workers finish their requests and end. Kill workers that exceed their time."""
        until_s = time.monotonic() + self._config.shutdown_timeout_s + _GRACE_S
        for worker in self.workers:
            if worker.process is not None:
                worker.process.terminate()
        for worker in self.workers:
            while worker.process is not None and not self._has_ended(worker):
                if time.monotonic() > until_s:
                    worker.process.kill()
                _signal(set(), _LOOK_S)
        for end in (self._ours, self._theirs):
            os.close(end)

    def _start(self, worker: _Worker) -> None:
        theirs, ours = -1, -1
        worker.begun_s, worker.listens = time.monotonic(), False
        try:
            ours, theirs = os.pipe()
            process = _FORKS.Process(target=self._work, args=(worker, ours, theirs))
            process.start()
        except OSError as error:  # out of memory, processes or files; a later try may succeed
            logger.error("worker %d cannot be started: %s", worker.number, error)
            for end in (ours, theirs):
                if end >= 0:
                    os.close(end)
            self._plan(worker)
            return
        os.close(theirs)
        os.set_blocking(ours, False)
        worker.process, worker.report = process, ours

    def _work(self, worker: _Worker, ours: int, theirs: int) -> None:
        """Be the worker. `ours`, `theirs`: the two ends of its pipe for reports."""
        for end in (self._ours, ours):
            os.close(end)
        place = WorkerPlace(
            self._router_id,
            self._folder,
            worker.number,
            len(self.workers),
            self._counts,
            worker.ends > 0,
        )
        config = self._config
        if not place.is_first:
            config = replace(config, admin_port=None)
        sys.exit(work(config, self._settings, place, Pipes(self._theirs, theirs)))

    def _read(self, worker: _Worker) -> None:
        """Read whether the worker listens."""
        try:
            report = os.read(worker.report, _MOST_REASON_BYTES)
        except BlockingIOError:
            return
        if report == LISTENING:
            worker.listens = True
            assert worker.process is not None
            logger.info("worker %d serves (process %s)", worker.number, worker.process.pid)
        elif report:  # nothing: the worker has ended, and its reason may have been read before
            worker.reason = report.decode(errors="replace")

    def _look(self) -> None:
        """Note which workers listen, and restart ended workers whose pause is over."""
        for worker in self.workers:
            if worker.process is not None and not worker.listens:
                self._read(worker)
            if worker.process is not None and self._has_ended(worker):
                self._plan(worker)
            if worker.process is None and time.monotonic() >= worker.due_s:
                self._start(worker)

    def _has_ended(self, worker: _Worker) -> bool:
        assert worker.process is not None
        if (status := worker.process.exitcode) is None:
            return False
        logger.warning("worker %d has ended (status %d)", worker.number, status)
        if not worker.listens:
            self._read(worker)
        os.close(worker.report)
        worker.process.close()
        note_end(self._folder, worker.number)
        clear_row(self._counts, worker.number)
        worker.process, worker.report, worker.listens, worker.ends = (
            None,
            -1,
            False,
            worker.ends + 1,
        )
        return True

    def _plan(self, worker: _Worker) -> None:
        """Set when the worker is started again."""
        now_s = time.monotonic()
        steady = now_s - worker.begun_s > STEADY_S
        wait_s = 0.0 if steady else min(LONGEST_PAUSE_S, worker.pause_s)
        worker.pause_s = 0.0 if steady else max(0.5, 2 * wait_s)
        worker.due_s = now_s + wait_s
        logger.warning("worker %d is started again in %g s", worker.number, wait_s)


def _signal(ends: set[signal.Signals], wait_s: float | None) -> bool:
    """Wait for a signal, `wait_s` at most (None: without a limit). Returns whether the router must end."""
    awaited = ends | {signal.SIGCHLD}
    if wait_s is None:
        return signal.sigwaitinfo(awaited).si_signo in ends
    received = signal.sigtimedwait(awaited, wait_s)
    return received is not None and received.si_signo in ends


@contextmanager
def _awaited_signals() -> Iterator[set[signal.Signals]]:
    """Block the signals that end the router, so that they wait until `_signal` takes them. Under `nohup` SIGHUP stays
    ignored."""
    ends = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.add(signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends | {signal.SIGCHLD})
    try:
        yield ends
    finally:
        while signal.sigtimedwait(ends, 0):
            pass  # a second Ctrl-C while the router ends
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _reserved(host: str, port: int, of: str = "") -> Iterator[int]:
    """The port, reserved for workers. Raises OSError if another process has it. `of`: as in `cannot_listen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        # Another router's workers could share the port with ours, so check first that it is free.
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            alone.bind((host, port))
        except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
            raise cannot_listen(host, port, error, of) from None
        if port:
            alone.listen(1)
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        yield held.getsockname()[1]
