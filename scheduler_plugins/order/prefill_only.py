# SPDX-License-Identifier: Apache-2.0
"""Scheduling for requests that generate one token."""

from __future__ import annotations

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.order.srjf import SrjfCalibrated


class PrefillOnly(SrjfCalibrated):
    """Calibrated SRJF, and every request that generates one token gets a batch by itself.

    Such a request gains nothing by sharing a batch: compute is full already, and all of the batch
    would end when the last one does.
    """

    splits_batches = True
    overtakes_running = False

    def wants_own_batch(self, request: Waiting) -> bool:
        return request.max_tokens == 1
