# SPDX-License-Identifier: Apache-2.0
"""How the router listens for HTTP: every port of it has the same limits."""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web

from scheduler_plugins.router.client.connections import HEADERS_S, ConnectionLimit
from scheduler_plugins.router.client.faults import ServerLog


def runner_of(app: web.Application, shutdown_s: float) -> web.AppRunner:
    """Serves the application. Nothing that a client sends leaves a traceback in the log.

    Args:
        shutdown_s: time that open requests have once it is stopped.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,  # decompressed bytes are counted where a body is read
        access_log=None,
        logger=ServerLog(),
        shutdown_timeout=shutdown_s,
    )


async def listen(
    runner: web.AppRunner,
    connections: ConnectionLimit,
    host: str,
    port: int,
    *,
    encrypted: ssl.SSLContext | None = None,
    shares_port: bool = False,
) -> asyncio.Server:
    """Listen with a limit of connections, and of time for the headers of the first request.

    The application must call `ConnectionLimit.headers_arrived` for each request.

    Raises:
        OSError, UnicodeError: the address cannot be used. The runner is cleaned up.
    """
    await runner.setup()
    assert runner.server is not None
    try:
        return await asyncio.get_running_loop().create_server(
            connections.wrap(runner.server),
            host,
            port,
            backlog=1024,
            ssl=encrypted,
            ssl_handshake_timeout=HEADERS_S if encrypted else None,
            reuse_port=shares_port or None,
        )
    except (OSError, UnicodeError):  # UnicodeError: the host is not a valid name
        await runner.cleanup()
        raise
