# SPDX-License-Identifier: Apache-2.0
"""Nobody waits for ever: the bound on overtaking holds under any load, with any policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import POLICIES, create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.queue.waiting import WaitingQueue

MODEL = CostModel(a=1e-3)


@dataclass
class Costs:
    model: CostModel = MODEL


CLASSES = (
    QosClass(name="gold", reserved_fraction=0.4, priority=2),
    QosClass(name="rest", reserved_fraction=0.2, priority=1),
)


def queue_of(policy: str, bound: int, lambda_: float = 0.0) -> WaitingQueue:
    return WaitingQueue(
        create(policy, lambda_),
        set(),
        page_size=16,
        costs=Costs(),
        classes=CLASSES,
        max_overtaken=bound,
    )


def request(number: int, tokens: int, qos: str = "rest", arrival_s: float = 0.0) -> Waiting:
    return Waiting(
        id=str(number),
        tokens=tokens,
        block_hashes=(),
        arrival_s=arrival_s,
        qos=qos,
        priority=tokens,
        max_tokens=tokens % 3,
    )


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 50), st.sampled_from(["gold", "rest"])),
        st.tuples(st.just("pop"), st.integers(1, 3), st.just("")),
        st.tuples(st.just("abort"), st.integers(0, 100), st.just("")),
    ),
    max_size=200,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, policy=st.sampled_from(sorted(POLICIES)), bound=st.integers(0, 6))
def test_no_request_is_overtaken_more_often_than_the_bound(
    steps: list[tuple[str, int, str]], policy: str, bound: int
) -> None:
    queue = queue_of(policy, bound)
    waiting: dict[str, Waiting] = {}
    overtaken: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    def leave(gone: Waiting, *, served: bool) -> None:
        del waiting[gone.id]
        ended[gone.id] += 1
        for other in waiting.values():
            if served and other.qos == gone.qos and int(other.id) < int(gone.id):
                overtaken[other.id] += 1
                assert overtaken[other.id] <= bound

    for number, (action, value, qos) in enumerate(steps):
        if action == "add":
            waiting[str(number)] = request(number, value, qos)
            queue.add(waiting[str(number)])
        elif action == "abort" and waiting:
            gone = list(waiting.values())[value % len(waiting)]
            assert queue.remove(gone.id)
            leave(gone, served=False)
        elif action == "pop":
            for _ in range(value):
                queue.begin_scan()
                if waiting:
                    leave(queue.pop(), served=True)
    while waiting:
        queue.begin_scan()
        leave(queue.pop(), served=True)
    assert set(ended.values()) <= {1}
    assert len(queue) == 0


def starve(bound: int, rounds: int) -> int:
    """After how many short requests the long one that came first is served."""
    queue = queue_of("srjf", bound)
    queue.add(request(0, 1000))
    for n in range(1, rounds):
        queue.add(request(n, 1))
        queue.begin_scan()
        if queue.pop().id == "0":
            return n - 1
    return rounds


def test_a_long_request_is_served_under_endless_short_ones() -> None:
    assert starve(bound=7, rounds=500) == 7


def test_without_the_bound_it_would_starve() -> None:
    assert starve(bound=10**9, rounds=500) == 500


@pytest.mark.parametrize("lambda_", [0.1, 1.0])
def test_only_what_arrives_within_cost_over_lambda_overtakes(lambda_: float) -> None:
    queue = queue_of("srjf_calibrated", 10**9, lambda_)
    long = request(0, 2000)  # costs 2 s
    queue.add(long)
    window_s = 2.0 / lambda_
    queue.add(request(1, 1, arrival_s=window_s * 0.99))
    queue.add(request(2, 1, arrival_s=window_s * 1.01))
    queue.begin_scan()
    assert [queue.pop().id for _ in range(3)] == ["1", "0", "2"]


def test_a_class_does_not_starve_another() -> None:
    queue = queue_of("srjf_calibrated", 100)
    for n in range(300):
        queue.add(request(n, 10, "gold" if n % 2 else "rest"))
    queue.begin_scan()
    first = Counter(queue.pop().qos for _ in range(90))
    assert first["rest"] >= 0.2 * 90 - 2
    assert first["gold"] >= 0.4 * 90 - 2


def test_who_is_passed_by_has_overtaken_nobody() -> None:
    """The engine cannot start these three. The fourth is shorter than the oldest, too, and goes next."""
    queue = queue_of("srjf", bound=3)
    for number, tokens in enumerate([50, 1, 2, 3, 4]):
        queue.add(request(number, tokens))
    for _ in range(2):
        queue.begin_scan()
        passed_by = []
        for _ in range(3):
            passed_by.append(queue.pop())
            queue.skipped(passed_by[-1].id)
        peeked = queue.peek()
        assert peeked is not None
        assert peeked.id == "4"
        for one in passed_by:
            queue.prepend(one)
    queue.begin_scan()
    assert [queue.pop().id for _ in range(5)] == ["1", "2", "3", "0", "4"]
