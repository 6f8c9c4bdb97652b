# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own die, freeze and come back; the other side recovers."""

import signal
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.agents import (
    GEOMETRY,
    SHORT,
    TRANSPORTS,
    Rank,
    Ranks,
    geometry_of,
    make_layers,
    ranks,
    until,
)
from support.children import Child, Children, children, nursery
from support.waits import meanwhile

from pd_connector.agent.commands import Withdraw
from pd_connector.errors import Cause

__all__ = ["children", "nursery", "ranks"]

each_transport = pytest.mark.parametrize("transport", ["shm", "shm written", "tcp"])
each_written = pytest.mark.parametrize("transport", ["shm written", "tcp"])
PATIENT = {"session_timeout_s": 30.0, "stall_timeout_s": 30.0, "connect_timeout_s": 30.0}


def assert_fetches(consumer: Rank, producer: Child, transfer: str) -> None:
    """A good transfer arrives. Short timeouts on a busy machine may cost it another attempt."""
    for attempt in range(5):
        producer.call("offer", f"{transfer} {attempt}", [11, 12, 13])
        consumer.load(producer.call("source"), f"{transfer} {attempt}", [1, 2, 3])
        finished = consumer.loaded(f"{transfer} {attempt}")
        if finished.cause is None:
            break
        assert finished.cause in (Cause.STALLED, Cause.SESSION_LOST, Cause.UNREACHABLE), finished
    assert finished.cause is None
    for page, local in ((11, 1), (12, 2), (13, 3)):
        assert consumer.page(local) == producer.call("page", page)


@each_transport
def test_pages_arrive_exactly_between_two_processes(
    ranks: Ranks, children: Children, transport: str
):
    settings = SHORT | PATIENT | TRANSPORTS[transport]
    producer = children(settings, consumes=False, seed=4)
    consumer = ranks(settings, produces=False)
    assert_fetches(consumer, producer, "t")
    same = make_layers(GEOMETRY, 24, 4).values()
    wanted = b"".join(layer[11].view(torch.uint8).numpy().tobytes() for layer in same)
    assert producer.call("page", 11) == wanted
    producer.call("assert_at_rest")


@each_written
def test_a_killed_producer_fails_its_loads_at_once_and_another_serves(
    ranks: Ranks, children: Children, transport: str
):
    settings = SHORT | PATIENT | TRANSPORTS[transport] | {"lease_s": 600.0}
    producer = children(settings, consumes=False, chunks=0)
    consumer = ranks(settings, produces=False, seed=1)
    producer.call("offer", "t", [1, 2])
    consumer.load(producer.call("source"), "t", [1, 2])
    until(lambda: producer.call("count", "sent_chunks"))
    producer.kill()
    assert consumer.loaded("t").cause == Cause.SESSION_LOST
    until(lambda: consumer.gauge("landing_slots") == 0, "slots of the dead come home at once")
    assert_fetches(consumer, children(settings, consumes=False, seed=2), "afterwards")


@each_transport
def test_a_killed_consumer_costs_its_leases_only(ranks: Ranks, children: Children, transport: str):
    settings = SHORT | PATIENT | TRANSPORTS[transport]
    settings |= {"lease_s": 60.0, "wait_timeout_s": 60.0, "session_timeout_s": 4.0}
    producer = ranks(settings, consumes=False)
    consumer = children(settings, produces=False)
    producer.offer("t", [1, 2])
    consumer.call("load", producer.source, "t", [1, 2])
    producer.freed("t")
    producer.offer("waits for room", [3])
    consumer.call("load", producer.source, "never offered", [3], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 2)
    consumer.kill()
    until(lambda: producer.gauge("outgoing_transfers") == 1)
    another = ranks(SHORT | PATIENT | TRANSPORTS[transport], produces=False, seed=1)
    another.load(producer.source, "waits for room", [3])
    assert another.loaded("waits for room").cause is None
    assert another.page(3) == producer.page(3)


