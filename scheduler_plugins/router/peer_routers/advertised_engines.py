# SPDX-License-Identifier: Apache-2.0
"""The list of engines that the workers of a router send each other.

An operator changes it at one worker, and each worker reads the settings file by itself. Each change gives the list a
version, and the larger version holds at all workers. A worker that was started again has version 0 and learns from the
others.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec

from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.role_state import Version
from scheduler_plugins.router.settings.config import SIDES
from scheduler_plugins.router.settings.elastic import Place

logger = logging.getLogger(__name__)


class EngineList(msgspec.Struct, frozen=True, array_like=True):
    """The engines that the settings name."""

    number: int
    router: str
    """The process that has changed the list."""
    sides: dict[str, tuple[str, ...]]
    """URLs by the setting that names them."""
    kv_events: dict[str, tuple[str, str | None]]
    places: dict[str, Place]
    drained: tuple[str, ...]
    """URLs of the engines that an operator drains."""


class AdvertisedEngines:
    """Tells this worker's list, and takes the others'."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def telling(self) -> EngineList | None:
        """The list; None: it is as at the start."""
        pool, config = self._pool, self._pool.config
        if not pool.listed.number:
            return None
        sides = {side: tuple(getattr(config, side)) for side in SIDES}
        drained = tuple(sorted(pool.drained))
        return EngineList(*pool.listed, sides, dict(config.kv_events), dict(config.places), drained)

    def heard(self, advertised: EngineList | None) -> None:
        """Take the list of another worker, if it is newer."""
        pool = self._pool
        if advertised is None or Version(advertised.number, advertised.router) <= pool.listed:
            return
        sides: dict[str, Any] = {side: advertised.sides.get(side, ()) for side in SIDES}
        try:
            config = replace(
                pool.config, **sides, kv_events=advertised.kv_events, places=advertised.places
            )
        except ValueError as error:
            logger.warning("the list of engines of another worker cannot be used: %s", error)
            return
        pool.listed, pool.drained = (
            Version(advertised.number, advertised.router),
            set(advertised.drained),
        )
        pool.use(config)
        for engine in pool.engines:
            if not pool.leaves(engine):
                engine.draining = engine.url in pool.drained
