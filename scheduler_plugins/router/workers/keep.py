# SPDX-License-Identifier: Apache-2.0
"""Runs the router in several processes, from start to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from scheduler_plugins.router.elastic.task import Elastic
from scheduler_plugins.router.endpoints.backend import watching_session
from scheduler_plugins.router.engines.moving import Mover
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.exchanging import exchanging
from scheduler_plugins.router.reload import reloading
from scheduler_plugins.router.server import AdminServer, cannot_listen, on_signals, say_running
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile
from scheduler_plugins.router.tracing import Tracing
from scheduler_plugins.router.workers.supervisor import Supervisor

_GRACE_S = 5.0


async def keep(config: RouterConfig, settings: SettingsFile | None = None) -> None:
    """Run the router in several processes until SIGINT, SIGTERM or SIGHUP. Raises OSError if it cannot listen."""
    ended = on_signals()
    metrics = Metrics()
    with _reserved(config) as port:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(watching_session(config))
            keeper = Supervisor(config, metrics)
            stack.callback(keeper.close)
            keeper.port = port
            keeper.pool = EnginePool(config, session, metrics, keeper.caches, keeper.changed.set)
            stack.push_async_callback(keeper.pool.close)
            await keeper.pool.start()
            tracing = Tracing(config.otlp)
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            mover = Mover(keeper.pool, tracing)
            await stack.enter_async_context(Elastic(keeper.pool, mover, keeper.waiting).running())
            if config.admin_port is not None:
                admin = AdminServer(config, keeper.pool, mover, keeper.operator)
                stack.push_async_callback(admin.close)
                await admin.start(config.admin_port)
            if settings is not None:
                await stack.enter_async_context(reloading(settings, keeper.use))
            await stack.enter_async_context(
                exchanging(config, keeper.counts, keeper.slots, keeper.pool, keeper.sent, metrics)
            )
            tasks = [asyncio.create_task(keeper.tell(), name="tell the workers")]
            tasks += [
                asyncio.create_task(child.run(), name=f"worker {child.row}")
                for child in keeper.children
            ]
            stack.push_async_callback(_end, keeper, tasks, config.shutdown_timeout_s)
            serving = asyncio.create_task(_all_listen(keeper, config, port))
            tasks.append(serving)
            await ended.wait()


async def _all_listen(keeper: Supervisor, config: RouterConfig, port: int) -> None:
    """Once all workers listen, log the router's address. Runs until cancelled."""
    for child in keeper.children:
        await child.listening.wait()
    say_running(config, port)
    with keeper.operator.published(config, port):
        await asyncio.Event().wait()


async def _end(keeper: Supervisor, tasks: list[asyncio.Task[None]], limit_s: float) -> None:
    for task in tasks:
        task.cancel()
    for child in keeper.children:
        child.stop()
    await asyncio.gather(*(child.gone(limit_s + _GRACE_S) for child in keeper.children))
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _reserved(config: RouterConfig) -> Iterator[int]:
    """The port, reserved for the workers. Raises OSError if another process has it."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        # Another router's workers could share the port with ours, so check first that it is free.
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            alone.bind((config.host, config.port))
        except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
            raise cannot_listen(config.host, config.port, error) from None
        if config.port:
            alone.listen(1)
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((config.host, config.port))
        yield held.getsockname()[1]
