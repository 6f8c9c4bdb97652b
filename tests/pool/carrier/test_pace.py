# SPDX-License-Identifier: Apache-2.0
"""How long chunks on their way will take is told from those that have come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.pool.carrier.pace import Pace


def test_nothing_is_told_before_something_has_come() -> None:
    assert Pace().seconds(1 << 30) == 0.0


@given(st.integers(1, 50), st.integers(1, 40), st.floats(1e-3, 1.0))
def test_chunks_that_come_many_at_once_show_the_speed_of_all_together(
    calls: int, chunks: int, call_s: float
) -> None:
    """The first chunk of a call comes after the whole call's time, and the others at once."""
    pace = Pace()
    for _ in range(calls):
        for place in range(chunks):
            pace.came(1 << 20, 0.0 if place else call_s)
    assert pace.seconds(chunks << 20) == pytest.approx(call_s, rel=0.75)


def test_a_link_that_has_become_slower_is_noticed() -> None:
    pace = Pace()
    for _ in range(1000):
        pace.came(1 << 20, 0.01)
    for _ in range(80):
        pace.came(1 << 20, 0.1)
    assert pace.seconds(1 << 20) == pytest.approx(0.1, rel=0.2)
