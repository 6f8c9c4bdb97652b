# SPDX-License-Identifier: Apache-2.0
"""The requests that start in one scan of the queue, and whether more may start."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting


class Batch:
    """The requests of one batch. It takes no further request in three cases: a request in it wants its own batch, the
    next request wants its own batch, or a request in it is shielded. Used by one thread.

    A request is shielded until its prefill has ended if its class is owed and has no other request. Its steps then hold
    only its own work. Other classes lose the rest of these steps, while the class pays only for its own work. A class
    with several requests is not shielded, because full batches serve it sooner.
    """

    def __init__(self) -> None:
        self._started: set[str] = set()
        self._own: str | None = None  # the request that has this batch alone; "": it started before
        self.shielded: dict[str, int] = {}
        """Priorities of shielded requests, by request id. Read it, do not change it."""

    def begin(self, *, full: bool, prefilling: Collection[str]) -> None:
        """A new scan; see `WaitingQueue.begin_scan`."""
        if kept := self.shielded:
            self.shielded = {one: kept[one] for one in prefilling if one in kept}
        self._started = set()
        self._own = "" if full else None

    @property
    def is_full(self) -> bool:
        """Whether no request may start any more."""
        return self._own is not None

    def shuts_out(self, priority: int) -> bool:
        """Whether a shielded request keeps requests of this priority from starting."""
        return priority < max(self.shielded.values(), default=priority)

    def takes(self, request: Waiting, policy: QueuePolicy) -> bool:
        """Whether this request may join what has started."""
        return not (policy.splits_batches and self._started and policy.wants_own_batch(request))

    def add(self, request: Waiting, policy: QueuePolicy) -> None:
        """The request starts."""
        self._started.add(request.id)
        if policy.splits_batches and policy.wants_own_batch(request):
            self._own = request.id

    def shield(self, request_id: str, priority: int) -> None:
        """Let nothing of lower priority start beside this request."""
        self.shielded[request_id] = priority

    def drop(self, request_id: str) -> bool:
        """Remove a request that did not start, or was preempted. Returns whether it was added in this scan."""
        self.shielded.pop(request_id, None)
        if self._own == request_id:
            self._own = None
        added = request_id in self._started
        self._started.discard(request_id)
        return added
