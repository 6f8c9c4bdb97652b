# SPDX-License-Identifier: Apache-2.0
"""Shortest remaining job first, by predicted prefill time."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting

DEFAULT_LAMBDA = 0.02
"""The cost, in seconds, that one second of waiting compensates."""


class Srjf(QueuePolicy):
    """Orders by the cost on arrival, with the cache of that moment. Nothing ages."""

    by_cost = True

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return cost_s


class SrjfCalibrated(QueuePolicy):
    """PrefillOnly's: `score = cost(n, cached now) - lambda * waited`, smallest first.

    `lambda_` is in seconds per second. All requests age equally, so `cost + lambda * arrival` gives the same order and
    changes only with the cache. Only requests that arrive less than `cost / lambda` later overtake a request. With
    0.02, a prefill of 1 s yields for 50 s at most. Larger values tend to first come, first served; 0 never ages.
    PrefillOnly's lambda of 500 is in tokens per second. Divide it by the engine's prefill rate in tokens per second.
    """

    calibrated = True
    by_cost = True
    overtakes_running = True

    def __init__(self, lambda_: float = DEFAULT_LAMBDA) -> None:
        """Raises: ValueError: `lambda_` is negative or no number."""
        if not 0 <= lambda_ < float("inf"):
            raise ValueError(f"lambda {lambda_}: must be a number of seconds per second >= 0")
        self._lambda = lambda_

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return cost_s + self._lambda * request.arrival_s


class PrefillOnly(SrjfCalibrated):
    """Calibrated SRJF. Every request that generates one token gets a separate batch.

    Such a request gains nothing in a shared batch. Compute is busy already, and all requests of the batch would end
    together with the last.
    """

    splits_batches = True
    overtakes_running = False

    def wants_own_batch(self, request: Waiting) -> bool:
        return request.max_tokens == 1
