# SPDX-License-Identifier: Apache-2.0
"""Requests for which the engine had no room, and the number of requests that started since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class TurnedBack:
    """Bounds the time that a large request waits for room while small requests take the free pages.

    Used by one thread. `starts` counts requests that start; the queue adds to it.
    """

    def __init__(self) -> None:
        self.starts = 0
        # the value of `starts` when each was turned back, oldest first
        self._since: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since

    def add(self, request_id: str) -> None:
        """Note that the engine had no room for this request. Only the first time counts."""
        self._since.setdefault(request_id, self.starts)

    def overdue(self, waiting: Mapping[str, T], most: int) -> T | None:
        """The request that was turned back first, if at least `most` requests have started since.

        Args:
            waiting: all waiting requests, by id; others are forgotten here.
        """
        while self._since:
            request_id, starts = next(iter(self._since.items()))
            if request_id in waiting:
                return waiting[request_id] if self.starts - starts >= most else None
            del self._since[request_id]
        return None
