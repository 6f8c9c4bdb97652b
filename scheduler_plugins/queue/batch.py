# SPDX-License-Identifier: Apache-2.0
"""What starts in one scan of the queue, and whether more may start beside it."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.guards import Guards


class Batch:
    """The batch has to go without another request if one in it wants a batch of its own, if the next
    one does, or if one in it is guarded (`Guards`). Used by one thread."""

    def __init__(self) -> None:
        self._started: set[str] = set()
        self._own: str | None = None  # the request whose own batch this is; "": it started before
        self._guards = Guards()
        self.guarded = False
        """Whether a request in it is guarded. To be read, not changed."""

    def begin(self, *, full: bool, prefilling: Collection[str]) -> None:
        """A new scan; see `WaitingQueue.begin_scan`."""
        if self.guarded:
            self._guards.keep(prefilling)
            self.guarded = bool(self._guards)
        self._started = set()
        self._own = "" if full else None

    @property
    def is_full(self) -> bool:
        """Whether nothing may start any more, whatever it is."""
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
        """The request was not started after all, or was preempted; returns whether it had been
        added in this scan."""
        if self.guarded:
            self._guards.drop(request_id)
            self.guarded = bool(self._guards)
        if self._own == request_id:
            self._own = None
        added = request_id in self._started
        self._started.discard(request_id)
        return added
