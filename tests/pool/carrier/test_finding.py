# SPDX-License-Identifier: Apache-2.0
"""Look-ups gallop along a chain."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.pool.carrier.finding import gallop


class Far:
    def __init__(self, there: Sequence[int]) -> None:
        self.there, self.calls, self.names = list(there), 0, 0

    def __call__(self, places: Sequence[int]) -> list[int]:
        assert list(places) == sorted(set(places))
        self.calls, self.names = self.calls + 1, self.names + len(places)
        return [self.there[place] for place in places]


@given(first=st.integers(0, 1024), more=st.integers(0, 1024))
def test_the_first_chunks_are_found_whatever_the_length(first: int, more: int) -> None:
    chunks = min(first + more, 1024)
    far = Far([7] * min(first, chunks) + [0] * (chunks - min(first, chunks)))
    assert gallop(chunks, far) == [7] * min(first, chunks)


def test_few_chunks_are_asked_for() -> None:
    far = Far([9] * 600 + [0] * 424)
    assert len(gallop(1024, far)) == 600
    assert far.names < 60
    assert far.calls <= 4


@pytest.mark.parametrize("chunks", [0, 1, 2, 1024])
def test_a_chain_that_is_not_there_takes_one_call(chunks: int) -> None:
    far = Far([0] * chunks)
    assert gallop(chunks, far) == []
    assert far.calls == bool(chunks)


@given(st.lists(st.booleans(), max_size=200))
def test_with_holes_what_is_found_ends_and_begins_with_what_is_there(there: list[bool]) -> None:
    found = gallop(len(there), Far([5 * each for each in there]))
    assert len(found) <= len(there)
    assert all(each == 5 for each in found)
    if found:
        assert there[0]
        assert there[len(found) - 1]
