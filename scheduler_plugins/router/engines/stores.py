# SPDX-License-Identifier: Apache-2.0
"""Follows the KV pools of hosts, and the far stores behind them: one reader for each journal, whatever the number of engines that
use it. A host's pool has one journal. A far store has one at each host with a carrier, and all of them fill one index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from scheduler_plugins.admission.pool_report import PoolReport
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.stored import FAR, far_store, name_of

logger = logging.getLogger(__name__)

PAGE_PAUSE_S = 0.01
"""Pause between two pages of a long journal. Requests are served meanwhile."""

Ask = Callable[[BackendEngine, int, str], Awaitable[PoolReport | None]]


class Source(NamedTuple):
    """A journal that engines tell."""

    host: str
    """Id of the store of the host."""
    far: str = ""
    """Id of the far store of which its carrier tells; empty: the host's own journal."""

    @property
    def store(self) -> str:
        """The store of which it tells, by its name in the index."""
        return far_store(self.far) if self.far else self.host


class StoreReaders:
    """One task for each journal. It asks the host's engines in turn for what has changed."""

    def __init__(
        self,
        prefixes: Prefixes,
        engines: Callable[[], Iterable[BackendEngine]],
        ask: Ask,
        pause_s: Callable[[], float],
    ) -> None:
        """Read nothing yet.

        Args:
            ask: asks an engine for the page after a number, of its host's store or the far store. Raises EngineFailedError.
            pause_s: returns the pause between two questions.
        """
        self._prefixes = prefixes
        self._engines = engines
        self._ask = ask
        self._pause_s = pause_s
        self._tasks: dict[Source, asyncio.Task[None]] = {}

    def update(self) -> None:
        """Begin to read the stores that engines use now, and forget the others."""
        places = [engine.store for engine in self._engines() if engine.store]
        used = {Source(place.store) for place in places}
        used |= {Source(place.store, place.far) for place in places if place.far}
        stores = {source.store for source in used}
        for source in self._tasks.keys() - used:
            self._tasks.pop(source).cancel()
            if source.store not in stores:
                self._prefixes.forget_store(source.store)
        for source in used - self._tasks.keys():
            name = f"journal of {name_of(source.store)} at {name_of(source.host)}"
            self._tasks[source] = asyncio.create_task(self._follow(source), name=name)

    async def close(self) -> None:
        """End all readers."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, source: Source) -> None:
        after, first = 0, None
        while True:
            try:
                engine, page = await self._page(source, after, first)
            except Exception:
                logger.exception("reading the journal of %s failed", name_of(source.store))
                engine, page = None, None
            first = engine
            if page is not None and source.far and page.far != source.far:
                self._reach(source.host, page.far)
            elif page is not None:
                changes = ((event.key, event.tier) for event in page.events)
                # What other hosts have told of a far store stays when one carrier starts again.
                whole = page.whole and self._tells_alone(source)
                self._prefixes.apply_journal(source.store, changes, whole=whole)
                after = page.next
            more = page is not None and page.more and page.events
            await asyncio.sleep(PAGE_PAUSE_S if more else self._pause_s())

    def _tells_alone(self, source: Source) -> bool:
        return all(other.store != source.store for other in self._tasks if other is not source)

    def _reach(self, host: str, far: str) -> None:
        """The engines of a host reach another far store than before: its carrier has ended, or the store has restarted."""
        for engine in self._engines():
            if engine.store and engine.store.store == host:
                engine.store = replace(engine.store, far=far)
        self.update()

    async def _page(
        self, source: Source, after: int, first: BackendEngine | None
    ) -> tuple[BackendEngine | None, PoolReport | None]:
        """The next page, and the engine that gave it. The engine that answered last is asked first."""
        able = [
            user
            for user in self._engines()
            if user.up and user.store and user.store.store == source.host
        ]
        for engine in sorted(able, key=lambda user: user is not first):
            try:
                page = await self._ask(engine, after, FAR if source.far else "")
            except EngineFailedError as failure:
                logger.debug("%s does not report its journal: %s", engine.url, failure)
                continue
            if page is not None and page.store == source.host:
                return engine, page
        return None, None
