# SPDX-License-Identifier: Apache-2.0
"""Orders that do not use the predicted cost: arrival, the client's priority, length groups, cached prefix."""

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


class LengthGrouped(QueuePolicy):
    """Each step serves the length group of the oldest request first, then its neighbours.

    LoongServe batches requests of similar length, because a short request waits for a long request in the same batch.
    It cuts the sorted lengths with a dynamic programme over batches and instances, O(n^2) a step. On one instance, this
    only means that batches are contiguous in length. Groups that span a factor of 2 achieve that in O(log n).
    """

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return 0.0

    def group(self, request: Waiting) -> int:
        return request.tokens.bit_length()


class LongestPrefix(QueuePolicy):
    """Most cached tokens first (SGLang's `lpm`). Nothing ages; `max_overtaken` bounds waiting."""

    calibrated = True

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return float(-cached_tokens)
