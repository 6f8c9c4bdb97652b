# SPDX-License-Identifier: Apache-2.0
"""Chunks that clients want to be kept (`PoolAsk.pin_s`)."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pd_connector.pool.store.base import Store

SAVED_WITHIN_S = 2.0
"""A pin is tried again after this time, in seconds: its chunks are being saved. Look-ups do not wait for it."""


class ClientPins:
    """Used by the scheduler's thread.

    Args:
        looks: the look-ups' thread. The first attempt of each pin runs there.
    """

    def __init__(self, store: Store, looks: ThreadPoolExecutor) -> None:
        self._store, self._looks = store, looks
        self._later = ThreadPoolExecutor(1, "pd-pool-pin")

    def pin(self, keys: Sequence[bytes], for_s: float, tenant: str, tenants: int) -> None:
        """Keep these chunks, the first of a prompt, for `for_s` seconds.

        Args:
            tenant: the tenant that holds the pin; empty for clients without a tenant.
            tenants: number of tenants that share the pool.
        """
        self._looks.submit(self._pin, keys, for_s, f"tenant {tenant}", tenants)

    def close(self) -> None:
        """End the thread. Pins that were not tried again are given up."""
        self._later.shutdown(wait=False, cancel_futures=True)

    def _pin(self, keys: Sequence[bytes], for_s: float, holder: str, tenants: int) -> None:
        if self._store.pin(keys, for_s, holder, tenants) < len(keys):
            again_s = time.monotonic() + SAVED_WITHIN_S
            self._later.submit(self._pin_later, again_s, keys, for_s, holder, tenants)

    def _pin_later(
        self, then_s: float, keys: Sequence[bytes], for_s: float, holder: str, tenants: int
    ) -> None:
        time.sleep(max(0.0, then_s - time.monotonic()))
        self._store.pin(keys, for_s, holder, tenants)
