# SPDX-License-Identifier: Apache-2.0
"""An agent that dies or hangs: its engine is told in time, no page is touched late, and it comes
back on the same port."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.agents import (
    KEY,
    LONG,
    TRANSPORTS,
    Rank,
    Ranks,
    assert_pages,
    geometry_of,
    ranks,
    until,
)
from support.free_ports import free_ports

from pd_connector.agent import agent
from pd_connector.agent.commands import Revoke, Withdraw
from pd_connector.agent.consuming.receive_pipeline import ReceivePipeline
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing.producer_side import ProducerSide
from pd_connector.agent.producing.send_pipeline import SendPipeline
from pd_connector.errors import Cause

__all__ = ["ranks"]

SETTINGS = LONG | TRANSPORTS["shm written"] | {"agent_timeout_s": 600.0}
"""A busy machine makes an agent wait for seconds. It counts as hung when a test says so: `overdue`."""


class Hang:
    """Stands in for a method until the test has ended; hangs in one call of it, until released."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        *,
        after: bool = False,
        call: int = 1,
    ) -> None:
        calls = itertools.count(1)
        self.reached = threading.Event()
        self.release = threading.Event()
        method = getattr(owner, name)

        def hang() -> None:
            if next(calls) == call:
                self.reached.set()
                assert self.release.wait(60)

        def replaced(*args: Any, **options: Any) -> Any:
            if not after:
                hang()
            result = method(*args, **options)
            if after:
                hang()
            return result

        patch.setattr(owner, name, replaced)


def accepted(consumer: Rank, transfer: str) -> bool:
    """Whether the producer has said that it has KV to send."""
    side = consumer.loop.consumer_side
    assert side is not None
    incoming = side._consumer._transfers.get(transfer)
    return incoming is not None and all(s.accepted for s in incoming.streams.values())


def overdue(rank: Rank) -> None:
    """The agent, which hangs, has not answered for as long as its engine waits."""
    rank.agent._thread._turn._began -= 1000.0


def assert_serves_on(producer: Rank, consumer: Rank, transfer: str = "afterwards") -> None:
    """A good transfer arrives; one that meets a session of the agent's last life is tried again."""
    for attempt in range(20):
        name = f"{transfer} {attempt}"
        producer.offer(name, [11, 12, 13])
        consumer.load(producer.source, name, [21, 22, 23])
        finished = consumer.loaded(name)
        producer.freed(name)
        if finished.cause is None:
            return assert_pages(producer, [11, 12, 13], consumer, [21, 22, 23])
        time.sleep(0.1)
    pytest.fail(f"no good transfer: {finished}")


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_an_agent_that_died_serves_again_on_its_port_with_another_epoch(ranks: Ranks, who: str):
    pair = dict(zip(("producer", "consumer"), ranks.pair(SETTINGS), strict=True))
    producer, consumer = pair["producer"], pair["consumer"]
    assert_serves_on(producer, consumer, "before")
    producer.offer("t", [1])
    consumer.load(producer.source, "later", [1], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 2)
    pair[who].die()
    if who == "producer":
        assert producer.freed("t").cause == Cause.INTERNAL
    assert consumer.loaded("later").cause in (Cause.INTERNAL, Cause.SESSION_LOST)
    until(lambda: pair[who].count("agent_restarts"))
    assert_serves_on(producer, consumer)
    assert pair[who].count("agent_failures") == 1
    assert pair[who].count("agent_restarts") == 1
    pair[who].counts.clear()
    if who == "consumer":
        consumer.load(producer.source, "t", [1])
        assert consumer.loaded("t").cause is None


def test_ports_of_the_config_are_taken_by_producers_and_kept_over_a_restart(
    ranks: Ranks, forked: Callable[[], None]
) -> None:
    control, data = free_ports(2)
    ports = {"control_port": control, "data_port": data}
    producer, consumer = ranks.pair(LONG | TRANSPORTS["tcp"] | {"agent_timeout_s": 600.0} | ports)
    assert producer.agent.port == control
    assert producer.agent.data_port == data
    assert consumer.agent.data_port == 0, (
        "a consumer dials, and takes no port that a producer needs"
    )
    assert_serves_on(producer, consumer, "before")
    forked()
    producer.die()
    producer.offer("t", [1])
    assert producer.freed("t").cause == Cause.INTERNAL
    until(lambda: producer.count("agent_restarts"))
    socket.create_connection(("127.0.0.1", data)).close()
    assert_serves_on(producer, consumer)
    assert producer.count("agent_restarts") == 1
    producer.counts.clear()


