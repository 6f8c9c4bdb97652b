# SPDX-License-Identifier: Apache-2.0
"""Batches of requests of similar length."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting


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
