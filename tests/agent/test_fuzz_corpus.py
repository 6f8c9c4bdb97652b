# SPDX-License-Identifier: Apache-2.0
"""What the fuzzer (`tests/fuzz`) has kept, once more: frames of every kind, before and after the
handshake, with and without a key."""

import itertools
from typing import Any

import pytest
from fuzz.replay import growth, mode, on_live_agent, read_corpus
from fuzz.targets import Targets

from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.producing.producer import Producer

MODES = [*itertools.product((False, True), repeat=2)]


@pytest.mark.parametrize(
    ("keyed", "greeted", "sums"),
    [
        *((keyed, greeted, True) for keyed, greeted in MODES),
        *((False, greeted, False) for greeted in (False, True)),  # a key seals without sums
    ],
)
def test_nothing_is_raised_held_or_lost_whatever_a_peer_sends(
    keyed: bool, greeted: bool, sums: bool
) -> None:
    scripts = read_corpus(mode(keyed=keyed, greeted=greeted))
    assert scripts
    with Targets(keyed=keyed, greeted=greeted, sums=sums) as targets:
        assert growth(targets, scripts) == 0


@pytest.mark.parametrize("keyed", [False, True])
def test_a_live_agent_serves_on_after_all_of_it(keyed: bool) -> None:
    on_live_agent(read_corpus(mode(keyed=keyed, greeted=True)), keyed=keyed)


def test_a_slot_that_is_lost_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: SlotPool, slot: int, until: float) -> None:
        del self._holder[slot]

    monkeypatch.setattr(SlotPool, "quarantine", lose)
    assert_found((RuntimeError, AssertionError))


def test_an_exception_that_nobody_may_cause_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Producer, "heartbeat", fail)
    assert_found(ZeroDivisionError)


def assert_found(kind: Any) -> None:
    scripts = read_corpus(mode(keyed=False, greeted=True))
    with Targets(keyed=False, greeted=True) as targets, pytest.raises(kind):  # noqa: PT012
        for script in scripts:
            targets.run(script)
