# SPDX-License-Identifier: Apache-2.0
"""Requests that the engine had no room for, and how many have started since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class TurnedBack:
    """Bounds how long a large request waits for room while small ones take what becomes free.

    Used by one thread. `starts` counts requests that start; the queue adds to it.
    """

    def __init__(self) -> None:
        self.starts = 0
        # `starts` when each was turned back; the first of them is first.
        self._since: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since

    def add(self, request_id: str) -> None:
        """The engine had no room for this request; only the first time counts."""
        self._since.setdefault(request_id, self.starts)

    def overdue(self, waiting: Mapping[str, T], most: int) -> T | None:
        """The one that was turned back first, if `most` requests or more have started since.

        Args:
            waiting: all requests that wait, by id; others are forgotten here.
        """
        while self._since:
            request_id, starts = next(iter(self._since.items()))
            if request_id in waiting:
                return waiting[request_id] if self.starts - starts >= most else None
            del self._since[request_id]
        return None
