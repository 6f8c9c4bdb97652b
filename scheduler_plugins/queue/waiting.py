# SPDX-License-Identifier: Apache-2.0
"""The queue: classes take turns, a policy orders each, the cache reorders."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from scheduler_plugins.order.base import MAX_OVERTAKEN, QueuePolicy
from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.qos.classes import ONLY, QosClass
from scheduler_plugins.queue.costing import Costing, Costs
from scheduler_plugins.queue.lane import Lane
from scheduler_plugins.queue.place import Place
from scheduler_plugins.queue.prefixes import Prefixes
from scheduler_plugins.queue.turns import Turns

LOOKS_PER_PEEK = 32
"""Places that are evaluated anew before one is chosen. The order is exact unless the cache made
more requests than that cheaper, or more than that at the head dearer, since the last choice."""

MOST_SHARED = 2
"""At most this part of a step is kept for those that go before a prefill: it takes twice as long at
the worst."""


class WaitingQueue:
    """Waiting requests in the order in which an engine should take them.

    A scan is one pass of an engine over its queue: `begin_scan`, then `peek` and `pop` until the
    engine is full. Within a scan `pop` returns what `peek` returned, whatever the cache does in
    between. The next scan looks at everything anew.

    **Bound on waiting.** No request is overtaken by more than `max_overtaken` requests of its class
    that were added after it, under any load and with any policy: before one that was added later is
    taken, the oldest of the class goes first if it has been overtaken that often already, and
    nobody has been overtaken more often than the oldest (see `Lane.overtaken`). So a request starts
    at the latest after what was there when it came and `max_overtaken` later ones; where short
    ones overtake, each of these costs less than itself. Other classes lengthen that by at most 1 /
    `reserved_fraction`. Requests that are removed count as having overtaken.

    **Batches.** `peek` returns None although requests wait where the batch has to go without another:
    for a request that wants one by itself, and for what is guarded (`Turns`).
    """

    def __init__(
        self,
        policy: QueuePolicy,
        cached: Container[BlockHash],
        *,
        block_tokens: int,
        costs: Costs,
        classes: Sequence[QosClass] = ONLY,
        max_overtaken: int = MAX_OVERTAKEN,
    ) -> None:
        """An empty queue.

        Args:
            cached: the hashes of all blocks that can be read from the cache; `in` must be quick.
            block_tokens: tokens in a block.
        """
        self._max_overtaken = max_overtaken
        self._prefixes = Prefixes(cached)
        self.costing = Costing(policy, self._prefixes, costs, block_tokens=block_tokens)
        """To be asked by others, not changed."""
        self._places: dict[str, Place] = {}
        self._lanes: dict[str, Lane] = {}
        self._out: dict[str, tuple[Place, Mapping[str, float]]] = {}
        self._head: Place | None = None
        self.reserved: str | None = None
        """Nobody starts before this request, if it waits, whatever the order: for one that the engine
        had no room for while others started."""
        self._alone: str | None = None
        self._started: set[str] = set()
        self.turns = Turns()
        """Of the classes; to be asked by others, not changed."""
        self.set_classes(classes)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[Waiting]:
        """All requests, class by class, in the order of the last evaluation."""
        for lane in self._lanes.values():
            yield from (place.request for place in lane)

    def set_classes(self, classes: Sequence[QosClass]) -> None:
        """Use other classes; requests move to theirs, and keep their order of arrival."""
        arrived = sorted(self._places.values(), key=lambda place: place.request.arrival_s)
        self._lanes = {one.name: Lane() for one in classes}
        self.turns.update(classes, self._lanes)
        for place in arrived:
            self._lane_of(place).append(place)
        self._out = {}
        self._head = None

    @property
    def policy(self) -> QueuePolicy:
        """The order within a class."""
        return self.costing.policy

    def set_policy(self, policy: QueuePolicy, max_overtaken: int) -> None:
        """Use another order; requests keep their order of arrival."""
        self.costing.policy, self._max_overtaken = policy, max_overtaken
        for place in self._places.values():
            place.group = policy.group(place.request)
            place.key, place.cost_s = self.costing.evaluate(place)
        self.set_classes(self.turns.classes)

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""
        return list(self._lanes)

    def lane(self, name: str) -> Lane:
        """What waits in a class; to be read, not changed."""
        return self._lanes[name]

    def cost_s(self, request: Waiting) -> float:
        """Predicted prefill time of a request, given what is cached now."""
        return self.costing.cost_s(request)

    def added(self, blocks: Iterable[BlockHash]) -> None:
        """The cache has blocks that it did not have. Call when it holds that they are in `cached`,
        and for all that an engine step stored at once.
        """
        self._prefixes.added(blocks)

    def removed(self) -> None:
        """The cache has lost blocks. Call when it holds that they are not in `cached` any more."""
        self._prefixes.removed()

    def refresh(self, most: int) -> None:
        """Between two scans: evaluate anew up to `most` requests whose cost has changed."""
        if self.costing.renew():
            self._prefixes.stale_all(self._places.values())
        if self._prefixes.stale:
            self._recalibrate(most)

    def wanted(self, block: BlockHash) -> bool:
        """Whether the cached prefix of a request that waits ends with this block, as far as it has
        been looked at. Only policies that follow the cache know.
        """
        return self._prefixes.wanted(block)

    def add(self, request: Waiting) -> None:
        """A new request. Raises ValueError if one with its id waits already."""
        place = self._new(request)
        lane = self._lane_of(place)
        lane.append(place)
        lane.work.arrive(place.bucket, place.cost_s, request.arrival_s)

    def prepend(self, request: Waiting) -> None:
        """Put back a request that was popped.

        One that was popped in this scan was not started: it gets its place back, and its class the
        cost. One that was popped earlier was preempted: it is the first and the oldest of its
        class, before what it has computed is evicted, and the class does not pay for it again.
        Blocks that it leaves in the cache have to be told before.
        """
        self.skipped(request.id)
        out = self._out.pop(request.id, None)
        if out is None:
            place = self._new(request, resumed=True)
            self._lane_of(place).put_first(place)
            return
        place, booked = out
        self.turns.refund(booked)
        self._places[request.id] = place
        if self.policy.calibrated:
            place.key, place.cost_s = self.costing.evaluate(place)
        self._lanes[place.lane].put_back(place)

    def skipped(self, request_id: str) -> None:
        """What was popped in this scan was not started: it fills no batch by itself."""
        self._started.discard(request_id)
        self.turns.unguard(request_id)
        if self._alone == request_id:
            self._alone = None

    @property
    def may_end_early(self) -> bool:
        """Whether `peek` may return None although requests wait."""
        return bool(self.turns.guarded) or self.costing.policy.splits_batches

    def begin_scan(self, *, full: bool = False, prefilling: Collection[str] = ()) -> None:
        """The engine looks at its queue anew.

        Args:
            full: a request that wants a batch by itself is being prefilled.
            prefilling: ids of the requests whose prefill goes on in this batch.
        """
        if self.turns.guarded:
            self.turns.keep_guards(prefilling)
        self._head = None
        self._out = {}
        self._started = set()
        self._alone = "" if full else None
        for lane in self._lanes.values():
            lane.turn()
        if self.costing.renew():
            self._prefixes.stale_all(self._places.values())

    def peek(self) -> Waiting | None:
        """The next request; None if none waits, or the batch has to go without another."""
        if self._head is None:
            self._head = self._choose()
        return self._head.request if self._head else None

    def tokens_before(self, prefill: Waiting, computed_tokens: int, most_tokens: int) -> int:
        """Prompt tokens of the next requests that go before what is left of a prefill under way:
        shortest remaining work first, where the policy says so.

        Args:
            computed_tokens: of its prompt, cached ones included.
            most_tokens: requests that need more than that together are left out.
        """
        if not self.policy.overtakes_running or self.peek() is None or self._head is None:
            return 0
        head, tokens = self._head, 0
        if not self.turns.outranks(head.lane, prefill.qos):
            return 0
        key = self.costing.left(prefill, computed_tokens)
        others = (place for place in self._lanes[head.lane].upcoming() if place is not head)
        for place in islice(chain((head,), others), LOOKS_PER_PEEK):
            if place.key >= key:
                break
            fresh = place.request.tokens - self.costing.spared_tokens(place.request)
            if tokens + fresh > most_tokens:
                break
            tokens += fresh
        return tokens

    def pop(self) -> Waiting:
        """Take the request that `peek` returns. Raises IndexError where that is None."""
        place, self._head = self._head or self._choose(), None
        if place is None:
            raise IndexError("pop from a queue that has no request to start")
        request, policy = place.request, self.costing.policy
        exact = policy.calibrated and place.evictions == self._prefixes.evictions
        self._drop(place)
        cost_s = place.cost_s if exact else self.cost_s(request)
        cost_s = 0.0 if place.resumed else cost_s
        self._out[request.id] = place, self.turns.start(request.id, place.lane, cost_s)
        self._started.add(request.id)
        if policy.splits_batches and policy.alone(request):
            self._alone = request.id
        return request

    def remove(self, request_id: str) -> bool:
        """Forget a request; False if it does not wait."""
        self._out.pop(request_id, None)
        place = self._places.get(request_id)
        if place is None:
            return False
        if place is self._head:
            self._head = None
        self._drop(place)
        return True

    def _choose(self) -> Place | None:
        if not self._places or self._alone is not None:
            return None
        looks, turns, policy = LOOKS_PER_PEEK, self.turns, self.costing.policy
        if self._prefixes.stale:
            looks = max(8, looks - self._recalibrate())
        reserved = self._places.get(self.reserved) if self.reserved else None
        name = reserved.lane if reserved else turns.next()
        if turns.guarded and turns.shuts_out(name):
            return None
        place = self._first(self._lanes[name], looks, reserved)
        if policy.splits_batches and self._started and policy.alone(place.request):
            return None
        return place

    def _recalibrate(self, most: int = LOOKS_PER_PEEK) -> int:
        """Evaluate anew up to `most` whom the cache has made cheaper; their number."""
        places = self._prefixes.drain(most)
        for place in places:
            self._rescore(place)
        return len(places)

    def _first(self, lane: Lane, looks: int, reserved: Place | None) -> Place:
        if lane.overtaken() >= self._max_overtaken and (oldest := lane.oldest()):
            return oldest
        if reserved is not None:
            return reserved
        place = lane.first()
        if self.costing.policy.calibrated:
            # Keys computed before an eviction are lower bounds: whoever comes first with a key that
            # is true is the true first.
            while place and looks and place.evictions != self._prefixes.evictions:
                self._rescore(place)
                looks -= 1
                place = lane.first()
        assert place is not None, "a lane was chosen that has no request"
        return place

    def _lane_of(self, place: Place) -> Lane:
        place.lane = self.turns.class_of(place.request.qos)
        return self._lanes[place.lane]

    def _new(self, request: Waiting, *, resumed: bool = False) -> Place:
        if request.id in self._places:
            raise ValueError(f"request {request.id}: waits already; ids must be unique")
        place = self.costing.place(request)
        place.resumed = resumed
        place.key, place.cost_s = self.costing.evaluate(place)
        self._places[request.id] = place
        return place

    def _drop(self, place: Place) -> None:
        del self._places[place.request.id]
        self._prefixes.forget(place)
        self._lanes[place.lane].take(place)

    def _rescore(self, place: Place) -> None:
        self._lanes[place.lane].move(place, *self.costing.evaluate(place))
