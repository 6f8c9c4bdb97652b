# SPDX-License-Identifier: Apache-2.0
"""The roles that routers send each other, and the choice of the router that decides.

Each role of an engine has a version: a number, and the router that gave it. The larger version holds at all routers, so
they agree even if messages are lost or late. A restarted router has version 0 and learns from the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec

from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.role_state import Version
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.elastic import MOVABLE

logger = logging.getLogger(__name__)

MOST_NUMBER = 1 << 53
"""Upper bound of an accepted version."""


class AdvertisedRole(msgspec.Struct, frozen=True, array_like=True):
    """The role of one engine."""

    role: Role
    number: int
    router: str
    pinned: bool = False
    moving: Role | None = None
    """The role that the sender is moving the engine to; None: it is not moving it."""


class AdvertisedRoles:
    """The roles that this router advertises for its pool, and its use of the roles that other routers advertise."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._moved_by: dict[str, str] = {}  # engine's URL to the fellow that moves it

    def telling(self) -> dict[str, AdvertisedRole]:
        """The roles that differ from the settings, by the engine's URL."""
        advertised = {}
        for engine in self._pool.engines:
            role_state = engine.role_state
            moving = None if engine.url in self._moved_by else role_state.moving
            if role_state.version.number or moving is not None:
                advertised[engine.url] = AdvertisedRole(
                    engine.role, *role_state.version, role_state.pinned, moving
                )
        return advertised

    def heard(self, router: str, roles: Mapping[str, AdvertisedRole]) -> None:
        """Take another router's roles. Unknown engines, and roles that no router gives, are ignored."""
        for engine in self._pool.engines:
            advertised = roles.get(engine.url)
            if advertised is None or self._pool.leaves(engine):
                continue
            self._note_move(engine.url, router, advertised.moving)
            version = Version(advertised.number, advertised.router)
            if advertised.role in MOVABLE and engine.role_state.version < version < (MOST_NUMBER,):
                if advertised.role is not engine.role:
                    logger.info(
                        "%s is %s and no longer %s: router %s says so",
                        *(engine.url, advertised.role, engine.role, router),
                    )
                self._pool.set_role(
                    engine, advertised.role, pinned=advertised.pinned, version=version
                )
        for url in [url for url, by in self._moved_by.items() if by == router and url not in roles]:
            self._note_move(url, router, None)

    def forget(self, peers: Collection[str]) -> None:
        """Keep only these peers. If a router that was moving an engine is gone, ask that engine for its role."""
        for url, router in list(self._moved_by.items()):
            if router not in peers:
                self._note_move(url, router, None)
                for engine in self._pool.engines:
                    if engine.url == url:
                        self._pool.look_again(engine)

    def _note_move(self, url: str, router: str, role: Role | None) -> None:
        before = self._moved_by.get(url)
        for engine in self._pool.engines:
            if engine.url != url:
                continue
            if role is not None and (before == router or engine.role_state.moving is None):
                self._moved_by[url] = router
                self._pool.move(engine, role)
            elif role is None and before == router:
                del self._moved_by[url]
                self._pool.move(engine, None)
