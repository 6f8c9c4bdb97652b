# SPDX-License-Identifier: Apache-2.0
"""Which batches of an engine's events are new, by numbers and by clocks that may be set."""

import msgspec
import pytest

from scheduler_plugins.router.index.events import EventError, decode
from scheduler_plugins.router.index.follower import KEPT, BatchNumbers, Step


def numbers(batches: int, first_ts: float = 1000.0) -> BatchNumbers:
    found = BatchNumbers()
    for n in range(batches):
        assert found.step(n, first_ts + n) is Step.APPLY
        found.applied(n, first_ts + n)
    return found


@pytest.mark.parametrize("set_back_s", [-50.0, 0.5, 500.0])
def test_an_engine_that_starts_anew_is_noticed_wherever_its_clock_is(set_back_s: float) -> None:
    known = numbers(5)
    assert known.step(0, 1004.0 - set_back_s) is Step.RESTART
    known.restart()
    assert known.step(0, 1004.0 - set_back_s) is Step.APPLY


def test_a_batch_that_comes_again_is_no_new_engines() -> None:
    known = numbers(5)
    assert [known.step(n, 1000.0 + n) for n in range(5)] == [Step.SKIP] * 5
    assert known.step(7, 1007.0) is Step.REPLAY


def test_what_is_remembered_is_bounded() -> None:
    known = numbers(KEPT + 100)
    assert len(known._times) == KEPT
    assert known.step(0, 1000.0) is Step.SKIP
    assert known.step(0, 1e9) is Step.RESTART


@pytest.mark.parametrize("ts", [float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(ts: float) -> None:
    """After an infinite one no restart would be noticed."""
    with pytest.raises(EventError):
        decode(msgspec.msgpack.encode([ts, [], 0]))
