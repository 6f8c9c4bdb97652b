# SPDX-License-Identifier: Apache-2.0
"""Where the application gets its engines and metrics from: this process, or the keeper of several workers."""

from __future__ import annotations

from typing import Protocol

import aiohttp

from scheduler_plugins.router.config import RouterConfig
from scheduler_plugins.router.engine_set import Pool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.pool import EnginePool
from scheduler_plugins.router.shared import Shared
from scheduler_plugins.router.tls import for_engines


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


def client_session(config: RouterConfig) -> aiohttp.ClientSession:
    """For the router's requests to engines."""
    return aiohttp.ClientSession(
        # A connection per request: an engine ends an idle one at a moment the router cannot know,
        # and a POST lost to that looks like a dying engine.
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=for_engines(config)),
        timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
