# SPDX-License-Identifier: Apache-2.0
"""Keeps the file with the number of requests in each minute of the day (`days`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path

from scheduler_plugins.router.roles.days import LEAST_DAYS, Days
from scheduler_plugins.router.roles.history import History

logger = logging.getLogger(__name__)

WRITE_S = 600.0


class DaysFile:
    """Sums up the requests of a router, minute by minute. Only minutes in which the router ran all the time count."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises DaysError."""
        self._path = path
        self._days = Days.load(path)
        self._minute: int | None = None  # that passes now, of all since 1970
        self._whole = False  # whether it was seen from its beginning
        self._written_s = time.time()
        self._counted = dict[str, bool]()

    def note(self, history: History, groups: Collection[str], now_s: float) -> None:
        """Call about once a second."""
        wall_s = time.time()
        minute = int(wall_s // 60)
        if minute == self._minute:
            return
        follows = self._minute is not None and minute == self._minute + 1
        if self._whole and follows:
            for group in groups:
                came = history.over(now_s, 60, group).arrivals
                self._days.add(group, _of_day(wall_s - 60), came)
        self._whole, self._minute = follows, minute
        if wall_s - self._written_s >= WRITE_S:
            self._written_s = wall_s
            self.save()

    def usual_per_s(self, group: str, ahead_s: float) -> dict[str, float]:
        """Mean requests a second, on earlier days, at the minute `ahead_s` from now; empty if fewer than two days are
        known."""
        usual = self._days.per_s(group, _of_day(time.time() + ahead_s))
        if self._counted.get(group) is not (counts := usual is not None):
            self._counted[group] = counts
            text = "now count" if counts else f"do not count yet: {LEAST_DAYS} are needed"
            logger.info("group %s: earlier days at this minute %s (%s)", group, text, self._path)
        return {} if usual is None else {group: usual}

    def save(self) -> None:
        """Write the file. A failure is only logged; the next call tries again."""
        try:
            self._days.save(self._path)
        except OSError as error:
            logger.warning("days %s: cannot be written (%s)", self._path, error.strerror)


def _of_day(wall_s: float) -> int:
    """The minute of the day, by local time: people keep to it."""
    local = time.localtime(wall_s)
    return local.tm_hour * 60 + local.tm_min
