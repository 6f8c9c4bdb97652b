# SPDX-License-Identifier: Apache-2.0
"""One worker as its keeper sees it: a process that is restarted when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.workers.link import Link, LinkClosedError, link_to_worker
from scheduler_plugins.router.workers.messages import (
    Family,
    FromKeeper,
    FromWorker,
    Listening,
)

logger = logging.getLogger(__name__)

MODULE = "scheduler_plugins.router.workers.worker"
STEADY_S = 10.0
"""A worker that served for at least this time is restarted at once. A worker that ends earlier is
restarted after a pause."""
LONGEST_PAUSE_S = 30.0


@dataclass(eq=False)
class Child:
    """The place of one worker. `run` keeps a process running in it."""

    row: int
    """The worker's row in the shared counts."""
    begin: Callable[[Child], Sequence[FromKeeper]]
    """The first messages to a new process."""
    heard: Callable[[Child, FromWorker], None]
    ended: Callable[[Child], None]
    """Called when the process has ended."""
    front: Mapping[str, Front] = field(default_factory=dict)
    """What waits in the worker's front queue, by its last report."""
    families: tuple[Family, ...] = ()
    """The worker's metrics, by its last report."""
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    _link: Link[FromWorker] | None = None
    _process: asyncio.subprocess.Process | None = None

    def send(self, message: FromKeeper) -> None:
        if self._link is not None:
            self._link.send(message)

    def send_encoded(self, content: bytes) -> None:
        if self._link is not None:
            self._link.send_encoded(content)

    async def run(self) -> None:
        """Start a process, and restart it whenever it ends, until cancelled."""
        loop, pause_s = asyncio.get_running_loop(), 0.0
        while True:
            begun_s = loop.time()
            try:
                status = await self._one()
            except OSError as error:  # out of memory, processes or files; a later try may succeed
                logger.error("worker %d cannot be started: %s", self.row, error)
                status = None
            pause_s = 0.0 if loop.time() - begun_s > STEADY_S else min(LONGEST_PAUSE_S, 2 * pause_s)
            logger.warning(
                "worker %d has ended (status %s): it is restarted in %g s",
                *(self.row, status, pause_s),
            )
            await asyncio.sleep(pause_s)
            pause_s = pause_s or 0.5

    async def _one(self) -> int | None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", MODULE, str(theirs.fileno()), pass_fds=(theirs.fileno(),)
                )
        except OSError:
            ours.close()
            raise
        link = self._link = await link_to_worker(ours)
        for first in self.begin(self):
            link.send(first)
        try:
            while True:
                message = await link.receive()
                if isinstance(message, Listening):
                    self.listening.set()
                self.heard(self, message)
        except LinkClosedError:
            pass
        except Exception:
            logger.exception("worker %d sent an unusable message, so it is ended", self.row)
            self._process.kill()
        finally:
            self._link = None
            self.listening.clear()
            link.close()
        status = await self._process.wait()
        self._process = None
        self.ended(self)
        return status

    def stop(self) -> None:
        """Let the worker finish its requests and end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def gone(self, limit_s: float) -> None:
        """Wait until the process has ended. After `limit_s` seconds, kill it."""
        if (process := self._process) is None:
            return
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
