# SPDX-License-Identifier: Apache-2.0
"""The seam between the queue and the order it keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from scheduler_plugins.order.request import Waiting

MAX_OVERTAKEN = 256
"""How many later requests of its class may go before a request."""


class QueuePolicy(ABC):
    """Orders the waiting requests of one class: the smallest key goes first, ties by arrival.

    The queue breaks the order in one case: a request that has been overtaken `max_overtaken` times
    goes first (see `WaitingQueue`).
    """

    calibrated: ClassVar[bool] = False
    """Whether a key is computed anew when the cache changes. If not: once, on arrival."""
    by_cost: ClassVar[bool] = False
    """Whether shorter requests overtake longer ones. Admission needs it for its predictions."""
    overtakes_running: ClassVar[bool] = False
    """Whether a request goes before a prefill under way if the rest of that has a larger key."""
    resumes_first: ClassVar[bool] = True
    """Whether a request that was preempted goes before all others of its class. If not: by its key."""
    splits_batches: ClassVar[bool] = False
    """Whether `wants_own_batch` may be true, so that a batch may have to go without another request."""

    @abstractmethod
    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        """The request's position: smaller keys go first.

        A key must not depend on the time, so that waiting alone reorders nothing. It must not fall when
        `cached_tokens` falls and `cost_s` rises: then a key computed before an eviction is a lower bound,
        and evaluating whoever comes first again finds the true order.

        Args:
            cached_tokens: tokens whose KV is in the cache, whole blocks.
            cost_s: predicted time to prefill the rest, in seconds.
        """

    def group(self, request: Waiting) -> int:
        """Requests of one group are served together; then comes the group with the nearest number."""
        return 0

    def wants_own_batch(self, request: Waiting) -> bool:
        """Whether no other request may share the batch that prefills this one."""
        return False
