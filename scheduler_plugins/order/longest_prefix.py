# SPDX-License-Identifier: Apache-2.0
"""The longest cached prefix first."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting


class LongestPrefix(QueuePolicy):
    """Most cached tokens first (SGLang's `lpm`). Nothing ages; `max_overtaken` bounds waiting."""

    calibrated = True

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return float(-cached_tokens)
