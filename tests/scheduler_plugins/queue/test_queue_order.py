# SPDX-License-Identifier: Apache-2.0
"""Against an oracle that sorts everything again at every dequeue, the queue takes the same request."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.waiting import LOOKS_PER_PEEK, WaitingQueue

BLOCK = 4
MODEL = CostModel(a=1.0, b=0.01, c=0.5)
POLICIES = ("fcfs", "priority", "srjf", "srjf_calibrated", "longest_prefix", "prefill_only")


@dataclass
class Costs:
    model: CostModel = MODEL


@dataclass
class Expected:
    """One request as the oracle keeps it."""

    request: Waiting
    number: int
    static_s: float
    resumed: bool = False


def chained(path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Hashes of blocks with these contents: each is its whole prefix."""
    return [path[: n + 1] for n in range(len(path))]


class Oracle:
    """All that waits, in a list."""

    def __init__(self, policy: QueuePolicy, cached: set[tuple[int, ...]], bound: int) -> None:
        self.policy, self.cached, self.bound = policy, cached, bound
        self.waiting: list[Expected] = []
        self.last = 0
        self.left: set[int] = set()

    def cached_tokens(self, request: Waiting) -> int:
        usable, blocks = (request.tokens - 1) // BLOCK, 0
        for block in request.block_hashes[:usable]:
            if block not in self.cached:
                break
            blocks += 1
        return blocks * BLOCK

    def cost_s(self, request: Waiting) -> float:
        return MODEL.prefill_s(request.tokens, self.cached_tokens(request))

    def key(self, one: Expected) -> tuple[float, int]:
        cost_s = self.cost_s(one.request) if self.policy.calibrated else one.static_s
        cached = self.cached_tokens(one.request)
        if one.resumed and self.policy.resumes_first:
            return -inf, one.number
        return self.policy.key(one.request, cached, cost_s), one.number

    def first(self) -> Expected:
        oldest = min(self.waiting, key=lambda one: one.number)
        if sum(number > oldest.number for number in self.left) >= self.bound:
            return oldest
        return min(self.waiting, key=self.key)


class QueueAgainstOracle(RuleBasedStateMachine):
    """Arrivals, evictions, put-backs and preemptions in any order."""

    paths = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(tuple)

    @initialize(name=st.sampled_from(POLICIES), bound=st.sampled_from([1, 3, 1000]))
    def begin(self, name: str, bound: int) -> None:
        self.cached: set[tuple[int, ...]] = set()
        self.running: list[Expected] = []
        self.now_s = 0.0
        self.oracle = Oracle(create(name, 0.5), self.cached, bound)
        self.queue = WaitingQueue(
            create(name, 0.5),
            self.cached,
            page_size=BLOCK,
            costs=Costs(),
            max_overtaken=bound,
        )

    @rule(path=paths, more=st.integers(0, 3), after_s=st.floats(0, 5), priority=st.integers(0, 2))
    def arrive(self, path: tuple[int, ...], more: int, after_s: float, priority: int) -> None:
        self.now_s += after_s
        number = self.oracle.last
        self.oracle.last += 1
        request = Waiting(
            id=str(number),
            tokens=max(1, len(path) * BLOCK + more),
            block_hashes=chained(path),
            arrival_s=self.now_s,
            priority=priority,
        )
        self.oracle.waiting.append(Expected(request, number, self.oracle.cost_s(request)))
        self.queue.add(request)

    @rule(path=paths.filter(bool))
    def store(self, path: tuple[int, ...]) -> None:
        new = [block for block in chained(path) if block not in self.cached]
        self.cached.update(new)
        self.queue.prefix_index.added(new)

    @rule(blocks=st.lists(paths.filter(bool), min_size=1, max_size=4))
    def evict(self, blocks: list[tuple[int, ...]]) -> None:
        """Blocks anywhere in a prompt, so that later ones may stay."""
        self.cached.difference_update(blocks)
        self.queue.prefix_index.removed()

    @rule(data=st.data(), count=st.integers(1, 4))
    def scan(self, data: st.DataObject, count: int) -> None:
        self.queue.begin_scan()
        skipped = []
        for _ in range(min(count, len(self.oracle.waiting))):
            expected = self.oracle.first()
            assert self.queue.peek() is expected.request
            assert self.queue.pop() is expected.request
            self.oracle.waiting.remove(expected)
            self.oracle.left.add(expected.number)
            if data.draw(st.booleans(), label="started"):
                self.running.append(expected)
                continue
            skipped.append(expected)
            if data.draw(st.booleans(), label="known at once"):
                self.queue.skipped(expected.request.id)
                self.oracle.left.remove(expected.number)
        for one in skipped:
            self.queue.prepend(one.request)
            self.oracle.waiting.append(one)
            self.oracle.left.discard(one.number)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running), label="preempted")
        self.running.remove(one)
        self.queue.begin_scan()
        self.queue.prepend(one.request)
        numbers = [other.number for other in self.oracle.waiting]
        if numbers:
            one.number = min(numbers) - 1
        else:
            one.number = self.oracle.last - 1
        self.oracle.left.discard(one.number)
        one.resumed = True
        one.static_s = self.oracle.cost_s(one.request)
        self.oracle.waiting.append(one)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.oracle.waiting:
            return
        one = data.draw(st.sampled_from(self.oracle.waiting), label="aborted")
        self.oracle.waiting.remove(one)
        self.oracle.left.add(one.number)
        assert self.queue.remove(one.request.id)
        assert not self.queue.remove(one.request.id)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "queue"):
            waiting = {one.request.id for one in self.oracle.waiting}
            assert {request.id for request in self.queue} == waiting
            assert len(self.queue) == len(waiting)
            assert bool(self.queue.peek()) == bool(waiting)
            self.queue.begin_scan()


