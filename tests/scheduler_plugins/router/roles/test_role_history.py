# SPDX-License-Identifier: Apache-2.0
"""The history of the last minutes."""

from __future__ import annotations

from math import inf

from scheduler_plugins.router.roles.history import KEPT_S, History


def test_sums_are_those_of_the_asked_seconds() -> None:
    told = History()
    for second in range(100):
        told.arrived(second + 0.5, "a", 10, 2.0, 0.1)
    seen = told.over(99.9, 10, "a")
    assert (seen.arrivals, seen.tokens, seen.seconds) == (10, 100, 10)
    assert told.over(99.9, 10, "b").arrivals == 0


def test_at_the_start_the_period_is_as_long_as_it_has_lasted() -> None:
    told = History()
    told.arrived(1000.0, "", 10, inf, inf)
    assert told.over(1004.0, 60, "").seconds == 4.0


def test_promises_are_those_of_the_classes_that_have_one() -> None:
    told = History()
    told.arrived(0, "", 1, 1.0, inf)
    told.arrived(0, "", 1, 4.0, inf)
    told.arrived(0, "", 1, inf, inf)
    assert told.over(0, 60, "").ttft_slo_s == 1.6  # harmonic mean
    assert told.over(0, 60, "").tpot_slo_s == inf


def test_times_count_beside_their_own_promise() -> None:
    told = History()
    told.prefilled(0, "", 100, 3.0, 2.0)
    told.prefilled(0, "", 100, 1.0, 2.0)
    told.prefilled(0, "", 100, 99.0, inf)
    seen = told.over(0, 60, "")
    assert (seen.prefills, seen.ttft_promised, seen.ttft_missed) == (3, 2, 1)
    assert seen.ttft_ratios == 2.0


def test_memory_is_bounded() -> None:
    told = History()
    for second in range(3 * KEPT_S):
        told.refused(second, "")
    assert told.over(3 * KEPT_S, 1e9, "").refusals <= KEPT_S


def test_a_clock_that_jumps_back_loses_no_event() -> None:
    told = History()
    told.refused(1000.0, "")
    told.refused(10.0, "")
    assert told.over(1000.0, 5, "").refusals == 2
