# SPDX-License-Identifier: Apache-2.0
"""A producer that stops in the middle of transfers keeps landing slots, and others are served all the same."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.agents import LONG, TRANSPORTS, Rank, Ranks, ranks, until
from support.children import Child, Children, children, nursery

from pd_connector.errors import Cause
from pd_connector.protocol.consuming.grants import Shares

__all__ = ["children", "nursery", "ranks"]

SLOTS = 4
PATIENT = LONG | {"session_timeout_s": 60.0, "lease_s": 60.0}
each_transport = pytest.mark.parametrize("transport", [*TRANSPORTS])

Engine = Callable[[str], Child]


@pytest.fixture
def settings(transport: str) -> dict[str, Any]:
    return PATIENT | TRANSPORTS[transport]


def producer_of(children: Children, settings: dict[str, Any], name: str) -> Child:
    return children(settings, consumes=False, seed=len(name), engine_id=name)


def meet(consumer: Rank, producer: Child) -> None:
    """A session stands, as between engines that have served requests."""
    fetch(consumer, producer, "first")


def fetch(consumer: Rank, producer: Child, name: str, timeout_s: float = 60.0) -> None:
    source = producer.call("source")
    transfer = f"{name} of {source.engine_id}"
    producer.call("offer", transfer, [11])
    consumer.load(source, transfer, [20])
    ended = consumer.end_of(f"load of {transfer}", timeout_s)
    assert ended.cause is None, ended
    assert consumer.page(20) == producer.call("page", 11)


def stop_with_slots(consumer: Rank, producer: Child, loads: int = 2 * SLOTS) -> None:
    """A producer stops, and more is wanted of it than there are slots."""
    source = producer.call("source")
    for number in range(loads):
        producer.call("offer", f"{source.engine_id} {number}", [number])
    producer.signal(signal.SIGSTOP)
    for number in range(loads):
        consumer.load(source, f"{source.engine_id} {number}", [number])
    until(lambda: consumer.gauge("incoming_transfers") >= loads, "its loads wait")


@each_transport
def test_a_stopped_producer_leaves_slots_for_another(
    ranks: Ranks, children: Children, settings: dict[str, Any]
):
    stopped, healthy = (producer_of(children, settings, name) for name in ("one", "other"))
    consumer = ranks(settings, produces=False, engine_id="decode")
    meet(consumer, stopped)
    meet(consumer, healthy)
    stop_with_slots(consumer, stopped)
    for number in range(8):
        fetch(consumer, healthy, f"{number}")
    # Gauges follow an outcome by a moment.
    until(lambda: consumer.gauge("incoming_transfers") == 2 * SLOTS, "no deadline has passed")
    until(lambda: consumer.gauge("landing_slots") == SLOTS - 1)
    stopped.signal(signal.SIGCONT)
    for number in range(2 * SLOTS):
        assert consumer.loaded(f"one {number}").cause is None
        assert consumer.page(number) == stopped.call("page", number)


@pytest.mark.parametrize("transport", ["shm"])
def test_without_shares_another_waits_for_the_stopped_one(
    ranks: Ranks, children: Children, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Shares, "room", lambda shares, producer, early: shares._free)
    stopped, healthy = (producer_of(children, settings, name) for name in ("one", "other"))
    consumer = ranks(settings, produces=False, engine_id="decode")
    meet(consumer, stopped)
    meet(consumer, healthy)
    stop_with_slots(consumer, stopped)
    with pytest.raises(AssertionError, match="outcome of"):
        fetch(consumer, healthy, "second", 1.0)
    stopped.signal(signal.SIGCONT)
    assert consumer.loaded("second of other").cause is None


@pytest.mark.parametrize("transport", ["shm written"])
def test_what_a_lost_producer_may_still_write_is_not_all_there_is(
    ranks: Ranks, children: Children, settings: dict[str, Any]
):
    """It was the only one. The next one, which may be itself after a restart, does not wait for its slots."""
    settings |= {"session_timeout_s": 1.0, "lease_s": 10.0}
    # The next one is there already: to start a process may take longer than its slots are kept.
    stopped, next_one = (producer_of(children, settings, name) for name in ("one", "other"))
    consumer = ranks(settings, produces=False, engine_id="decode")
    meet(consumer, stopped)
    stop_with_slots(consumer, stopped)
    for number in range(2 * SLOTS):
        assert consumer.loaded(f"one {number}").cause is Cause.SESSION_LOST
    until(lambda: consumer.gauge("landing_slots") == SLOTS - 1, "it may still write there")
    fetch(consumer, next_one, "first")
    until(lambda: consumer.gauge("landing_slots") == SLOTS - 1, "its slots are kept")
    stopped.kill()
