# SPDX-License-Identifier: Apache-2.0
"""Follows the engines of the names in the settings (`dns+http`, `k8s+http`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from scheduler_plugins.router.settings.config import SIDES, RouterConfig
from scheduler_plugins.router.settings.members import MembersError, is_name, members

logger = logging.getLogger(__name__)

MEMBERS_S = 5.0
"""Pause between two lookups of the engines behind a name. Name servers keep their answers for about as long."""


class NamedEngines:
    """The URLs of the engines behind each name. While a name cannot be looked up, its engines stay as they were."""

    def __init__(self, config: Callable[[], RouterConfig], session: aiohttp.ClientSession) -> None:
        """Look nothing up yet. `config` returns the current settings."""
        self._config = config
        self._session = session
        self._known: dict[str, tuple[str, ...]] = {}
        self._problems: dict[str, str] = {}  # by name; the problem as it was logged
        self._new = asyncio.Event()

    async def start(self) -> None:
        """Look up all names once. Names that cannot be looked up have no engines for now."""
        await self._ask()
        self._known = dict.fromkeys(_names(self._config()), ()) | self._known

    def use(self) -> bool:
        """The settings may have changed. Returns whether a name is new, and not looked up yet."""
        names = _names(self._config())
        self._known = {name: self._known[name] for name in names if name in self._known}
        if unknown := len(self._known) < len(names):
            self._new.set()
        return unknown

    def members(self, url: str) -> tuple[str, ...]:
        """The URLs of the engines that this URL of the settings stands for."""
        return self._known.get(url, ()) if is_name(url) else (url,)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Look up all names again and again, and call `changed` when engines have changed. Runs until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MEMBERS_S):
                    await self._new.wait()
            self._new.clear()
            if await self._ask():
                changed()

    async def _ask(self) -> bool:
        """Look up the engines of all names. Returns whether they changed."""
        before = dict(self._known)
        for url in _names(self._config()):
            try:
                self._known[url] = await members(url, self._session)
            except MembersError as error:
                problem = str(error)
            else:
                problem = ""
            self._note(url, problem)
        return self._known != before

    def _note(self, url: str, problem: str) -> None:
        """Log once that a name cannot be looked up, and once that it can again."""
        before = self._problems.pop(url, "")
        if problem:
            self._problems[url] = problem
            if problem != before:
                logger.warning("%s; the engines known before stay", problem)
        elif before:
            logger.info("%s: its engines can be looked up again", url)


def _names(config: RouterConfig) -> set[str]:
    """The names of the settings that stand for several engines."""
    return {url for side in SIDES for url in getattr(config, side) if is_name(url)}
