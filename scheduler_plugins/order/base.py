# SPDX-License-Identifier: Apache-2.0
"""The interface between the queue and the order that it keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler_plugins.order.request import Waiting

MAX_OVERTAKEN = 256
"""The most requests of its class that may overtake a request."""


class QueuePolicy(ABC):
    """Orders the waiting requests of one class: the smallest key goes first, ties by arrival.

    The queue breaks the order in one case: if a request has been overtaken `max_overtaken` times, it goes first (see
    `WaitingQueue`).
    """

    calibrated: bool = False
    """True: a key is computed again when the cache changes. False: it is computed once, on arrival."""
    by_cost: bool = False
    """Whether shorter requests overtake longer ones. Admission needs it for its predictions."""
    overtakes_running: bool = False
    """Whether a request overtakes a running prefill whose remaining part has a larger key."""
    resumes_first: bool = True
    """True: a preempted request goes before all others of its class. False: its key decides."""
    splits_batches: bool = False
    """Whether `wants_own_batch` can be true. In that case a batch can end although requests wait."""

    @abstractmethod
    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        """The request's position: smaller keys go first.

        A key must not depend on the time, so waiting alone reorders nothing. If `cached_tokens` falls and `cost_s`
        rises, the key must not fall. So a key computed before an eviction is a lower bound, and evaluating the first
        request again finds the true order.

        Args:
            cached_tokens: tokens whose KV is in the cache, whole blocks.
            cost_s: predicted time to prefill the rest, in seconds.
        """

    def group(self, request: Waiting) -> int:
        """The request's group. Requests of a group are served together. The group with the nearest number comes
        next."""
        return 0

    def wants_own_batch(self, request: Waiting) -> bool:
        """Whether this request needs a prefill batch without other requests."""
        return False
