# SPDX-License-Identifier: Apache-2.0
"""Runs the exchange with other workers and routers beside the application."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.load_exchange import PeerRouters
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.settings.config import RouterConfig


@asynccontextmanager
async def exchanging(
    config: RouterConfig,
    pool: EnginePool,
    metrics: Metrics,
    place: WorkerPlace | None,
    waiting: Callable[[], Mapping[str, Front]],
) -> AsyncIterator[PeerRouters]:
    """Exchange load inside the block, if the router has several workers or the settings name other routers.

    Raises:
        OSError: the address `exchange` cannot be bound.
    """
    peers = PeerRouters(pool, metrics, key=config.router_key, place=place, waiting=waiting)
    if not (config.exchange or config.fellows or place):
        yield peers
        return
    task = asyncio.create_task(peers.run(config.exchange, config.fellows), name="load exchange")
    await asyncio.sleep(0)
    if task.done():
        error = task.exception()
        do = {
            errno.EADDRINUSE: "another program listens there; take another port with --exchange",
            errno.EADDRNOTAVAIL: "this machine has no such address; name one of its own with --exchange",
        }
        raise OSError(
            f"{config.exchange} (exchange): {do.get(getattr(error, 'errno', None) or 0, error)}"
        )
    try:
        await peers.introduced()
        yield peers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
