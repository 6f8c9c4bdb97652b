# SPDX-License-Identifier: Apache-2.0
"""Follows the KV pools of hosts: one reader for each store, whatever the number of engines that use it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from scheduler_plugins.admission.pool_report import PoolReport
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.stored import name_of

logger = logging.getLogger(__name__)

PAGE_PAUSE_S = 0.01
"""Pause between two pages of a long journal. Requests are served meanwhile."""

Ask = Callable[[BackendEngine, int], Awaitable[PoolReport | None]]


class StoreReaders:
    """One task for each store that an engine names. It asks the store's engines in turn for what has changed."""

    def __init__(
        self,
        prefixes: Prefixes,
        engines: Callable[[], Iterable[BackendEngine]],
        ask: Ask,
        pause_s: Callable[[], float],
    ) -> None:
        """Read nothing yet.

        Args:
            ask: asks an engine for the page after a number. Raises EngineFailedError.
            pause_s: returns the pause between two questions.
        """
        self._prefixes = prefixes
        self._engines = engines
        self._ask = ask
        self._pause_s = pause_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def update(self) -> None:
        """Begin to read stores that engines use by now, and forget the others."""
        used = {engine.store.store for engine in self._engines() if engine.store}
        for store in self._tasks.keys() - used:
            self._tasks.pop(store).cancel()
            self._prefixes.forget_store(store)
        for store in used - self._tasks.keys():
            name = f"journal of {name_of(store)}"
            self._tasks[store] = asyncio.create_task(self._follow(store), name=name)

    async def close(self) -> None:
        """End all readers."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, store: str) -> None:
        after, first = 0, None
        while True:
            try:
                engine, page = await self._page(store, after, first)
            except Exception:
                logger.exception("reading the journal of %s failed", name_of(store))
                engine, page = None, None
            first = engine
            if page is not None:
                changes = ((event.key, event.tier) for event in page.events)
                self._prefixes.apply_journal(store, changes, whole=page.whole)
                after = page.next
            more = page is not None and page.more and page.events
            await asyncio.sleep(PAGE_PAUSE_S if more else self._pause_s())

    async def _page(
        self, store: str, after: int, first: BackendEngine | None
    ) -> tuple[BackendEngine | None, PoolReport | None]:
        """The next page, and the engine that gave it. The engine that answered last is asked first."""
        able = [
            user for user in self._engines() if user.up and user.store and user.store.store == store
        ]
        for engine in sorted(able, key=lambda user: user is not first):
            try:
                page = await self._ask(engine, after)
            except EngineFailedError as failure:
                logger.debug("%s does not report its journal: %s", engine.url, failure)
                continue
            if page is not None and page.store == store:
                return engine, page
        return None, None
