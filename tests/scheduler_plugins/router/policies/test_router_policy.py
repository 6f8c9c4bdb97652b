# SPDX-License-Identifier: Apache-2.0
"""Round robin stays fair while engines come and go."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from policy_engines import FixedView, Known

from scheduler_plugins.router.policies.base import Request, Role, Route
from scheduler_plugins.router.policies.registry import create

REQUEST = Request("r", 100)


def chosen(policy, engines: list[Known]) -> str:
    decision = policy.decide(REQUEST, FixedView(prefill=engines, decode=engines), 0.0, Random(0))
    assert isinstance(decision, Route)
    assert decision.p == decision.d, "both sides take turns alike"
    return decision.d


ENGINES = [Known(name) for name in "abcd"]


def test_engines_take_turns_in_the_order_given() -> None:
    policy = create("round_robin")
    assert [chosen(policy, ENGINES[:3]) for _ in range(6)] == list("abcabc")


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=30))
def test_an_engine_is_not_chosen_again_while_another_has_waited_longer(
    sets: list[set[int]],
) -> None:
    policy, last = create("round_robin"), dict.fromkeys("abcd", -1)
    for turn, members in enumerate(sets):
        candidates = [ENGINES[n] for n in sorted(members)]
        name = chosen(policy, candidates)
        assert last[name] == min(last[engine.name] for engine in candidates)
        last[name] = turn


def test_shares_are_equal_when_all_are_there() -> None:
    policy = create("round_robin")
    counts = Counter(chosen(policy, ENGINES) for _ in range(400))
    assert set(counts.values()) == {100}


def test_without_engines_for_prefill_the_decode_engine_serves_alone() -> None:
    for name in ("round_robin", "conductor", "kv_cost", "length"):
        view = FixedView(prefill=[], decode=ENGINES)
        decision = create(name).decide(REQUEST, view, 0.0, Random(0))
        assert isinstance(decision, Route)
        assert decision.p is None
        assert view.engines(Role.DECODE)