def test_a_killed_consumer_is_gone_before_any_timeout(ranks: Ranks, children: Children):
    settings = SHORT | PATIENT | {"session_timeout_s": 600.0, "lease_s": 600.0}
    producer = ranks(settings | TRANSPORTS["tcp"], consumes=False)
    consumer = children(settings | TRANSPORTS["tcp"], produces=False)
    consumer.call("load", producer.source, "never offered", [3], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 1)
    consumer.kill()
    until(lambda: producer.gauge("consumer_sessions") == producer.gauge("outgoing_transfers") == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_takes_back_pages_without_waiting_for_the_stopped_consumer_that_they_are_sent_to(
    ranks: Ranks, children: Children, transport: str
):
    """A preemption in the middle of a transfer. The engine waits for no more than its own agent's copy."""
    settings = SHORT | PATIENT | TRANSPORTS[transport]
    settings |= {"lease_s": 600.0, "wait_timeout_s": 600.0, "agent_timeout_s": 600.0}
    large = {"geometry": geometry_of(page_size=1 << 13)}
    producer = ranks(settings, consumes=False, **large)
    consumer = children(settings, produces=False, **large)
    producer.offer("t", [1, 2, 3], computed=1 << 13)
    consumer.call("load", producer.source, "t", [1, 2, 3], wait=True)
    until(lambda: producer.count("sent_chunks"))
    consumer.signal(signal.SIGSTOP)
    producer.offer("t", [1, 2, 3])
    until(lambda: producer.gauge("leased_pages") == 3)
    withdraw = Withdraw("t", "offer of t")
    with meanwhile(producer.agent.take_back, [withdraw]):
        pass  # it returns while the consumer stands still
    producer.agent.submit(withdraw)
    until(lambda: producer.gauge("leased_pages") == 0)
    consumer.kill()


@each_transport
def test_a_stopped_producer_fails_its_loads_in_bounded_time_and_serves_when_it_goes_on(
    ranks: Ranks, children: Children, transport: str
):
    settings = SHORT | TRANSPORTS[transport]
    settings |= {"lease_s": 1.0, "wait_timeout_s": 60.0}
    settings |= {"session_timeout_s": 2.0, "connect_timeout_s": 5.0}
    producer = children(settings, consumes=False)
    consumer = ranks(settings, produces=False, seed=1)
    source = producer.call("source")
    consumer.load(source, "t", [1, 2], wait=True)
    until(lambda: producer.call("gauge", "outgoing_transfers"))
    producer.signal(signal.SIGSTOP)
    assert consumer.loaded("t").cause in (Cause.SESSION_LOST, Cause.WAIT_TIMEOUT)
    consumer.load(source, "while it stands still", [1, 2])
    assert consumer.loaded("while it stands still").cause == Cause.UNREACHABLE
    producer.signal(signal.SIGCONT)
    for i in range(3):
        assert_fetches(consumer, producer, f"afterwards {i}")


@each_written
def test_a_producer_that_stops_between_chunks_stalls_its_loads(
    ranks: Ranks, children: Children, transport: str
):
    """Its machine answers no more, its connection stands."""
    settings = SHORT | TRANSPORTS[transport] | {"lease_s": 1.0}
    producer = children(settings, consumes=False, chunks=0)
    consumer = ranks(settings, produces=False, seed=1)
    producer.call("offer", "t", [1, 2])
    consumer.load(producer.call("source"), "t", [1, 2])
    until(lambda: producer.call("count", "sent_chunks"))
    producer.signal(signal.SIGSTOP)
    assert consumer.loaded("t").cause in (Cause.STALLED, Cause.SESSION_LOST)
    consumer.assert_at_rest()
    producer.kill()


@pytest.mark.parametrize(
    "transport",
    [
        TRANSPORTS["shm"],
        TRANSPORTS["shm direct"],
        pytest.param(
            {"transports": ("nixl",), "direction": "read"},
            marks=pytest.mark.skipif(not find_spec("nixl"), reason="nixl is not installed"),
        ),
    ],
    ids=["shm", "shm direct", "nixl"],
)
def test_slots_of_a_stopped_producer_that_is_read_come_home_with_its_session(
    ranks: Ranks, children: Children, transport: dict[str, Any]
):
    """It writes into none of them when it goes on. Loads from other producers would wait for a lease's time."""
    settings = SHORT | transport | {"lease_s": 600.0}
    producer = children(settings, consumes=False)
    consumer = ranks(settings, produces=False, seed=1)
    for transfer in ("before", "t"):
        producer.call("offer", transfer, [1, 2])
    source = producer.call("source")
    consumer.load(source, "before", [1, 2])
    assert consumer.loaded("before").cause is None
    producer.signal(signal.SIGSTOP)
    consumer.load(source, "t", [3, 4])
    assert consumer.loaded("t").cause in (Cause.STALLED, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT)
    consumer.assert_at_rest()
    producer.kill()


@each_transport
def test_a_producer_killed_while_it_streams_fails_its_loads_and_every_slot_comes_home(
    ranks: Ranks, children: Children, transport: str
):
    settings = SHORT | PATIENT | TRANSPORTS[transport] | {"lease_s": 600.0}
    large = {"geometry": geometry_of(page_size=1 << 13)}
    producer = children(settings, consumes=False, **large)
    consumer = ranks(settings, produces=False, seed=1, **large)
    producer.call("offer", "t", [1, 2, 3], computed=2 << 13)
    consumer.load(producer.call("source"), "t", [1, 2, 3], wait=True)
    until(lambda: consumer.count("received_chunks") >= 2)
    producer.kill()
    assert consumer.loaded("t").cause == Cause.SESSION_LOST
    until(lambda: consumer.gauge("landing_slots") == 0, "slots of the dead come home at once")
