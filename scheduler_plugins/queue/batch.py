# SPDX-License-Identifier: Apache-2.0
"""The requests that start in one scan of the queue, and whether more may start."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.guards import Guards


class Batch:
    """The requests of one batch. It takes no further request in three cases: a request in it wants its own batch, the
    next request wants its own batch, or a request in it is guarded (`Guards`). Used by one thread."""

    def __init__(self) -> None:
        self._started: set[str] = set()
        self._own: str | None = None  # the request that has this batch alone; "": it started before
        self._guards = Guards()
        self.guarded = False
        """Whether a request in the batch is guarded. Read it, do not change it."""

    def begin(self, *, full: bool, prefilling: Collection[str]) -> None:
        """A new scan; see `WaitingQueue.begin_scan`."""
        if self.guarded:
            self._guards.keep(prefilling)
            self.guarded = bool(self._guards)
        self._started = set()
        self._own = "" if full else None

    @property
    def is_full(self) -> bool:
        """Whether no request may start any more."""
        return self._own is not None

    def shuts_out(self, priority: int) -> bool:
        """Whether a guarded request keeps requests of this priority from starting."""
        return self._guards.shut_out(priority)

    def takes(self, request: Waiting, policy: QueuePolicy) -> bool:
        """Whether this request may join what has started."""
        return not (policy.splits_batches and self._started and policy.wants_own_batch(request))

    def add(self, request: Waiting, policy: QueuePolicy) -> None:
        """The request starts."""
        self._started.add(request.id)
        if policy.splits_batches and policy.wants_own_batch(request):
            self._own = request.id

    def guard(self, request_id: str, priority: int) -> None:
        """Let nothing of lower priority start beside this request."""
        self._guards.add(request_id, priority)
        self.guarded = True

    def drop(self, request_id: str) -> bool:
        """Remove a request that did not start, or was preempted. Returns whether it was added in this scan."""
        if self.guarded:
            self._guards.drop(request_id)
            self.guarded = bool(self._guards)
        if self._own == request_id:
            self._own = None
        added = request_id in self._started
        self._started.discard(request_id)
        return added
