# SPDX-License-Identifier: Apache-2.0
"""How fast work comes, by a clock that may be set."""

import pytest

from scheduler_plugins.queue.work import WINDOW_S, WorkHistogram


@pytest.mark.parametrize("back_s", [-1e9, 0.0, 2.0, 3600.0, 1e9])
def test_the_rate_is_that_of_the_last_half_minute_wherever_the_clock_is_set(back_s: float) -> None:
    work, now_s = WorkHistogram(), 2e9
    for _ in range(600):
        work.arrive(0, 0.05, now_s)
        now_s += 1.0
    now_s -= back_s
    for _ in range(600):
        work.arrive(0, 0.05, now_s)
        now_s += 1.0
    assert sum(work.arriving(now_s)) == pytest.approx(0.05, rel=0.1)


def test_arrivals_a_little_out_of_order_are_counted_as_they_come() -> None:
    work = WorkHistogram()
    for at_s in (100.0, 99.0, 100.0):
        work.arrive(1, 1.0, at_s)
    assert work.arriving(100.0)[1] == pytest.approx(3 / WINDOW_S)
