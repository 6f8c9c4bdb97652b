# SPDX-License-Identifier: Apache-2.0
"""Nobody reads a request's pages while its gate is shut."""

import threading

import pytest

from pd_connector.agent.page_gate import PageGate


def passes(gate: PageGate, request: str = "r") -> bool:
    with gate.passing(request) as passed:
        return passed


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


def test_a_gate_that_is_not_shut_cannot_be_opened():
    with pytest.raises(KeyError):
        PageGate().open("r")


def test_whoever_shuts_waits_for_a_read_under_way_and_none_begins_afterwards():
    gate = PageGate()
    events: list[str] = []

    def engine() -> None:
        gate.shut("r")
        events.append("pages are someone else's")

    with gate.passing("r") as passed:
        shutting = threading.Thread(target=engine)
        shutting.start()
        shutting.join(0.05)
        events.append("read")
        assert passed
    shutting.join()
    assert events == ["read", "pages are someone else's"]
    assert not passes(gate)


def test_a_read_that_fails_leaves_the_gate_usable():
    gate = PageGate()
    with pytest.raises(RuntimeError), gate.passing("r"):
        raise RuntimeError
    gate.shut("r")
    assert not passes(gate)
