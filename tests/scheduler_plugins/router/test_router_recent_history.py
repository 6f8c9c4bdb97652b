# SPDX-License-Identifier: Apache-2.0
"""The last 15 minutes in periods of ten seconds."""

import msgspec
import pytest

from scheduler_plugins.router.endpoints.trends import overflow, recent, trends
from scheduler_plugins.router.engines.observed import SharedHistory
from scheduler_plugins.router.recent_history import BEAT_S, KEPT, Beat, Moved, RecentHistory


def test_a_period_has_the_quantiles_of_its_requests() -> None:
    pulse = RecentHistory()
    history = SharedHistory(pulse)
    for n in range(1, 101):
        history.arrived(100.0 + n / 20, "g", 10, 1.0, 1.0)
        history.prefilled(100.0 + n / 20, "g", 10, n / 100, 1.0)
        history.answered(100.0 + n / 20, "g", 5, n / 1000, 1.0)
    history.answered(105.0, "g", 1, 0.0, 1.0)  # one token has no time per token
    history.refused(105.0, "g")
    history.overflowed(105.0, "g")
    assert pulse.beats(109.9) == (), "the period has not ended"
    (beat,) = pulse.beats(110.0)
    assert (beat.number, beat.arrivals, beat.refusals, beat.overflows) == (10, 100, 1, 1)
    assert beat.ttft == pytest.approx((0.51, 0.95), abs=0.011)
    assert beat.tpot == pytest.approx((0.051, 0.095), abs=0.0011)


def test_what_moved_between_two_looks_counts_in_the_periods_where_it_moved() -> None:
    """SlowProbes come every five seconds or a little later. Without the split, a period would have one, two or three."""
    pulse = RecentHistory()
    pulse.note(101.0, "arrived", ())
    pulse.moved(112.0, Moved(8.0, received_bytes=800.0, codecs={"int8": 4.0}))
    first, second = pulse.beats(120.0)
    assert (first.received_bytes, second.received_bytes) == pytest.approx((600.0, 200.0))
    assert (first.codecs["int8"], second.codecs["int8"]) == pytest.approx((3.0, 1.0))


def test_nothing_is_lost_if_there_is_no_period_before() -> None:
    pulse = RecentHistory()
    pulse.moved(112.0, Moved(8.0, received_bytes=800.0))
    (beat,) = pulse.beats(120.0)
    assert beat.received_bytes == 800.0


def test_fifteen_minutes_are_kept_and_drawn() -> None:
    pulse = RecentHistory()
    for second in range(0, 2000, 5):
        pulse.note(float(second), "arrived", ())
    beats = pulse.beats(2000.0)
    assert [beat.number for beat in beats] == list(range(110, 200))
    drawn = trends(beats, 2000.0)
    assert {len(values) for values in drawn.values()} == {KEPT}
    assert set(drawn["requests"]) == {2 / BEAT_S}
    assert drawn["ttft_s"] == [None] * KEPT
    assert pulse.beats(2000.0 + 900.0) == ()


def test_the_time_before_the_router_is_unknown_and_a_quiet_time_is_zero() -> None:
    drawn = trends((Beat(50, arrivals=20), Beat(80, arrivals=10)), 1000.0)["requests"]
    assert (drawn[-100 + 50], drawn[-100 + 60], drawn[-100 + 80]) == (2.0, 0.0, 1.0)
    assert drawn[0] is None


def test_shares_are_of_the_last_five_minutes() -> None:
    old = Beat(60, arrivals=1000, outcomes={"recomputed": 1000.0})
    beats = (old, *(Beat(n, arrivals=1, outcomes={"handed_over": 1.0}) for n in range(70, 100)))
    sums = recent(beats, 1000.0)
    assert (sums.arrivals, sums.outcomes) == (30, {"handed_over": 30.0})


def test_the_share_that_overflowed_is_of_ten_minutes_and_of_twenty_prompts_at_least() -> None:
    beats = Beat(6, arrivals=100, overflows=5), Beat(7, arrivals=1, overflows=1)
    assert overflow(beats[:1], 100.0) == 0.05
    assert overflow(beats, 100.0) == 6 / 101
    assert overflow(beats, 660.0) == 6 / 101
    assert overflow(beats, 680.0) == 0, "ten minutes have passed"
    assert overflow((Beat(6, arrivals=10, overflows=10),), 100.0) == 0, "ten prompts say nothing"


def test_another_process_gets_the_same_periods() -> None:
    """A worker that is started again shows what the one before it has seen."""
    pulse, worker = RecentHistory(), RecentHistory()
    pulse.note(1.0, "prefilled", (10.0, 0.5, 1.0))
    pulse.ended(1.0, {"cached": 2.0})
    beats = pulse.beats(10.0)
    worker.use(msgspec.json.decode(msgspec.json.encode(beats), type=tuple[Beat, ...]))
    assert worker.beats(12.0) == beats
