# SPDX-License-Identifier: Apache-2.0
"""Load on an engine from other workers of this router and from other routers."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Count(IntEnum):
    """The counts that each sender of requests keeps for an engine."""

    OPEN = 0
    """Open exchanges with the engine."""
    PREFILLS = 1
    QUEUED_S = 2
    """Predicted seconds of all its prompts. Elapsed time is not subtracted."""
    BUSY_SINCE_S = 3
    """Latest time at which the prompt under way began."""
    QUEUED_TOKENS = 4
    DECODES = 5
    CONTEXT = 6
    HEAVY = 7


class Others(Protocol):
    """The counts of other workers and other routers for one engine."""

    def sum(self, count: Count) -> float:
        """The sum of this count over all others."""

    def of_workers(self, count: Count) -> float:
        """As `sum`, over other workers of this router only."""

    def latest(self, count: Count) -> float:
        """The largest number of all others; 0 if there are no others."""

    def tell(self, counts: tuple[float, ...]) -> None:
        """Publish this process's own counts, in the order of `Count`."""


class NoOthers:
    """`Others` for a single router with a single process."""

    def sum(self, count: Count) -> float:
        return 0.0

    def of_workers(self, count: Count) -> float:
        return 0.0

    def latest(self, count: Count) -> float:
        return 0.0

    def tell(self, counts: tuple[float, ...]) -> None:
        pass
