# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for a prefill replica."""

import time
from collections.abc import Callable


class BindingPatience:
    """Lets requests wait for a prefill replica. After a failed wait only one request at a time waits.

    Without this limit, each request would wait its full time while no prefill replica exists.

    Args:
        patience_s: the longest wait of one request, in seconds. After a failed wait, other requests do not
            wait during the next `patience_s`.
        clock: monotonic seconds.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._no_wait_before = -1.0
        self._absent = False

    def take_s(self) -> float:
        """Seconds that the calling request may wait; 0: it must not wait."""
        if not self._absent:
            return self._patience_s
        now = self._clock()
        if now < self._no_wait_before:
            return 0.0
        self._no_wait_before = now + 2 * self._patience_s  # this request tries for all others
        return self._patience_s

    def bound(self) -> None:
        """A request has found a prefill replica."""
        self._absent = False

    def failed(self) -> None:
        """A request waited, and got no replica."""
        self._absent = True
        self._no_wait_before = self._clock() + self._patience_s
