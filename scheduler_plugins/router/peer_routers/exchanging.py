# SPDX-License-Identifier: Apache-2.0
"""Runs the exchange with other routers beside the application."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.counts import SharedCounts, words_for
from scheduler_plugins.router.peer_routers.load_exchange import PeerRouters
from scheduler_plugins.router.peer_routers.memory import WORD_BYTES
from scheduler_plugins.router.peer_routers.slots import EngineSlots
from scheduler_plugins.router.settings.config import RouterConfig


@asynccontextmanager
async def exchanging(
    config: RouterConfig,
    counts: SharedCounts,
    slots: EngineSlots,
    pool: EnginePool,
    own: Callable[[BackendEngine], list[float]],
    metrics: Metrics,
) -> AsyncIterator[None]:
    """Exchange load with other routers inside the block, if the settings name any.

    Raises:
        OSError: the address `exchange` cannot be bound.
    """
    if not (config.exchange or config.fellows):
        yield
        return
    fellows = PeerRouters(counts, slots, pool, own, config.router_key, metrics)
    task = asyncio.create_task(fellows.run(config.exchange, config.fellows), name="fellows")
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
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def exchanging_alone(
    config: RouterConfig, pool: EnginePool, metrics: Metrics
) -> AbstractAsyncContextManager[None]:
    """As `exchanging`, for a router with a single process."""
    counts = SharedCounts(bytearray(WORD_BYTES * words_for(0)), None)

    def own(engine: BackendEngine) -> list[float]:
        return list(engine.load.counts())

    return exchanging(config, counts, EngineSlots(counts), pool, own, metrics)