def test_landing_slots_come_home_at_once_when_a_producer_starts_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transports close before its control port. A consumer that hears of the end finds that nobody writes into its
    slots any more; else they would be in quarantine for `lease_s`."""
    producer, consumer = ranks.pair(SETTINGS | {"lease_s": 600.0})
    producer.offer("t", [1, 2], computed=0)
    consumer.load(producer.source, "t", [5, 6], wait=True)
    until(lambda: consumer.gauge("landing_slots"), "slots are granted")
    close = ProducerSide.close

    def slow_close(side: ProducerSide) -> None:
        close(side)
        time.sleep(0.5)

    monkeypatch.setattr(ProducerSide, "close", slow_close)
    producer.die()
    assert consumer.loaded("t").cause == Cause.SESSION_LOST
    until(lambda: not consumer.gauge("landing_slots"), "no slot is in quarantine")
    until(lambda: producer.count("agent_restarts") == 1)
    producer.counts.clear()


@pytest.fixture
def forked() -> Iterator[Callable[[], None]]:
    """Forks a process that holds what this one has open, until the test has ended."""
    here, there = os.pipe()
    pids: list[int] = []

    def fork() -> None:
        if pid := os.fork():
            pids.append(pid)
            return
        os.close(there)
        os.read(here, 1)
        os._exit(0)

    yield fork
    os.close(there)
    os.close(here)
    for pid in pids:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_a_process_that_the_engine_forked_holds_neither_port_nor_peers(
    ranks: Ranks, forked: Callable[[], None], transport: str
):
    settings = LONG | TRANSPORTS[transport] | {"session_timeout_s": 600.0, "lease_s": 600.0}
    producer, consumer = ranks.pair(settings)
    consumer.load(producer.source, "under way", [1], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 1)
    forked()
    producer.die()
    assert consumer.loaded("under way").cause == Cause.SESSION_LOST, "it hears of the end"
    until(lambda: producer.count("agent_restarts"))
    assert_serves_on(producer, consumer)
    assert producer.count("agent_restarts") == 1
    producer.counts.clear()


def test_an_agent_that_cannot_start_again_fails_what_it_is_given_and_tries_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(SETTINGS)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(agent, "Loop", fail)
    consumer.die()
    for i in range(3):
        consumer.load(producer.source, f"t{i}", [1])
        assert consumer.loaded(f"t{i}").cause == Cause.INTERNAL
    monkeypatch.undo()
    until(lambda: consumer.count("agent_restarts") == 1)
    assert_serves_on(producer, consumer)
    consumer.counts.clear()


def test_an_agent_that_takes_long_to_start_again_serves_once_it_has(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(SETTINGS)
    assert_serves_on(producer, consumer, "before")
    hang = Hang(monkeypatch, agent, "Loop")
    consumer.die()
    assert hang.reached.wait(60)
    consumer.load(producer.source, "early", [1])
    overdue(consumer)
    assert consumer.loaded("early").cause == Cause.AGENT_HUNG
    hang.release.set()
    until(lambda: consumer.count("agent_restarts") == 1)
    assert_serves_on(producer, consumer)
    assert consumer.count("agent_restarts") == 1, "it need not start twice"
    consumer.counts.clear()


def test_what_a_hung_agent_owes_fails_in_time_and_it_serves_again_when_it_goes_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(SETTINGS | {"agent_timeout_s": 1.0})
    assert_serves_on(producer, consumer, "before")
    producer.offer("leased", [2])
    until(lambda: producer.gauge("leased_pages") == 1)
    hangs = [Hang(monkeypatch, rank.loop, "step") for rank in (producer, consumer)]
    producer.offer("t", [1])
    consumer.load(producer.source, "u", [1])
    for hang in hangs:
        assert hang.reached.wait(60)
    assert producer.freed("t").cause == Cause.AGENT_HUNG
    assert producer.freed("leased").cause == Cause.AGENT_HUNG
    assert consumer.loaded("u").cause == Cause.AGENT_HUNG
    consumer.load(producer.source, "while it hangs", [2])
    assert consumer.loaded("while it hangs").cause == Cause.AGENT_HUNG
    for rank in (producer, consumer):
        assert rank.at_rest(), "the engine need not step for leases and slots of a hung agent"
    for hang in hangs:
        hang.release.set()
    for rank in (producer, consumer):
        until(lambda rank=rank: rank.count("agent_restarts"))
    assert_serves_on(producer, consumer)
    for rank in (producer, consumer):
        assert rank.count("agent_failures")
        until(rank.at_rest)
        rank.counts.clear()


def hung_before_a_scatter(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, bytes]:
    """A consumer hangs just before it fills a page; the engine gives the page to someone else."""
    producer, consumer = ranks.pair(SETTINGS)
    assert_serves_on(producer, consumer, "before")
    hang = Hang(monkeypatch, ReceivePipeline, "place")
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert hang.reached.wait(60)
    overdue(consumer)
    assert consumer.loaded("t").cause == Cause.AGENT_HUNG
    for layer in consumer.layers.values():
        layer[5] = 0.0
    someone_elses = consumer.page(5)
    hang.release.set()
    until(lambda: consumer.count("agent_restarts") or consumer.page(5) != someone_elses)
    consumer.counts.clear()
    return consumer, someone_elses


def test_a_hung_agent_that_goes_on_writes_no_page_that_was_given_away(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    consumer, someone_elses = hung_before_a_scatter(ranks, monkeypatch)
    assert consumer.page(5) == someone_elses


def test_without_the_gate_it_would(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PageGate, "abandon", lambda self: "")
    consumer, someone_elses = hung_before_a_scatter(ranks, monkeypatch)
    assert consumer.page(5) != someone_elses


def test_a_load_into_whose_pages_a_hung_agent_copies_is_owed_until_it_goes_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(SETTINGS)
    assert_serves_on(producer, consumer, "before")
    # It hangs in the second of two chunks, and nothing else is missing: chunks may overtake the message
    # that there is KV to send.
    producer.offer("t", [1], computed=0)
    consumer.load(producer.source, "t", [5], wait=True)
    until(lambda: accepted(consumer, "t"), "accepted")
    hang = Hang(monkeypatch, consumer.cache, "scatter", call=2)
    producer.offer("t", [1])
    assert hang.reached.wait(60)
    overdue(consumer)
    consumer.load(producer.source, "another", [6])
    assert consumer.loaded("another").cause == Cause.AGENT_HUNG
    assert "load of t" not in consumer.look()
    hang.release.set()
    # An engine that looks between the copy and its report is told that the agent hangs; this one looks later.
    until(lambda: consumer.count("agent_restarts") == 1)
    assert consumer.loaded("t").cause is None, "the copy was right, and nobody had its pages"
    assert_pages(producer, [1], consumer, [5])
    assert_serves_on(producer, consumer)
    consumer.counts.clear()


def test_taking_pages_back_from_a_hung_agent_ends_in_time_and_what_it_read_is_not_sent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(SETTINGS)
    assert_serves_on(producer, consumer, "before")
    hang = Hang(monkeypatch, producer.cache, "in_place", after=True)
    producer.offer("t", [1, 2], computed=8)
    consumer.load(producer.source, "t", [5, 6], wait=True)
    before = consumer.count("received_chunks")
    assert hang.reached.wait(60)
    overdue(producer)
    producer.agent.submit(Revoke("t", "offer of t"))  # returns, although the agent hangs
    hang.release.set()
    assert consumer.loaded("t").cause is not None
    assert consumer.count("received_chunks") == before
    until(lambda: producer.count("agent_restarts") == 1)
    assert_serves_on(producer, consumer)
    producer.counts.clear()


@pytest.mark.parametrize("guarded", [True, False])
def test_what_a_hung_agent_seals_of_pages_that_were_taken_back_is_not_sent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, guarded: bool
):
    """It goes on and reads what another request has written meanwhile. Nothing else would tell: the seal is good."""
    wide = geometry_of(page_size=16, key_dim=64, value_dim=64)
    settings = LONG | {"transports": ("tcp",), "key": KEY, "agent_timeout_s": 600.0}
    producer, consumer = ranks.pair(settings, geometry=wide, pages=48)
    assert_serves_on(producer, consumer, "before")
    if not guarded:
        monkeypatch.setattr(PageGate, "_check", lambda *_: None)
    write = SendPipeline._write
    sent: list[str] = []

    def noted(pipeline: SendPipeline, chunk: Any, *others: Any) -> None:
        sent.append(chunk.transfer)
        write(pipeline, chunk, *others)

    monkeypatch.setattr(SendPipeline, "_write", noted)
    hang = Hang(monkeypatch, next(t for t in producer.transports if t.prepares), "prepare")
    producer.offer("t", [1, 2, 3])
    consumer.load(producer.source, "t", [5, 6, 7])
    assert hang.reached.wait(60)
    overdue(producer)
    producer.agent.submit(Withdraw("t", "offer of t"))
    for layer in producer.layers.values():
        layer[[1, 2, 3]] = 1.0
    hang.release.set()
    ended = consumer.loaded("t")
    assert bool(sent) == (not guarded)
    assert ended.cause is not None or not guarded
    until(lambda: producer.count("agent_restarts") == 1)
    assert_serves_on(producer, consumer)
    for rank in (producer, consumer):
        until(rank.at_rest)
        rank.counts.clear()
