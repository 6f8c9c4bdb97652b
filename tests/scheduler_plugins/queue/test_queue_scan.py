# SPDX-License-Identifier: Apache-2.0
"""What an engine may rely on while it goes through its queue."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.queue.step_length import (
    MOST_CUT,
    STEP_OVERHEAD,
    step_tokens,
    tokens_before,
)
from scheduler_plugins.queue.waiting import Batch, WaitingQueue

MODEL = CostModel(a=1e-3)


@dataclass
class Costs:
    model: CostModel = MODEL


def queue_of(policy: str = "srjf_calibrated", cached: set[object] | None = None) -> WaitingQueue:
    return WaitingQueue(
        create(policy), set() if cached is None else cached, page_size=4, costs=Costs()
    )


def request(name: str, tokens: int, hashes: tuple[object, ...] = (), **more: object) -> Waiting:
    return Waiting(id=name, tokens=tokens, block_hashes=hashes, arrival_s=0.0, **more)  # type: ignore[arg-type]


def drain(queue: WaitingQueue) -> list[str]:
    queue.begin_scan()
    return [queue.pop().id for _ in range(len(queue))]


def test_pop_returns_what_peek_returned_though_the_cache_changed_in_between() -> None:
    cached: set[object] = set()
    queue = queue_of(cached=cached)
    queue.add(request("a", 10))
    queue.add(request("b", 12, ("x", "y")))
    queue.begin_scan()
    assert queue.peek() is not None
    cached.update(("x", "y"))
    queue.prefix_index.added(["x", "y"])
    queue.add(request("c", 1))
    assert queue.pop().id == "a"
    queue.begin_scan()
    assert queue.pop().id == "c"
    assert queue.pop().id == "b"


def test_what_was_skipped_keeps_its_place() -> None:
    queue = queue_of()
    for name, tokens in (("a", 3), ("b", 2), ("c", 1), ("d", 2)):
        queue.add(request(name, tokens))
    queue.begin_scan()
    skipped = [queue.pop(), queue.pop()]
    assert queue.pop().id == "d"
    for one in skipped:
        queue.prepend(one)
    assert drain(queue) == ["c", "b", "a"]


def test_what_was_preempted_goes_before_its_equals() -> None:
    queue = queue_of("fcfs")
    first = request("first", 4)
    queue.add(first)
    queue.begin_scan()
    assert queue.pop() is first
    queue.add(request("second", 4))
    queue.begin_scan()
    queue.prepend(first)
    assert drain(queue) == ["first", "second"]


def test_a_head_that_is_aborted_is_not_popped() -> None:
    queue = queue_of()
    queue.add(request("a", 1))
    queue.add(request("b", 2))
    queue.begin_scan()
    assert queue.peek() is not None
    assert queue.remove("a")
    assert queue.pop().id == "b"
    assert queue.peek() is None
    with pytest.raises(IndexError, match="no request"):
        queue.pop()


def test_ids_are_unique() -> None:
    queue = queue_of()
    queue.add(request("a", 1))
    with pytest.raises(ValueError, match="request a: is already waiting"):
        queue.add(request("a", 2))


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    queue = queue_of(cached={"x", "y"})
    assert queue.estimator.cost_s(request("whole", 8, ("x", "y"))) == pytest.approx(4e-3)
    assert queue.estimator.cost_s(request("longer", 9, ("x", "y"))) == pytest.approx(1e-3)


def test_a_one_token_request_gets_a_batch_of_its_own() -> None:
    queue = queue_of("prefill_only")
    queue.add(request("short", 2, max_tokens=1))
    queue.add(request("chat", 5, max_tokens=50))
    queue.add(request("long", 9, max_tokens=1))
    queue.begin_scan()
    assert queue.pop().id == "short"
    assert queue.peek() is None, "the batch is full with one"
    queue.begin_scan(full=True)
    assert queue.peek() is None, "its prefill goes on"
    queue.begin_scan()
    assert queue.pop().id == "chat"
    assert queue.peek() is None, "`long` wants no company"
    queue.begin_scan()
    assert queue.pop().id == "long"


def test_a_one_token_request_that_is_skipped_does_not_block_the_batch() -> None:
    queue = queue_of("prefill_only")
    blocked = request("blocked", 2, max_tokens=1)
    queue.add(blocked)
    queue.add(request("next", 5, max_tokens=1))
    queue.begin_scan()
    assert queue.pop() is blocked
    queue.skipped("blocked")
    assert queue.pop().id == "next"
    queue.prepend(blocked)
    assert drain(queue) == ["blocked"]


def test_other_classes_can_be_set_while_requests_wait() -> None:
    classes = (
        QosClass(name="gold", reserved_fraction=0.5, priority=2),
        QosClass(name="free", reserved_fraction=0.5, priority=1),
    )
    queue = queue_of("fcfs")
    for n in range(4):
        queue.add(request(str(n), 1, qos="gold" if n % 2 else "unheard of"))
    queue.set_classes(classes)
    assert [one.id for one in queue] == ["1", "3", "0", "2"]
    queue.set_classes(classes[1:])
    assert drain(queue) == ["0", "1", "2", "3"]


def test_a_prefill_yields_to_a_class_that_is_owed_and_is_not_paid_twice() -> None:
    classes = (
        QosClass(name="gold", reserved_fraction=0.5, priority=2),
        QosClass(name="free", reserved_fraction=0.3, priority=1),
        QosClass(name="rest", reserved_fraction=0.2, priority=0),
    )
    queue = queue_of()
    queue.set_classes(classes)
    running = request("running", 1000, qos="free")
    for one in (running, request("more", 1000, qos="free"), request("last", 1000, qos="rest")):
        queue.add(one)
    queue.begin_scan()
    assert queue.pop() is running
    assert not queue.fair_share.should_yield(running.qos, queue.head.class_name), (
        "nobody of higher priority waits"
    )
    queue.add(request("owed", 10, qos="gold"))
    queue.begin_scan()
    assert queue.fair_share.should_yield(running.qos, queue.head.class_name)
    queue.prepend(running)
    before_s = queue.fair_share.balance_s("free")
    assert queue.pop().id == "owed"
    queue.begin_scan()
    assert queue.pop() is running
    earned_s = 0.3 * 10e-3
    assert queue.fair_share.balance_s("free") == pytest.approx(before_s + earned_s)


SHARING = (
    QosClass(name="gold", reserved_fraction=0.5, priority=2),
    QosClass(name="free", reserved_fraction=0.5, priority=1),
)


def sharing(*ids: str) -> WaitingQueue:
    """A queue whose class `gold` is owed, with requests g.. of it and others of `free`."""
    queue = queue_of()
    queue.set_classes(SHARING)
    queue.add(request("paid", 1000, qos="free"))
    queue.begin_scan()
    queue.pop()
    assert queue.fair_share.balance_s("gold") > 0
    for one in ids:
        queue.add(request(one, 10, qos="gold" if one.startswith("g") else "free"))
    queue.begin_scan()
    return queue


def test_nothing_of_lower_priority_joins_the_step_of_what_is_owed() -> None:
    queue = sharing("g1", "f1")
    assert queue.pop().id == "g1"
    assert queue.may_end_early
    assert queue.peek() is None
    queue.add(request("g2", 10, qos="gold"))
    assert queue.pop().id == "g2", "its own class may join"
    queue.begin_scan(prefilling=["g1", "g2"])
    assert queue.peek() is None, "nor a later step of its prefill"
    queue.begin_scan(prefilling=["other"])
    assert queue.pop().id == "f1"


def test_without_shields_lower_classes_would_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "shield", lambda *_: None)
    queue = sharing("g1", "f1")
    assert [queue.pop().id for _ in range(2)] == ["g1", "f1"]


def test_full_batches_where_the_class_has_a_queue() -> None:
    queue = sharing("g1", "g2", "f1")
    queue.add(request("g3", 4000, qos="gold"))
    assert queue.pop().id == "g1"
    assert not queue.may_end_early


def test_full_batches_beside_what_is_lent_or_was_not_started() -> None:
    queue = sharing("g1", "f1")
    queue.pop()
    queue.skipped("g1")
    assert queue.pop().id == "f1"
    lent = queue_of()
    lent.set_classes(SHARING)
    lent.add(request("g1", 10, qos="gold"))
    lent.add(request("f1", 10, qos="free"))
    lent.begin_scan()
    assert [lent.pop().id for _ in range(2)] == ["g1", "f1"]


@pytest.mark.parametrize(
    ("waiting", "prefilling", "short"),
    [
        ((), ["free"], True),  # its next request would wait for the step
        (("f1",), [], True),
        (("g1", "f1"), [], True),  # it shares the step
        (("f1",), ["gold"], True),
        ((), ["gold", "free"], True),
        (("g1",), ["gold"], False),  # it has the engine for itself
        ((), [], False),
    ],
)
def test_steps_are_short_where_an_owed_class_has_others_beside_it(
    waiting: tuple[str, ...], prefilling: list[str], short: bool
) -> None:
    assert sharing(*waiting).fair_share.wants_short_steps(prefilling) is short


def test_steps_are_long_where_nobody_is_owed() -> None:
    queue = sharing("f1", "g1")
    queue.fair_share._shares._balances = {"gold": 0.0, "free": 1.0}
    assert not queue.fair_share.wants_short_steps(["free"])
    assert not queue_of().fair_share.wants_short_steps(["default"]), "there is one class only"


def test_a_short_step_has_as_many_tokens_as_its_fixed_cost_allows() -> None:
    queue = sharing("f1")
    model = queue.estimator.model
    for tokens, short in ((24, 24), (2, 64 // MOST_CUT), (500, 64)):
        queue.estimator.model = replace(model, c=tokens * model.a * STEP_OVERHEAD)
        assert step_tokens(queue, 64, ["free"]) == short
        assert step_tokens(queue, 64, ["gold"]) == short
    queue.estimator.model = replace(model, known=False)
    assert step_tokens(queue, 64, ["free"]) == 64, "what a step costs must be known"


def test_tokens_before_a_prefill_are_those_of_the_shorter_requests_in_order() -> None:
    cached: set[object] = {"x", "y"}
    queue = queue_of(cached=cached)
    prefill = request("running", 100)
    for name, tokens, hashes in (("a", 10, ()), ("b", 11, ("x", "y")), ("c", 50, ()), ("d", 5, ())):
        queue.add(request(name, tokens, hashes))
    queue.begin_scan()
    assert tokens_before(queue, prefill, 0, 2000) == 3 + 5 + 10 + 50
    assert tokens_before(queue, prefill, 0, 134) == 3 + 5 + 10
    assert tokens_before(queue, prefill, 60, 2000) == 3 + 5 + 10
    assert tokens_before(queue, prefill, 97, 2000) == 0
    assert tokens_before(queue, prefill, 0, 4) == 0
    cached.clear()  # b is dearer than it was thought to be
    queue.prefix_index.removed()
    queue.begin_scan()
    assert tokens_before(queue, prefill, 0, 40) == 5 + 10
    assert [queue.pop().id for _ in range(2)] == ["d", "a"]


@pytest.mark.parametrize("policy", ["fcfs", "srjf", "longest_prefix", "prefill_only"])
def test_policies_that_say_nothing_of_what_is_left_let_prefills_go_on(policy: str) -> None:
    queue = queue_of(policy)
    queue.add(request("short", 1))
    queue.begin_scan()
    assert tokens_before(queue, request("running", 100), 0, 2000) == 0
