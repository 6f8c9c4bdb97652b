# SPDX-License-Identifier: Apache-2.0
"""Nobody reads a request's pages while its gate is shut."""

import threading

import pytest

from pd_connector.agent.page_gate import AbandonedError, PageGate, RevokedError


def passes(gate: PageGate, request: str = "r") -> bool:
    try:
        with gate.touching(request) as confirm:
            confirm()
            return True
    except RevokedError:
        return False


def test_a_gate_is_open_until_it_is_shut_and_each_shut_wants_an_open():
    gate = PageGate()
    assert passes(gate)
    gate.shut("r")
    gate.shut("r")
    assert not passes(gate)
    gate.open("r")
    assert not passes(gate), "preempted twice before the agent has heard of the first"
    gate.open("r")
    assert passes(gate)


def test_one_gate_says_nothing_of_another():
    gate = PageGate()
    gate.shut("r")
    assert passes(gate, "other")


def test_no_name_of_a_request_means_that_pages_are_touched():
    gate = PageGate()
    assert gate.shut("", timeout_s=0.0)
    with gate.touching("r"):
        assert gate.shut("", timeout_s=0.0)


def test_a_gate_that_a_restart_has_opened_can_be_opened_again_and_shut_again():
    gate = PageGate()
    gate.shut("r")
    gate.reset()
    gate.open("r")
    assert passes(gate)
    gate.shut("r")
    assert not passes(gate)


def test_whoever_shuts_waits_for_a_read_under_way_and_none_begins_afterwards():
    gate = PageGate()
    events: list[str] = []

    def engine() -> None:
        gate.shut("r")
        events.append("pages are someone else's")

    with gate.touching("r") as confirm:
        shutting = threading.Thread(target=engine)
        shutting.start()
        shutting.join(0.05)
        events.append("read")
        confirm()
    shutting.join()
    assert events == ["read", "pages are someone else's"]
    assert not passes(gate)


def test_a_read_that_fails_leaves_the_gate_usable():
    gate = PageGate()
    with pytest.raises(RuntimeError), gate.touching("r"):
        raise RuntimeError
    gate.shut("r")
    assert not passes(gate)


def test_who_shuts_waits_no_longer_than_told_and_what_was_read_is_not_used():
    gate = PageGate()
    with gate.touching("r") as confirm:
        assert gate.shut("other", 0.0), "nobody touches its pages"
        assert not gate.shut("r", 0.01)
        with pytest.raises(RevokedError):
            confirm()
    gate.open("r")
    assert passes(gate)


def test_a_read_that_ended_in_time_may_be_used_although_the_gate_is_shut():
    gate = PageGate()
    with gate.touching("r") as confirm:
        shutting = threading.Thread(target=gate.shut, args=("r", 60.0))
        shutting.start()
        shutting.join(0.05)
        confirm()
    shutting.join()
    assert not passes(gate)


def test_an_agent_that_was_given_up_touches_nothing_until_it_has_started_again():
    gate = PageGate()
    with gate.touching("r") as confirm:
        assert gate.abandon() == "r"
        with pytest.raises(AbandonedError):
            confirm()
    assert gate.abandon() is None
    with pytest.raises(AbandonedError), gate.touching("other"):
        pass
    gate.shut("r")
    gate.reset()
    assert passes(gate)
