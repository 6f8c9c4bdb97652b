# SPDX-License-Identifier: Apache-2.0
"""Where the application gets its engines and metrics from: this process, or the keeper of several workers."""

from __future__ import annotations

from typing import Protocol

import aiohttp

from scheduler_plugins.router.client.tls import for_engines
from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine_set import Pool
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.settings.config import RouterConfig

REUSE_S = 0.5
"""Longest idle time after which a connection to an engine is used again. Where requests come less often, a new connection
costs little."""


class Backend(Protocol):
    """Where the application's engines and metrics come from."""

    def pool(self, config: RouterConfig, session: aiohttp.ClientSession, metrics: Metrics) -> Pool:
        """The engines; nothing has begun yet."""

    async def render(self, metrics: Metrics) -> bytes:
        """The answer of `/metrics`."""

    def started(self, shared: Shared) -> None:
        """The application is about to serve."""


class OneProcess:
    """`Backend` of a router that is one process."""

    def pool(self, config: RouterConfig, session: aiohttp.ClientSession, metrics: Metrics) -> Pool:
        return EnginePool(config, session, metrics)

    async def render(self, metrics: Metrics) -> bytes:
        return metrics.render()

    def started(self, shared: Shared) -> None:
        pass


def client_connections(config: RouterConfig) -> EngineConnections:
    """For clients' requests to engines. A connection is used again while it has been idle for `REUSE_S` at most: an engine ends
    an idle one at a moment the router cannot know (vLLM after 5 s), and a POST lost to that looks like a dying engine."""
    trusted = for_engines(config)
    tls = None if isinstance(trusted, bool) else trusted
    return EngineConnections(config.connect_timeout_s, REUSE_S, tls)


def watching_session(config: RouterConfig) -> aiohttp.ClientSession:
    """For looking after engines. Each request has a connection of its own, so that it also tells whether the engine takes new ones."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=for_engines(config)),
        timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
