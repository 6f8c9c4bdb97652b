# SPDX-License-Identifier: Apache-2.0
"""A producer whose answers never come keeps few requests waiting; one that answers again is asked again."""

from hypothesis import given
from hypothesis import strategies as st

from pd_connector.protocol.consuming.silences import LONGEST_PAUSE_S, Silences

TIMEOUT_S = 10.0


def silent() -> Silences:
    """At 20 s a producer has kept two in a row waiting."""
    silences = Silences(TIMEOUT_S)
    silences.waited("p", 0, 10)
    silences.waited("p", 10, 20)
    return silences


def test_one_wait_in_vain_is_no_reason_to_pause():
    silences = Silences(TIMEOUT_S)
    silences.waited("p", 0, 10)
    assert not silences.pause("p", 10)


def test_waits_beside_each_other_count_once():
    silences = Silences(TIMEOUT_S)
    for began in range(10):
        silences.waited("p", began, began + 10)
    assert not silences.pause("p", 20)
    silences.waited("p", 10, 20)
    assert "2 times in a row" in silences.pause("p", 20)


def test_waits_that_end_together_count_once():
    """A stall ends the session, and with it what has begun in the same turn: that has not waited at all."""
    silences = Silences(TIMEOUT_S)
    silences.waited("p", 0, 10)
    for _ in range(12):
        silences.waited("p", 10, 10)
    assert not silences.pause("p", 10)
    silences.waited("p", 10, 20)
    assert "2 times in a row" in silences.pause("p", 20)


def test_an_answer_ends_the_pause():
    silences = silent()
    assert silences.pause("p", 20)
    silences.answered("p")
    assert not silences.pause("p", 20)
    silences.waited("p", 20, 30)
    assert not silences.pause("p", 30), "it is counted again"


def test_after_a_pause_one_tries_for_all():
    silences = silent()
    assert silences.pause("p", 29.9)
    assert not silences.pause("p", 30)
    silences.tries("p", 30)
    assert silences.pause("p", 30)
    assert not silences.pause("p", 40), "that it ended otherwise stops nobody"


def test_another_producer_is_not_meant():
    silences = silent()
    assert silences.pause("p", 20)
    assert not silences.pause("q", 20)


def test_what_is_known_of_producers_is_bounded():
    silences = Silences(TIMEOUT_S)
    for producer in range(5000):
        silences.waited(producer, 0, 10)
        silences.waited(producer, 10, 20)
    paused = [producer for producer in range(5000) if silences.pause(producer, 20)]
    assert paused == list(range(5000 - 1024, 5000)), "the latest"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 50)), max_size=30))
def test_a_pause_is_never_longer_than_the_longest(waits: list[tuple[float, float]]):
    silences = Silences(TIMEOUT_S)
    now = 0.0
    for gap, lasted in waits:
        silences.tries("p", now + gap)
        now += gap + lasted
        silences.waited("p", now - lasted, now)
    assert not silences.pause("p", now + LONGEST_PAUSE_S)
