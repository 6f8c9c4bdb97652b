# SPDX-License-Identifier: Apache-2.0
"""Orders that look at neither cost nor cache: vLLM's own two."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting


class Fcfs(QueuePolicy):
    """First come, first served: all keys are equal, so arrival decides."""

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return 0.0


class Priority(QueuePolicy):
    """vLLM's `priority`: by the number the client gave, then by arrival. A request that was preempted is
    the first of its number only: it may need much room, and whoever is more urgent must not wait for it."""

    resumes_first = False

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return float(request.priority)
