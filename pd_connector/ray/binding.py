# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for a prefill replica."""

import time
from collections.abc import Callable


class BindingPatience:
    """Lets requests wait for a prefill replica, and stops all but one of them once none came in time.

    Without it each request would wait the whole time while there is no prefill replica at all.

    Args:
        patience_s: the longest wait of one request, in seconds. After a wait in vain, requests do not
            wait for as long again.
        clock: seconds that only grow.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._no_wait_before = -1.0
        self._absent = False

    def take_s(self) -> float:
        """Seconds that the request which asks may wait; 0: it must not wait at all."""
        if not self._absent:
            return self._patience_s
        now = self._clock()
        if now < self._no_wait_before:
            return 0.0
        self._no_wait_before = now + 2 * self._patience_s  # this one tries for all others
        return self._patience_s

    def bound(self) -> None:
        """A request has found a prefill replica."""
        self._absent = False

    def failed(self) -> None:
        """A request has waited in vain."""
        self._absent = True
        self._no_wait_before = self._clock() + self._patience_s
