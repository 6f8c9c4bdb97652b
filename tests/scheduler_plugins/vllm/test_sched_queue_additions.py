# SPDX-License-Identifier: Apache-2.0
"""What a real engine asks of the queue beyond what the simulated one does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.qos.shares import BURST_S, DeficitShares
from scheduler_plugins.queue.waiting import WaitingQueue

CLASSES = (
    QosClass(name="premium", reserved_fraction=0.5, priority=9),
    QosClass(name="free", reserved_fraction=0.5, priority=1),
)


MODEL = CostModel(a=1e-3)


@dataclass
class Costs:
    model: CostModel = MODEL


def request(name: str, tokens: int, hashes: tuple[object, ...] = (), **more: object) -> Waiting:
    return Waiting(id=name, tokens=tokens, block_hashes=hashes, arrival_s=0.0, **more)  # type: ignore[arg-type]


def queue_of(
    *requests: Waiting,
    policy: str = "srjf_calibrated",
    cached: set[object] | None = None,
    **more: int,
) -> WaitingQueue:
    queue = WaitingQueue(
        create(policy),
        set() if cached is None else cached,
        page_size=4,
        costs=Costs(),
        classes=CLASSES,
        **more,
    )
    for one in requests:
        queue.add(one)
    return queue


def drain(queue: WaitingQueue) -> list[str]:
    queue.begin_scan()
    return [queue.pop().id for _ in range(len(queue))]


def test_what_is_charged_in_vain_is_refunded_exactly() -> None:
    shares = DeficitShares(CLASSES)
    shares.charge("free", 10.0, ())
    assert shares.balance_s("premium") == BURST_S, "full: it earns nothing more"
    before = {one.name: shares.balance_s(one.name) for one in CLASSES}
    for _ in range(100):
        shares.refund(shares.charge("free", 0.3, ()))
    after = {one.name: shares.balance_s(one.name) for one in CLASSES}
    assert after == pytest.approx(before)


def test_a_request_without_room_goes_first_when_enough_have_started() -> None:
    queue = queue_of(*(request(f"short{n}", 1) for n in range(4)), max_overtaken=2)
    queue.add(request("big", 9))
    queue.turned_back.add("big")
    taken = []
    for _ in range(5):
        queue.begin_scan()
        taken.append(queue.pop().id)
    assert taken == ["short0", "short1", "big", "short2", "short3"]


def test_what_was_popped_and_not_started_does_not_count_as_a_start() -> None:
    queue = queue_of(request("short", 1), request("big", 9), max_overtaken=2)
    queue.turned_back.add("big")
    for _ in range(5):
        queue.begin_scan()
        taken = queue.pop()
        assert taken.id == "short"
        queue.prepend(taken)


def test_a_request_without_room_that_does_not_wait_changes_nothing() -> None:
    queue = queue_of(request("a", 5), request("b", 1), max_overtaken=0)
    queue.turned_back.add("elsewhere")
    assert drain(queue) == ["a", "b"], "the bound alone: first come, first served"


def test_a_request_without_room_does_not_break_the_bound_of_its_class() -> None:
    queue = queue_of(request("oldest", 9), request("big", 8), max_overtaken=1)
    queue.turned_back.add("big")
    for n in range(2):
        queue.add(request(f"short{n}", 1))
    queue.begin_scan()
    assert queue.pop().id == "short0"
    queue.begin_scan()
    assert drain(queue) == ["oldest", "big", "short1"]


def test_a_request_without_room_still_wants_a_batch_by_itself() -> None:
    queue = queue_of(request("a", 1, max_tokens=4), policy="prefill_only", max_overtaken=0)
    queue.add(request("alone", 9, max_tokens=1))
    queue.turned_back.add("alone")
    queue.begin_scan()
    assert queue.pop().id == "a", "it is the oldest"
    assert queue.peek() is None


def test_tokens_that_are_loaded_cost_nothing_but_the_last_one() -> None:
    queue = queue_of(request("computed", 5), request("loaded", 100, loaded=100))
    assert queue.estimator.known_tokens(request("x", 100, loaded=100)) == 99
    assert drain(queue) == ["loaded", "computed"]


def test_another_policy_orders_what_waits_already() -> None:
    queue = queue_of(request("long", 9), request("short", 1))
    queue.set_policy(create("fcfs"), 7)
    assert drain(queue) == ["long", "short"]


def test_a_policy_that_follows_the_cache_finds_what_was_cached_before_it_came() -> None:
    cached: set[object] = {"x", "y"}
    queue = queue_of(
        request("other", 8), request("cached", 10, ("x", "y")), policy="fcfs", cached=cached
    )
    queue.set_policy(create("srjf_calibrated"), 256)
    assert drain(queue) == ["cached", "other"]


def test_another_bound_holds_from_now_on() -> None:
    queue = queue_of(request("long", 99))
    queue.set_policy(create("srjf_calibrated"), 1)
    for n in range(3):
        queue.add(request(f"short{n}", 1))
    assert drain(queue) == ["short0", "long", "short1", "short2"]


def test_the_last_block_that_a_waiting_request_finds_is_wanted() -> None:
    cached: set[object] = {"x"}
    queue = queue_of(request("a", 20, ("x", "y", "z")), cached=cached)
    assert queue.prefix_index.ends_prefix("x")
    cached.update("yz")
    queue.prefix_index.added("yz")
    queue.refresh(1)
    assert [queue.prefix_index.ends_prefix(block) for block in "xyz"] == [False, False, True]
    queue.remove("a")
    assert not queue.prefix_index.ends_prefix("z")


def test_a_block_is_wanted_until_the_last_of_those_that_find_it_is_gone() -> None:
    cached: set[object] = {"x"}
    queue = queue_of(request("a", 9, ("x",)), request("b", 9, ("x",)), cached=cached)
    queue.remove("a")
    assert queue.prefix_index.ends_prefix("x")
    queue.begin_scan()
    queue.pop()
    assert not queue.prefix_index.ends_prefix("x")


def test_requests_of_no_class_belong_to_the_lowest() -> None:
    queue = queue_of()
    assert [queue.fair_share.class_of(name) for name in ("premium", "free", "gold", "")] == [
        *("premium", "free", "free", "free")
    ]
