# SPDX-License-Identifier: Apache-2.0
"""Scheduling for requests that generate one token."""

from __future__ import annotations

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.order.srjf import SrjfCalibrated


class PrefillOnly(SrjfCalibrated):
    """Calibrated SRJF. Every request that generates one token gets a separate batch.

    Such a request gains nothing in a shared batch. Compute is busy already, and all requests of the batch would end
    together with the last.
    """

    splits_batches = True
    overtakes_running = False

    def wants_own_batch(self, request: Waiting) -> bool:
        return request.max_tokens == 1
