# SPDX-License-Identifier: Apache-2.0
"""Serves the router on a socket, from start to end."""

import asyncio
import errno
import logging
import resource
import signal

from scheduler_plugins.router.client.admin_auth import AdminAuth, authority
from scheduler_plugins.router.client.listening import listen, runner_of
from scheduler_plugins.router.client.stopping import LAST_S
from scheduler_plugins.router.client.tls import for_clients
from scheduler_plugins.router.endpoints.admin import MOST_CONNECTIONS, create_admin
from scheduler_plugins.router.endpoints.app import create_app
from scheduler_plugins.router.endpoints.app_keys import (
    ADMIN_AUTH,
    CONNECTIONS,
    MOVER,
    SHARED,
    STOPPING,
)
from scheduler_plugins.router.engines.moving import Mover
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile

logger = logging.getLogger(__name__)

SOCKETS_PER_CONNECTION = 3
"""One connection of the client, and one to each of two engines."""
_OTHER_FILES = 64 + MOST_CONNECTIONS


class RouterServer:
    """The router listens inside the `async with` block. Leaving the block ends it; requests have
    `shutdown_timeout_s` to finish."""

    def __init__(
        self,
        config: RouterConfig,
        settings: SettingsFile | None = None,
        place: WorkerPlace | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            settings: the file that `config` came from, which is watched; None: there is no file.
            place: place of this process among the workers of the router, which listen on the same port; None: the
                router is one process.
        """
        self.config = config
        self.app = create_app(config, settings, place)
        self._shares_port = place is not None
        self.port = 0
        """The port that the router listens on."""
        self.admin_port = 0
        """The port of the admin API; 0: there is none."""
        self._admin: AdminServer | None = None
        self._runner = runner_of(self.app, config.shutdown_timeout_s + LAST_S)
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> "RouterServer":
        """Start to listen. Raises OSError if the address cannot be used."""
        config, connections = self.config, self.app[CONNECTIONS]
        connections.limit = _possible(config.connections)
        try:
            self._listener = await listen(
                self._runner,
                connections,
                config.host,
                config.port,
                encrypted=for_clients(config),
                shares_port=self._shares_port,
            )
        except (OSError, UnicodeError) as error:
            raise cannot_listen(config.host, config.port, error) from None
        self.port = self._listener.sockets[0].getsockname()[1]
        if config.admin_port is not None:
            pool = self.app[SHARED].pool
            self._admin = AdminServer(config, pool, self.app[MOVER], self.app[ADMIN_AUTH])
            try:
                self.admin_port = await self._admin.start(
                    config.admin_port, shares_port=self._shares_port
                )
            except OSError:
                await self.close()
                raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening, and end all tasks. Can be called twice."""
        if self._listener is not None:
            self._listener.close()
        if self._admin is not None:
            await self._admin.close()
        self.app[STOPPING].begin(self.config.shutdown_timeout_s)
        await self._runner.cleanup()


class AdminServer:
    """The admin API on its port."""

    def __init__(
        self, config: RouterConfig, pool: EnginePool, mover: Mover, operator: AdminAuth
    ) -> None:
        self._config = config
        app = create_admin(pool, mover, operator, config.admin_host)
        self.connections = app[CONNECTIONS]
        self._runner = runner_of(app, 1.0)
        self._listener: asyncio.Server | None = None

    async def start(self, port: int, *, shares_port: bool) -> int:
        """Start to listen. Returns the port. Raises OSError."""
        host = self._config.admin_host
        try:
            self._listener = await listen(
                self._runner, self.connections, host, port, shares_port=shares_port
            )
        except (OSError, UnicodeError) as error:
            raise cannot_listen(host, port, error, "admin-") from None
        bound: int = self._listener.sockets[0].getsockname()[1]
        logger.info("Admin API on http://%s", authority(host, bound))
        return bound

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


def cannot_listen(host: str, port: int, error: Exception, of: str = "") -> OSError:
    """The error of an address on which the router cannot listen: what is wrong with it, and what to do.

    Args:
        of: how the names of its options begin; empty: clients come there.
    """
    do = {
        errno.EADDRINUSE: f"another program listens there; take another port with --{of}port",
        errno.EADDRNOTAVAIL: f"this machine has no such address; name one of its own with --{of}host",
        errno.EACCES: f"the system does not permit this port; take one above 1023 with --{of}port",
    }
    place = f"{authority(host, port)} (admin API)" if of else authority(host, port)
    return OSError(f"{place}: {do.get(getattr(error, 'errno', None) or 0, error)}")


async def serve(config: RouterConfig, settings: SettingsFile | None = None) -> None:
    """Run the router until SIGINT, SIGTERM or SIGHUP. Raises OSError if it cannot listen."""
    ended = on_signals()
    async with RouterServer(config, settings) as server:
        say_running(config, server.port)
        with server.app[ADMIN_AUTH].published(config, server.port):
            await ended.wait()


def on_signals() -> asyncio.Event:
    """An event that is set once SIGINT, SIGTERM or SIGHUP has come. SIGHUP would otherwise cut all streams; under
    `nohup` it is ignored."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        loop.add_signal_handler(number, ended.set)
    return ended


def say_running(config: RouterConfig, port: int) -> None:
    """Log the address where clients are served."""
    scheme = "https" if config.tls_cert else "http"
    logger.info("Running on %s://%s", scheme, authority(config.host, port))


def _possible(connections: int) -> int:
    """Number of connections that the limit of open files allows, at most `connections`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections * SOCKETS_PER_CONNECTION + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    possible = max(1, (soft - _OTHER_FILES) // SOCKETS_PER_CONNECTION)
    logger.warning(
        "connections %d: only %d are possible with a limit of %d open files; raise the limit (ulimit -n)",
        connections,
        possible,
        soft,
    )
    return possible
