# SPDX-License-Identifier: Apache-2.0
"""The queue: classes share the engine, a policy orders each class, and the cache changes the order."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import TypeVar

from scheduler_plugins.order.base import MAX_OVERTAKEN, QueuePolicy
from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.qos.classes import ONLY, QosClass
from scheduler_plugins.queue.class_queue import ClassQueue, QueueEntry
from scheduler_plugins.queue.fair_share import FairShare
from scheduler_plugins.queue.prefix_index import CostEstimator, Costs, PrefixIndex

LOOKS_PER_PEEK = 32
"""The most entries that are evaluated again before a choice. If the cache has made more requests cheaper since the last
choice, or more requests at the head more expensive, the order is not exact."""


class WaitingQueue:
    """Waiting requests in the order in which an engine should take them.

    A scan is one pass of an engine over its queue: `begin_scan`, then `peek` and `pop` until the
    engine is full. Within a scan `pop` returns the request that `peek` returned, even if the cache changes in between.
    The next scan evaluates everything again.

    **Bound on waiting.** `max_overtaken` bounds how often a request is overtaken, under any load and with any policy.
    At most `max_overtaken` requests of its class that were added later start before it. The queue checks only the
    oldest request of a class, because no request of the class was overtaken more often (`ClassQueue.overtaken`). When
    the oldest request has reached the bound, it goes first in its class. Other classes multiply the wait by at most 1 /
    `reserved_fraction`. If the engine has no room for a request (`TurnedBack`), at most `max_overtaken` requests of all
    classes start before it. After that the request goes before everything: running requests end, and no other request
    takes the free room. A removed request counts as having overtaken.

    **Batches.** If the batch may take no further request (`Batch`), `peek` returns None although requests wait.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        cached: Container[BlockHash],
        *,
        page_size: int,
        costs: Costs,
        classes: Sequence[QosClass] = ONLY,
        max_overtaken: int = MAX_OVERTAKEN,
    ) -> None:
        """An empty queue.

        Args:
            cached: the hashes of all blocks that can be read from the cache; `in` must be fast.
            page_size: tokens in a block.
        """
        self._max_overtaken = max_overtaken
        self.prefix_index = PrefixIndex(cached)
        """Told of each change of the cache, once `cached` shows it."""
        self.estimator = CostEstimator(policy, self.prefix_index, costs, page_size=page_size)
        """Read it, do not change it."""
        self._entries: dict[str, QueueEntry] = {}
        self._class_queues: dict[str, ClassQueue] = {}
        self._popped: dict[str, tuple[QueueEntry, Mapping[str, float] | None]] = {}
        """Entries popped in this scan, with the payment of their class; None: the class has it back."""
        self._head: QueueEntry | None = None
        self._head_cost_s = 0.0
        """The payment of the head's class, fixed at `peek`: an engine may store a request's blocks before it pops the
        request."""
        self.turned_back = TurnedBack()
        """Told of each request that the engine peeked at in this scan and had no room for."""
        self._next_of_all: QueueEntry | None = None
        """The request that goes before everything in this scan."""
        self._batch = Batch()
        self.fair_share = FairShare()
        """The classes. Read it, do not change it."""
        self.set_classes(classes)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Waiting]:
        """All requests by class, in the order of the last evaluation."""
        for class_queue in self._class_queues.values():
            yield from (entry.request for entry in class_queue)

    def set_classes(self, classes: Sequence[QosClass]) -> None:
        """Use other classes. Requests move to their new classes, and keep their order of arrival."""
        arrived = sorted(self._entries.values(), key=lambda entry: entry.request.arrival_s)
        self._class_queues = {qos_class.name: ClassQueue() for qos_class in classes}
        self.fair_share.update(classes, self._class_queues)
        for entry in arrived:
            self._queue_of(entry).append(entry)
        self._popped = {}
        self._head = self._next_of_all = None

    @property
    def policy(self) -> QueuePolicy:
        """The order within a class."""
        return self.estimator.policy

    def set_policy(self, policy: QueuePolicy, max_overtaken: int) -> None:
        """Use another order. Requests keep their order of arrival."""
        self.estimator.policy, self._max_overtaken = policy, max_overtaken
        for entry in self._entries.values():
            entry.group = policy.group(entry.request)
            entry.key, entry.cost_s = self.estimator.evaluate(entry)
        self.set_classes(self.fair_share.classes)

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""
        return list(self._class_queues)

    def class_queue(self, name: str) -> ClassQueue:
        """The queue of a class. Read it, do not change it."""
        return self._class_queues[name]

    def refresh(self, most: int) -> None:
        """Call between two scans: evaluate again up to `most` requests whose cost has changed."""
        if self.estimator.renew():
            self.prefix_index.stale_all(self._entries.values())
        if self.prefix_index.stale:
            self._recalibrate(most)

    def add(self, request: Waiting) -> None:
        """Add a new request. Raises ValueError if a request with its id waits already."""
        entry = self._new(request)
        class_queue = self._queue_of(entry)
        class_queue.append(entry)
        class_queue.work.arrive(entry.bucket, entry.cost_s, request.arrival_s)

    def prepend(self, request: Waiting) -> None:
        """Put back a request that was popped.

        If it was popped in this scan, it was not started: it gets its position back, and its class gets the cost back.
        If it was popped earlier, it was preempted: it becomes the first and the oldest of its class, so its KV is still
        cached, and the class does not pay again. Before this call, report the blocks that it leaves in the cache
        (`prefix_index.added`).
        """
        self.skipped(request.id)
        popped = self._popped.pop(request.id, None)
        if popped is None:
            entry = self._new(request, resumed=True)
            self._queue_of(entry).put_first(entry)
            return
        entry, _ = popped
        self._entries[request.id] = entry
        if self.policy.calibrated:
            entry.key, entry.cost_s = self.estimator.evaluate(entry)
        self._class_queues[entry.class_name].put_back(entry)

    def skipped(self, request_id: str) -> None:
        """Note that a request popped in this scan was not started. It fills no batch, and has overtaken no request. Its
        class gets the payment back at once, for its next request in this scan."""
        if self._batch.drop(request_id):
            self.turned_back.starts -= 1
        entry, booked = self._popped.get(request_id, (None, {}))
        if entry is not None and booked is not None:
            self.fair_share.refund(booked)
            self._class_queues[entry.class_name].set_aside(entry)
            self._popped[request_id] = entry, None

    def loads(self, request_id: str) -> None:
        """Note that a request popped in this scan has room and waits for KV from another engine. It has started, but
        fills no batch."""
        self._batch.drop(request_id)

    @property
    def may_end_early(self) -> bool:
        """Whether `peek` can return None although requests wait."""
        return bool(self._batch.shielded) or self.policy.splits_batches

    def begin_scan(self, *, full: bool = False, prefilling: Collection[str] = ()) -> None:
        """Begin a scan: the engine passes over its queue.

        Args:
            full: a request that wants a batch of its own is being prefilled.
            prefilling: ids of the requests whose prefill goes on in this batch.
        """
        self._batch.begin(full=full, prefilling=prefilling)
        self._head = None
        self._popped = {}
        self._next_of_all = self.turned_back.overdue(self._entries, self._max_overtaken)
        for class_queue in self._class_queues.values():
            class_queue.begin_scan()
        if self.estimator.renew():
            self.prefix_index.stale_all(self._entries.values())

    @property
    def head(self) -> QueueEntry | None:
        """The entry of the request that `peek` returns. Read it, do not change it."""
        if self._head is None:
            self._head = self._choose()
        return self._head

    def peek(self) -> Waiting | None:
        """The next request; None if none waits, or if the batch may take no further request."""
        head = self.head
        return head.request if head else None

    def pop(self) -> Waiting:
        """Take the request that `peek` returns. Raises IndexError if `peek` returns None."""
        entry, self._head = self._head or self._choose(), None
        if entry is None:
            raise IndexError("pop from a queue that has no request to start")
        request = entry.request
        owed = self.fair_share.is_owed(entry.class_name)  # before it pays
        self._drop(entry)
        if owed and not len(self._class_queues[entry.class_name]):
            self._batch.shield(request.id, self.fair_share.priority(entry.class_name))
        self._popped[request.id] = (
            entry,
            self.fair_share.charge(entry.class_name, self._head_cost_s),
        )
        self._batch.add(request, self.policy)
        self.turned_back.starts += 1
        return request

    def remove(self, request_id: str) -> bool:
        """Remove a request. Returns False if it does not wait."""
        self._popped.pop(request_id, None)
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry is self._head:
            self._head = None
        self._drop(entry)
        return True

    def _choose(self) -> QueueEntry | None:
        if not self._entries or self._batch.is_full:
            return None
        looks = LOOKS_PER_PEEK
        if self.prefix_index.stale:
            looks = max(8, looks - self._recalibrate())
        next_of_all = self._next_of_all
        name = next_of_all.class_name if next_of_all else self.fair_share.next()
        if self._batch.shielded and self._batch.shuts_out(self.fair_share.priority(name)):
            return None
        entry = self._first(self._class_queues[name], looks)
        if not self._batch.takes(entry.request, self.policy):
            return None
        self._head_cost_s = self._cost_s(entry)
        return entry

    def _cost_s(self, entry: QueueEntry) -> float:
        """The payment of the request's class if the request starts now."""
        if entry.resumed:
            return 0.0
        exact = self.policy.calibrated and entry.evictions == self.prefix_index.evictions
        return entry.cost_s if exact else self.estimator.cost_s(entry.request)

    def _recalibrate(self, most: int = LOOKS_PER_PEEK) -> int:
        """Evaluate up to `most` stale entries. Returns their number."""
        entries = self.prefix_index.drain(most)
        for entry in entries:
            self._rescore(entry)
        return len(entries)

    def _first(self, class_queue: ClassQueue, looks: int) -> QueueEntry:
        if class_queue.overtaken() >= self._max_overtaken and (oldest := class_queue.oldest()):
            return oldest
        if self._next_of_all is not None:
            return self._next_of_all
        entry = class_queue.first()
        if self.policy.calibrated:
            # Keys computed before an eviction are lower bounds. So the first entry with an up-to-date key is really the
            # first.
            while entry and looks and entry.evictions != self.prefix_index.evictions:
                self._rescore(entry)
                looks -= 1
                entry = class_queue.first()
        assert entry is not None, "a class was chosen that has no request"
        return entry

    def _queue_of(self, entry: QueueEntry) -> ClassQueue:
        entry.class_name = self.fair_share.class_of(entry.request.qos)
        return self._class_queues[entry.class_name]

    def _new(self, request: Waiting, *, resumed: bool = False) -> QueueEntry:
        if request.id in self._entries:
            raise ValueError(f"request {request.id}: is already waiting; ids must be unique")
        entry = self.estimator.entry(request)
        entry.resumed = resumed
        entry.key, entry.cost_s = self.estimator.evaluate(entry)
        self._entries[request.id] = entry
        return entry

    def _drop(self, entry: QueueEntry) -> None:
        if entry is self._next_of_all:
            self._next_of_all = None
        del self._entries[entry.request.id]
        self.prefix_index.forget(entry)
        self._class_queues[entry.class_name].remove(entry)

    def _rescore(self, entry: QueueEntry) -> None:
        self._class_queues[entry.class_name].move(entry, *self.estimator.evaluate(entry))


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
            self.shielded = {
                request_id: kept[request_id] for request_id in prefilling if request_id in kept
            }
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


T = TypeVar("T")


class TurnedBack:
    """Bounds the time that a large request waits for room while small requests take the free pages.

    Used by one thread. `starts` counts requests that start; the queue adds to it.
    """

    def __init__(self) -> None:
        self.starts = 0
        # the value of `starts` when each was turned back, oldest first
        self._since: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since

    def add(self, request_id: str) -> None:
        """Note that the engine had no room for this request. Only the first time counts."""
        self._since.setdefault(request_id, self.starts)

    def overdue(self, waiting: Mapping[str, T], most: int) -> T | None:
        """The request that was turned back first, if at least `most` requests have started since.

        Args:
            waiting: all waiting requests, by id; others are forgotten here.
        """
        while self._since:
            request_id, starts = next(iter(self._since.items()))
            if request_id in waiting:
                return waiting[request_id] if self.starts - starts >= most else None
            del self._since[request_id]
        return None
