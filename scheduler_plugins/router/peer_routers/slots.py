# SPDX-License-Identifier: Apache-2.0
"""Assigns engines their slots in the shared counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import count

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.others import NoOthers
from scheduler_plugins.router.peer_routers.counts import MOST_ENGINES, SharedCounts

logger = logging.getLogger(__name__)


class EngineSlots:
    """Gives engines their slots, and connects them with the counts of other processes."""

    def __init__(self, counts: SharedCounts) -> None:
        self._counts = counts
        self._slots: dict[BackendEngine, int] = {}

    def follow(self, engines: Iterable[BackendEngine]) -> None:
        """Use these engines from now on."""
        present = dict.fromkeys(engines)
        for engine in self._slots.keys() - present.keys():
            slot = self._slots.pop(engine)
            engine.load.others = NoOthers()
            if slot < MOST_ENGINES:
                self._counts.clear_engine(slot)
        taken = set(self._slots.values())
        for engine in present.keys() - self._slots.keys():
            slot = self._slots[engine] = next(n for n in count() if n not in taken)
            taken.add(slot)
            engine.load.others = self._counts.engine(slot) or NoOthers()
            if slot >= MOST_ENGINES:
                logger.warning(
                    "%s: requests of other processes to it are not counted, because there are too many engines",
                    engine.url,
                )

    def place(self, engine: BackendEngine) -> int:
        """The engine's slot, which may be outside the shared counts."""
        return self._slots[engine]

    def of(self, engine: BackendEngine) -> int | None:
        """The engine's slot in the shared counts; None: it has none."""
        slot = self._slots.get(engine, MOST_ENGINES)
        return slot if slot < MOST_ENGINES else None
