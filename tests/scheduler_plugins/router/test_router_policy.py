# SPDX-License-Identifier: Apache-2.0
"""Round robin stays fair while engines come and go."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.router.policy import RoundRobin


@dataclass(frozen=True)
class Named:
    url: str
    in_flight: int = 0


ENGINES = [Named(name) for name in "abcd"]


def test_engines_take_turns_in_the_order_given() -> None:
    policy = RoundRobin()
    assert [policy.choose(ENGINES[:3]).url for _ in range(6)] == list("abcabc")


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=30))
def test_an_engine_is_not_chosen_again_while_another_has_waited_longer(
    sets: list[set[int]],
) -> None:
    policy, last = RoundRobin(), dict.fromkeys(ENGINES, -1)
    for turn, members in enumerate(sets):
        candidates = [ENGINES[n] for n in sorted(members)]
        chosen = policy.choose(candidates)
        assert chosen in candidates
        assert last[chosen] == min(last[engine] for engine in candidates)
        last[chosen] = turn


def test_shares_are_equal_when_all_are_there() -> None:
    policy = RoundRobin()
    counts = Counter(policy.choose(ENGINES).url for _ in range(400))
    assert set(counts.values()) == {100}
