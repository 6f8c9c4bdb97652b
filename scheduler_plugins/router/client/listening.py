# SPDX-License-Identifier: Apache-2.0
"""How the router listens for HTTP: every port has the same limits, and no invalid request leaves a traceback."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from scheduler_plugins.router.client.connections import HEADERS_S, ConnectionLimit


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


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, without a traceback for each invalid request. Any client could fill the disk with tracebacks,
    and they would look like failures of the router. The client gets the error."""

    def __init__(self) -> None:
        super().__init__(server_logger)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            first_line = " ".join(str(exc_info).split())[:200]
            self.debug(f"{msg}: %s", *args, first_line)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)
