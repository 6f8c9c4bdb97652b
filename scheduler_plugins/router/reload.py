# SPDX-License-Identifier: Apache-2.0
"""The task that applies the settings file whenever it changes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.fallback import Fallback
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import AT_START, SettingsError, SettingsFile

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Pause between two checks of the file."""


@asynccontextmanager
async def reloading(
    settings: SettingsFile, use: Callable[[RouterConfig], None]
) -> AsyncIterator[None]:
    """Watch the file inside the block, and call `use` with each new version."""
    task = asyncio.create_task(_reload(settings, use), name="watch the settings file")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def use_settings(shared: Shared, config: RouterConfig) -> None:
    """Use these settings for new requests."""
    old, shared.config = shared.config, config
    policies = config.route_policy, config.decode_policy
    if (old.route_policy, old.decode_policy) != policies:
        shared.policy = route_policy(config, shared.metrics)


def route_policy(config: RouterConfig, metrics: Metrics) -> Fallback:
    """A new policy object, as the settings name it."""
    name = config.route_policy

    def count(cause: str) -> None:
        metrics.policy_faults.labels(name, cause).inc()

    return Fallback(name, config.decode_policy, count)


async def _reload(settings: SettingsFile, use: Callable[[RouterConfig], None]) -> None:
    first = settings.current
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            config = settings.changed()
        except SettingsError as error:
            logger.error("the changed settings cannot be used, so the old settings stay: %s", error)
            continue
        if config is None:
            continue
        try:
            use(config)
        except Exception:
            # Keep watching, because the next edit may be right.
            logger.exception("the changed settings cannot be used")
            continue
        later = [name for name in AT_START if getattr(config, name) != getattr(first, name)]
        if later:
            logger.warning(
                "%s: the change takes effect when the router is restarted", ", ".join(later)
            )
        logger.info("the settings have changed")