TestQueueAgainstOracle = QueueAgainstOracle.TestCase
TestQueueAgainstOracle.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def two(cached: set[object]) -> tuple[WaitingQueue, Waiting, Waiting]:
    """A long request that came first and shares `(1,)`, and a short one that shares nothing."""
    queue = WaitingQueue(create("srjf_calibrated"), cached, page_size=BLOCK, costs=Costs())
    long = Waiting(id="long", tokens=6, block_hashes=chained((1,)), arrival_s=0.0)
    short = Waiting(id="short", tokens=4, block_hashes=(), arrival_s=0.0)
    queue.add(long)
    queue.add(short)
    return queue, long, short


def test_a_request_gains_its_place_when_its_prefix_is_cached() -> None:
    cached: set[object] = set()
    queue, long, short = two(cached)
    assert queue.peek() is short
    cached.add((1,))
    queue.prefix_index.added([(1,)])
    queue.begin_scan()
    assert queue.peek() is long


def test_without_the_notification_it_would_stay_behind() -> None:
    cached: set[object] = set()
    queue, _, short = two(cached)
    cached.add((1,))
    queue.begin_scan()
    assert queue.peek() is short


def test_a_request_loses_its_place_when_its_prefix_is_evicted() -> None:
    cached: set[object] = {(1,)}
    queue, long, short = two(cached)
    assert queue.peek() is long
    cached.clear()
    queue.prefix_index.removed()
    queue.begin_scan()
    assert queue.peek() is short


def test_after_a_change_for_very_many_the_order_catches_up_a_bounded_step_at_a_time() -> None:
    cached: set[object] = set()
    queue = WaitingQueue(create("srjf_calibrated", 0.0), cached, page_size=BLOCK, costs=Costs())
    many = 5 * LOOKS_PER_PEEK
    for n in range(many):
        queue.add(Waiting(id=str(n), tokens=2000 - n, block_hashes=chained((1,)), arrival_s=0.0))
    queue.add(Waiting(id="last", tokens=2001, block_hashes=chained((1, 2)), arrival_s=0.0))
    cached.update([(1,), (1, 2)])
    queue.prefix_index.added([(1,), (1, 2)])
    for scan in range(1, 8):
        queue.begin_scan()
        first = queue.peek()
        assert first is not None
        if scan * LOOKS_PER_PEEK > many:
            assert first.id == str(many - 1)
    assert len(list(queue)) == len(queue) == many + 1


def test_a_new_cost_model_orders_anew() -> None:
    costs = Costs(CostModel(a=1.0))
    queue = WaitingQueue(create("srjf"), set(), page_size=1, costs=costs)
    whole = Waiting(id="whole", tokens=10, block_hashes=(), arrival_s=0.0)
    queue.add(whole)
    chunked = Waiting(id="chunked", tokens=11, block_hashes=(), arrival_s=0.0)
    queue.add(chunked)
    assert queue.peek() is whole
    before_s = queue.estimator.cost_s(whole)
    costs.model = CostModel(a=2.0)
    queue.begin_scan()
    queue.peek()
    assert queue.estimator.cost_s(whole) == 2 * before_s
    assert sum(queue.class_queue("default").work.waiting_s) == pytest.approx(42.0)


@pytest.mark.parametrize("name", POLICIES)
def test_keys_do_not_fall_when_blocks_are_evicted(name: str) -> None:
    """What makes looking at the head enough (`QueuePolicy.key`)."""
    policy = create(name)
    request = Waiting(id="r", tokens=100, block_hashes=(), arrival_s=7.0)
    keys = [policy.key(request, n, MODEL.prefill_s(100, n)) for n in range(96, -1, -4)]
    assert keys == sorted(keys)


def test_lengths_are_grouped_and_the_oldest_decides_which_group_goes_first() -> None:
    queue = WaitingQueue(create("length_grouped"), set(), page_size=16, costs=Costs())
    for n, tokens in enumerate((1000, 10, 900, 12, 100, 700)):
        queue.add(Waiting(id=str(tokens), tokens=tokens, block_hashes=(), arrival_s=float(n)))
    queue.begin_scan()
    assert [queue.pop().tokens for _ in range(3)] == [1000, 900, 700]
    queue.begin_scan()
    assert [queue.pop().tokens for _ in range(3)] == [10, 12, 100]
