# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.router.workers.worker FD`: one worker, started by the keeper."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from itertools import count
from mmap import mmap

import aiohttp

from scheduler_plugins.router.endpoints.backend import Backend
from scheduler_plugins.router.engines.engine_set import Pool
from scheduler_plugins.router.loop import run
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.counts import SharedCounts
from scheduler_plugins.router.peer_routers.memory import attach
from scheduler_plugins.router.reload import use_settings
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.workers import messages
from scheduler_plugins.router.workers.link import Link, LinkClosedError, link_to_keeper
from scheduler_plugins.router.workers.merging import families_of
from scheduler_plugins.router.workers.messages import FromKeeper
from scheduler_plugins.router.workers.mirror import MirrorPool

logger = logging.getLogger(__name__)

METRICS_LIMIT_S = 5.0
"""Longest wait for the metrics of all processes. After that, the worker returns its own."""


class Worker(Backend):
    """`Backend` of a worker's application: engines and metrics come from the keeper."""

    def __init__(self, link: Link[FromKeeper], begin: messages.Begin, counts: mmap) -> None:
        self._link = link
        self._counts = SharedCounts(counts, begin.row)
        self._pool: MirrorPool | None = None
        self._shared: Shared | None = None
        self._metrics: Metrics | None = None
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count()

    def pool(self, config: RouterConfig, session: aiohttp.ClientSession, metrics: Metrics) -> Pool:
        self._metrics = metrics
        self._pool = MirrorPool(self._link, self._counts, metrics)
        return self._pool

    async def render(self, metrics: Metrics) -> bytes:
        number = next(self._numbers)
        found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = found
        self._link.send(messages.MetricsWanted(number))
        try:
            async with asyncio.timeout(METRICS_LIMIT_S):
                return await found
        except TimeoutError:
            logger.warning("the keeper did not send the metrics within %g s", METRICS_LIMIT_S)
            return metrics.render()
        finally:
            del self._asked[number]

    def started(self, shared: Shared) -> None:
        assert self._pool is not None
        self._shared, self._pool.waiting = shared, shared.waiting
        self._listening = asyncio.create_task(self.listen(), name="what the keeper says")

    async def listen(self) -> None:
        """Handle the keeper's messages. Ends when the keeper has ended."""
        try:
            while True:
                self._do(await self._link.receive())
        except LinkClosedError:
            logger.info("the keeper has ended")
        except Exception:
            logger.exception("a message of the keeper cannot be used, so this worker ends")
        os.kill(os.getpid(), signal.SIGTERM)

    def _do(self, message: FromKeeper) -> None:
        assert self._pool is not None
        assert self._shared is not None
        assert self._metrics is not None
        if isinstance(message, messages.Engines):
            self._pool.use(message)
        elif isinstance(message, messages.Beats):
            self._metrics.pulse.use(message.beats)
        elif isinstance(message, messages.Configured):
            use_settings(self._shared, message.config)
        elif isinstance(message, messages.SamplesWanted):
            families = families_of(self._metrics.registry)
            self._link.send(messages.Samples(message.number, families))
        elif isinstance(message, messages.Metrics):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message.text)


async def work(end: socket.socket) -> None:
    """Serve clients until the keeper ends or sends SIGTERM."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    # A terminal sends these to all processes. Only the keeper acts on them.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    link = await link_to_keeper(end)
    begin = await link.receive()
    assert isinstance(begin, messages.Begin), begin
    logging.getLogger().setLevel(begin.log_level)
    worker = Worker(link, begin, attach(begin.counts, write=True))
    async with RouterServer(begin.config, backend=worker):
        link.send(messages.Listening(os.getpid()))
        await ended.wait()
    link.close()


def main() -> int:
    """Run one worker. Returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s [{os.getpid()}] %(message)s"
    )
    end = socket.socket(fileno=int(sys.argv[1]))
    try:
        run(work(end))
    except LinkClosedError:
        return 1
    except OSError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
