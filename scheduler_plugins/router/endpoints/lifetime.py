# SPDX-License-Identifier: Apache-2.0
"""What lives as long as the application: its engines, and the task that follows the settings file."""

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from scheduler_plugins.router.elastic.task import Elastic
from scheduler_plugins.router.endpoints.app_keys import CONFIG, METRICS, MOVER, PLACE, SHARED
from scheduler_plugins.router.engines.moving import Mover
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.sessions import client_connections, watching_session
from scheduler_plugins.router.peer_routers.exchanging import exchanging
from scheduler_plugins.router.reload import reloading, route_policy, use_settings
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile
from scheduler_plugins.router.tokens.prompt_tokens import PromptTokens
from scheduler_plugins.router.tracing import Tracing


async def engines(app: web.Application) -> AsyncIterator[None]:
    """The engines and what requests share, from the application's start to its end."""
    config = app[CONFIG]
    async with watching_session(config) as watching:
        connections, metrics = client_connections(config), app[METRICS]
        pool = EnginePool(config, watching, metrics)
        policy = route_policy(config, metrics)
        tokens = PromptTokens(connections, pool.all_up, config.tokenizer, config.api_key)
        tracing = Tracing(config.otlp)
        shared = Shared(config, pool, connections, metrics, policy, tokens, tracing)
        app[SHARED], app[MOVER] = shared, Mover(pool, tracing)
        try:
            await pool.start()
            async with (
                exchanging(config, pool, metrics, app[PLACE], shared.waiting) as peers,
                Elastic(pool, app[MOVER], peers.waiting).running(),
            ):
                yield
        finally:
            await tokens.close()
            await pool.close()
            await connections.close()
            await asyncio.to_thread(tracing.close)


async def following(app: web.Application, settings: SettingsFile) -> AsyncIterator[None]:
    """Applies the settings file whenever it changes."""
    shared = app[SHARED]

    def use(config: RouterConfig) -> None:
        use_settings(shared, config)
        shared.pool.edit(config)

    async with reloading(settings, use):
        yield
