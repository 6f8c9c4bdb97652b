# SPDX-License-Identifier: Apache-2.0
"""What else was sent to an engine: by other processes of this router, and by other routers."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Count(IntEnum):
    """What whoever sends requests to an engine counts of it, each a number."""

    OPEN = 0
    """Exchanges with it that are open."""
    PREFILLS = 1
    QUEUED_S = 2
    """Predicted seconds of its prompts, what has passed not subtracted."""
    BUSY_SINCE_S = 3
    """When it began with the prompt under way, at the latest."""
    QUEUED_TOKENS = 4
    DECODES = 5
    CONTEXT = 6
    HEAVY = 7


class Others(Protocol):
    """What other processes and other routers have sent to one engine."""

    def sum(self, count: Count) -> float:
        """The sum of this count over all others."""

    def latest(self, count: Count) -> float:
        """The largest number of any other; 0 if there is none."""

    def tell(self, counts: tuple[float, ...]) -> None:
        """Our own counts have changed; they are in the order of `Count`."""


class NoOthers:
    """`Others` of a router that is alone, and is one process."""

    def sum(self, count: Count) -> float:
        return 0.0

    def latest(self, count: Count) -> float:
        return 0.0

    def tell(self, counts: tuple[float, ...]) -> None:
        pass
