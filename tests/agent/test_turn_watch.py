# SPDX-License-Identifier: Apache-2.0
"""When an agent counts as hung, and when it only looks so."""

import pytest
from support.clocks import Clock

from pd_connector.agent import agent_thread
from pd_connector.agent.agent_thread import GRACE_S, TurnWatch

TIMEOUT_S = 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(agent_thread, "time", clock)
    return clock


def test_a_turn_that_takes_too_long_is_a_hung_agent(clock: Clock) -> None:
    watch = TurnWatch(TIMEOUT_S)
    assert watch.begin() == clock.now
    clock.now += TIMEOUT_S
    assert watch.left_s() == 0.0
    clock.now += 0.5
    assert watch.left_s() == GRACE_S
    clock.now += GRACE_S + 0.1
    assert watch.left_s() < 0


def test_a_clock_that_jumps_makes_no_agent_hung_that_begins_its_next_turn(clock: Clock) -> None:
    watch = TurnWatch(TIMEOUT_S)
    watch.begin()
    clock.now += 3600.0
    assert watch.left_s() == GRACE_S
    clock.now += GRACE_S / 2
    watch.begin()
    assert watch.left_s() == TIMEOUT_S
    clock.now += 3600.0
    assert watch.left_s() == GRACE_S, "each overdue turn has its own grace"


def test_a_turn_that_begins_later_has_its_time_from_then_on(clock: Clock) -> None:
    watch = TurnWatch(TIMEOUT_S)
    watch.begin(in_s=5.0)
    assert watch.left_s() == TIMEOUT_S + 5.0
