# SPDX-License-Identifier: Apache-2.0
"""Orders that use neither cost nor cache: the two policies of vLLM."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting


class Fcfs(QueuePolicy):
    """First come, first served: all keys are equal, so arrival decides."""

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return 0.0


class Priority(QueuePolicy):
    """vLLM's `priority`: by the number that the client gave, then by arrival. A preempted request goes first among
    requests of its number only. It may need much room, and more urgent requests must not wait for it."""

    resumes_first = False

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return float(request.priority)
