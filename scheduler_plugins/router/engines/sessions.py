# SPDX-License-Identifier: Apache-2.0
"""How the router connects to engines: for requests of clients, and to watch them."""

from __future__ import annotations

import aiohttp

from scheduler_plugins.router.client.tls import for_engines
from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.lookup import Names
from scheduler_plugins.router.settings.config import RouterConfig

CONNECT_S = 5.0
"""Longest time to open a connection to an engine. It is long enough for two lost packets (TCP repeats them after 1 s and
3 s)."""
REUSE_S = 0.5
"""A connection to an engine is used again if it was idle for at most this time. If requests are rarer, new
connections cost little."""


def client_connections(config: RouterConfig) -> EngineConnections:
    """Connections for clients' requests to engines. A connection is used again only if it was idle for at most
    `REUSE_S`. Engines close idle connections at a time that the router cannot know (vLLM after 5 s). A POST that is
    lost that way would look like a dying engine."""
    trusted = for_engines(config)
    tls = None if isinstance(trusted, bool) else trusted
    return EngineConnections(CONNECT_S, REUSE_S, tls)


def watching_session(config: RouterConfig) -> aiohttp.ClientSession:
    """A session for watching engines. Each request opens a new connection, so it also tests that the engine accepts
    connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            force_close=True,
            ssl=for_engines(config),
            resolver=Names(),
            use_dns_cache=False,  # `Names` keeps addresses
        ),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
