# SPDX-License-Identifier: Apache-2.0
"""Batches of requests of similar length."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting


class LengthGrouped(QueuePolicy):
    """Each step serves the length group of the oldest request first, then its neighbours.

    LoongServe batches requests of similar length, because a short one that shares a batch with a
    long one waits for it. It cuts the sorted lengths by a dynamic programme over batches and
    instances, O(n^2) a step; on one instance what remains of it is that batches are contiguous in
    length, and groups of a factor of 2 have that for O(log n).
    """

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return 0.0

    def group(self, request: Waiting) -> int:
        return request.tokens.bit_length()
