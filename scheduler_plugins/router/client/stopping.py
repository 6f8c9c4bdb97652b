# SPDX-License-Identifier: Apache-2.0
"""The end of the requests that are under way when the router stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

LAST_S = 1.0
"""Time for telling clients that their requests are cut off."""


class Stopping:
    """Limits the time of requests once the router stops."""

    def __init__(self) -> None:
        self._limits = set[asyncio.Timeout]()
        self._at_s: float | None = None

    def begin(self, after_s: float) -> None:
        """The router stops: requests have `after_s` seconds from now. Later calls do nothing."""
        if self._at_s is None:
            self._at_s = asyncio.get_running_loop().time() + after_s
            for limit in self._limits:
                self._lower(limit, self._at_s)

    @property
    def over(self) -> bool:
        """Whether the time of all requests has passed."""
        return self._at_s is not None and asyncio.get_running_loop().time() >= self._at_s

    @contextmanager
    def bounds(self, limit: asyncio.Timeout) -> Iterator[None]:
        """While inside, a stop lowers this limit of a request."""
        self._limits.add(limit)
        if self._at_s is not None:
            self._lower(limit, self._at_s)
        try:
            yield
        finally:
            self._limits.discard(limit)

    @staticmethod
    def _lower(limit: asyncio.Timeout, at_s: float) -> None:
        when_s = limit.when()
        if not limit.expired() and (when_s is None or when_s > at_s):
            limit.reschedule(at_s)
