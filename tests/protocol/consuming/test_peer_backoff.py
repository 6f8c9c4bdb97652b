# SPDX-License-Identifier: Apache-2.0
"""A producer whose answers never come keeps few requests waiting; one that answers again is asked again."""

from hypothesis import given
from hypothesis import strategies as st

from pd_connector.protocol.consuming.peer_backoff import LONGEST_PAUSE_S, PeerBackoff

TIMEOUT_S = 10.0


def silent() -> PeerBackoff:
    """At 20 s a producer has kept two in a row waiting."""
    peer_backoff = PeerBackoff(TIMEOUT_S)
    peer_backoff.waited("p", 0, 10)
    peer_backoff.waited("p", 10, 20)
    return peer_backoff


def test_one_wait_in_vain_is_no_reason_to_pause():
    peer_backoff = PeerBackoff(TIMEOUT_S)
    peer_backoff.waited("p", 0, 10)
    assert not peer_backoff.pause("p", 10)


def test_waits_beside_each_other_count_once():
    peer_backoff = PeerBackoff(TIMEOUT_S)
    for began in range(10):
        peer_backoff.waited("p", began, began + 10)
    assert not peer_backoff.pause("p", 20)
    peer_backoff.waited("p", 10, 20)
    assert "2 times in a row" in peer_backoff.pause("p", 20)


def test_waits_that_end_together_count_once():
    """A stall ends the session, and with it what has begun in the same turn: that has not waited at all."""
    peer_backoff = PeerBackoff(TIMEOUT_S)
    peer_backoff.waited("p", 0, 10)
    for _ in range(12):
        peer_backoff.waited("p", 10, 10)
    assert not peer_backoff.pause("p", 10)
    peer_backoff.waited("p", 10, 20)
    assert "2 times in a row" in peer_backoff.pause("p", 20)


def test_an_answer_ends_the_pause():
    peer_backoff = silent()
    assert peer_backoff.pause("p", 20)
    peer_backoff.answered("p")
    assert not peer_backoff.pause("p", 20)
    peer_backoff.waited("p", 20, 30)
    assert not peer_backoff.pause("p", 30), "it is counted again"


def test_after_a_pause_one_tries_for_all():
    peer_backoff = silent()
    assert peer_backoff.pause("p", 29.9)
    assert not peer_backoff.pause("p", 30)
    peer_backoff.tries("p", 30)
    assert peer_backoff.pause("p", 30)
    assert not peer_backoff.pause("p", 40), "that it ended otherwise stops nobody"


def test_another_producer_is_not_meant():
    peer_backoff = silent()
    assert peer_backoff.pause("p", 20)
    assert not peer_backoff.pause("q", 20)


def test_what_is_known_of_producers_is_bounded():
    peer_backoff = PeerBackoff(TIMEOUT_S)
    for producer in range(5000):
        peer_backoff.waited(producer, 0, 10)
        peer_backoff.waited(producer, 10, 20)
    paused = [producer for producer in range(5000) if peer_backoff.pause(producer, 20)]
    assert paused == list(range(5000 - 1024, 5000)), "the latest"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 50)), max_size=30))
def test_a_pause_is_never_longer_than_the_longest(waits: list[tuple[float, float]]):
    peer_backoff = PeerBackoff(TIMEOUT_S)
    now = 0.0
    for gap, lasted in waits:
        peer_backoff.tries("p", now + gap)
        now += gap + lasted
        peer_backoff.waited("p", now - lasted, now)
    assert not peer_backoff.pause("p", now + LONGEST_PAUSE_S)
