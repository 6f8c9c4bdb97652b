# SPDX-License-Identifier: Apache-2.0
"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_plugins.order.request import Waiting


@dataclass(slots=True)
class Served:
    """The outcome of one request. Times are in seconds, by the clock of the arrivals."""

    request: Waiting
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first started."""
    start_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    prefilled_s: float | None = None
    """Time when its prompt was computed, on any engine. Set by a cluster."""
    p: str | None = None
    """The engine that computed its prompt for another engine. A cluster sets this and all later fields."""
    d: str | None = None
    """The engine that answered."""
    pulled_tokens: int = 0
    """Prompt tokens from another engine's cache."""
    far_tokens: int = 0
    """Those of them that came from the far store."""
    rejected: str = ""
    """Reason of the refusal; empty if it was not refused."""
    restarts: int = 0
    """The number of times that an engine died with it."""
    preemptions: int = 0
    """The number of times that it lost its room on an engine."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token; infinite for a refused request."""
        if self.first_token_s is None:
            return float("inf")
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first; 0 if there is none."""
        if self.end_s is None or self.first_token_s is None or self.request.max_tokens < 2:
            return 0.0
        return (self.end_s - self.first_token_s) / (self.request.max_tokens - 1)
