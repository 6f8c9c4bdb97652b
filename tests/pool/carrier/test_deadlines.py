# SPDX-License-Identifier: Apache-2.0
"""A far store that stands still is noticed soon, and slow links and large objects still load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.pool.carrier.deadlines import CAUTIOUS_BYTES_S, Deadlines

LEAST_S = 0.25
GBIT_S = 118e6
"""Bytes a second of a link of 1 Gbit/s."""
CHUNK, LARGE_CHUNK = 4 << 20, 40 << 20


def shown(bytes_s: float, *, calls: int = 3, nbytes: int = CHUNK) -> Deadlines:
    """Deadlines of a store that has shown this speed."""
    deadlines = Deadlines(LEAST_S)
    for _ in range(calls):
        deadlines.took(nbytes, nbytes / bytes_s)
    return deadlines


def test_a_link_that_stands_still_is_noticed_after_the_least_deadline() -> None:
    assert shown(GBIT_S).of(CHUNK) == LEAST_S
    assert Deadlines(LEAST_S).of(CHUNK) > 2 * LEAST_S, "control: not before its speed is known"


def test_a_large_object_has_four_times_as_long_as_it_takes() -> None:
    assert shown(GBIT_S).of(LARGE_CHUNK) == pytest.approx(4 * LARGE_CHUNK / GBIT_S)
    assert shown(GBIT_S, nbytes=LARGE_CHUNK).of(LARGE_CHUNK) > 1.3


@given(st.floats(2 * CAUTIOUS_BYTES_S, 1e11), st.integers(0, 512 << 20), st.floats(1.0, 3.9))
def test_a_store_that_becomes_slower_by_less_than_four_times_is_never_late(
    bytes_s: float, nbytes: int, slower: float
) -> None:
    bytes_s = max(bytes_s, slower * CAUTIOUS_BYTES_S)
    assert shown(bytes_s).of(nbytes) >= slower * nbytes / bytes_s


@given(st.floats(1e3, 1e11), st.integers(0, 512 << 20))
def test_no_call_has_less_than_the_least_or_more_than_a_store_of_unknown_speed(
    bytes_s: float, nbytes: int
) -> None:
    assert LEAST_S <= shown(bytes_s).of(nbytes) <= Deadlines(LEAST_S).of(nbytes)


def test_after_a_passed_deadline_calls_have_longer_until_the_store_is_fast_again() -> None:
    deadlines = shown(GBIT_S)
    before_s = deadlines.of(LARGE_CHUNK)
    deadlines.passed()
    assert deadlines.of(LARGE_CHUNK) == pytest.approx(2 * before_s)
    for _ in range(20):
        deadlines.passed()
    assert deadlines.of(LARGE_CHUNK) == Deadlines(LEAST_S).of(LARGE_CHUNK)
    for _ in range(80):
        deadlines.took(CHUNK, CHUNK / GBIT_S)
    assert deadlines.of(LARGE_CHUNK) < 1.1 * before_s


def test_small_objects_show_no_speed() -> None:
    """They take as long as a message does."""
    assert shown(1e5, nbytes=10_000).of(CHUNK) == Deadlines(LEAST_S).of(CHUNK)
    assert shown(1e5, nbytes=1 << 20).of(CHUNK) == Deadlines(LEAST_S).of(CHUNK), "nor slow ones"
