# SPDX-License-Identifier: Apache-2.0
"""Follows the engines of the names in the settings (`dns+http`, `k8s+http`, `pool+http`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

import aiohttp

from scheduler_plugins.router.engines.kubernetes.api import LIMIT_S
from scheduler_plugins.router.engines.kubernetes.pods import Pods
from scheduler_plugins.router.settings.config import SIDES, RouterConfig
from scheduler_plugins.router.settings.members import DNS, is_name, parts_of

logger = logging.getLogger(__name__)

MEMBERS_S = 5.0
"""Pause between two lookups of a DNS name. Name servers keep their answers for about as long."""


class NamedEngines:
    """The URLs of the engines behind each name. While a name cannot be looked up, it keeps its last engines."""

    def __init__(self, config: Callable[[], RouterConfig], session: aiohttp.ClientSession) -> None:
        """Look nothing up yet. `config` returns the current settings."""
        self._config = config
        self._session = session
        self._members: dict[str, tuple[str, ...]] = {}
        self._problems: dict[str, str] = {}  # by name; the problem as it was logged
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()

    async def start(self) -> None:
        """Look up all names once. Names that cannot be looked up have no engines for now."""
        self.use()
        with suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while set(self._tasks) - set(self._members) - set(self._problems):
                    self._answered.clear()
                    await self._answered.wait()
        self._members = dict.fromkeys(self._tasks, ()) | self._members
        self._changed.clear()

    def use(self) -> bool:
        """The settings may have changed. Returns whether a name is new, and not looked up yet."""
        names = _names(self._config())
        for name in set(self._tasks) - names:
            self._tasks.pop(name).cancel()
            self._problems.pop(name, None)
        for name in names - set(self._tasks):
            self._tasks[name] = asyncio.create_task(self._look_up(name), name=f"look up {name}")
        self._members = {name: self._members[name] for name in names if name in self._members}
        return len(self._members) < len(names)

    def members(self, url: str) -> tuple[str, ...]:
        """The URLs of the engines that this URL of the settings stands for."""
        return self._members.get(url, ()) if is_name(url) else (url,)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` when engines have changed. Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            changed()

    async def close(self) -> None:
        """Follow no name any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, url: str) -> None:
        """Follow one name until cancelled."""

        def tell(urls: Collection[str]) -> None:
            self._note(url, "")
            if self._members.get(url) != (members := tuple(urls)):
                self._members[url] = members
                self._changed.set()
            self._answered.set()

        def complain(problem: str) -> None:
            self._note(url, problem)
            self._answered.set()

        while True:
            try:
                if parts_of(url).scheme == DNS:
                    tell(await _resolved(url))
                else:
                    await Pods(url, self._session, tell, complain).follow()
            except TimeoutError:
                complain(f"{url}: no answer within {LIMIT_S:g} s")
            except OSError as error:
                complain(f"{url}: the name cannot be resolved: {error.strerror or error}")
            except Exception as error:
                # Keep following; otherwise the router would never learn of new engines.
                logger.exception("%s cannot be followed", url)
                complain(f"{url}: {error!r}")
            await asyncio.sleep(MEMBERS_S)

    def _note(self, url: str, problem: str) -> None:
        """Log once that a name cannot be looked up, and once that it can again."""
        before = self._problems.pop(url, "")
        if problem:
            self._problems[url] = problem
            if problem != before:
                logger.warning("%s; the engines known before stay", problem)
        elif before:
            logger.info("%s: its engines can be looked up again", url)


async def _resolved(url: str) -> list[str]:
    """Base URLs of the engines at all addresses of a DNS name, in a fixed order. Raises OSError, TimeoutError."""
    name, loop = parts_of(url), asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S):
        infos = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in infos})
    return [f"http://{f'[{host}]' if ':' in host else host}:{name.port}" for host in addresses]


def _names(config: RouterConfig) -> set[str]:
    """The names of the settings that stand for several engines."""
    return {url for side in SIDES for url in getattr(config, side) if is_name(url)}
