# SPDX-License-Identifier: Apache-2.0
"""Deadlines are found when they have passed, once, and cost nothing before."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pd_connector.protocol.deadlines import Deadlines


def test_what_is_due_is_told_once_earliest_first():
    deadlines: Deadlines[str] = Deadlines()
    for at, key in enumerate("cab"):
        deadlines.set(key, float(at))
    assert deadlines.due(-1.0) == []
    assert deadlines.due(1.0) == ["c", "a"]
    assert deadlines.due(1.0) == []
    assert len(deadlines) == 1


def test_the_earlier_of_two_times_counts_and_infinity_sets_nothing():
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("a", 3.0)
    deadlines.set("a", 9.0)
    deadlines.set("b", math.inf)
    assert deadlines.at("a") == 3.0
    assert deadlines.due(100.0) == ["a"]
    deadlines.set("a", 9.0)
    assert deadlines.due(9.0) == ["a"]


def test_what_is_discarded_is_not_told_and_takes_no_memory():
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10_000):
        deadlines.set(key, float(key))
        deadlines.discard(key)
    assert deadlines.due(1e9) == []
    assert len(deadlines._heap) < 100


@given(st.lists(st.tuples(st.sampled_from("sdt"), st.integers(0, 5), st.integers(0, 20))))
def test_as_a_table_that_is_searched(steps: list[tuple[str, int, int]]):
    deadlines: Deadlines[int] = Deadlines()
    table: dict[int, int] = {}
    for what, key, at in steps:
        if what == "s":
            deadlines.set(key, float(at))
            table[key] = min(at, table.get(key, at))
        elif what == "d":
            deadlines.discard(key)
            table.pop(key, None)
        else:
            wanted = {k for k, until in table.items() if until <= at}
            found = deadlines.due(float(at))
            assert set(found) == wanted
            assert len(found) == len(wanted)
            table = {k: until for k, until in table.items() if k not in wanted}
    assert len(deadlines) == len(table)
