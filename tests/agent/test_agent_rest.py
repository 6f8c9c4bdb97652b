# SPDX-License-Identifier: Apache-2.0
"""An agent rests while its engine sleeps: its pages have no memory, and afterwards other content."""

import threading
from typing import Any

import pytest
from support.agents import Rank, Ranks, assert_pages, ranks, until
from test_agent_restart import SETTINGS, Hang, assert_serves_on

from pd_connector.agent.consuming.receive_pipeline import ReceivePipeline
from pd_connector.errors import Cause, PDConnectorError

__all__ = ["ranks"]


def empty(rank: Rank) -> None:
    """Nothing is left of what its pages held."""
    for layer in rank.layers.values():
        layer.zero_()


def wake(rank: Rank) -> None:
    """Until its thread listens again, peers are refused, and then pause."""
    before = rank.loop
    rank.agent.wake()
    until(lambda: rank.loop is not before)


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_what_was_under_way_ends_and_afterwards_it_serves_on_its_port(ranks: Ranks, who: str):
    producer, consumer = ranks.pair(SETTINGS)
    rank = producer if who == "producer" else consumer
    assert_serves_on(producer, consumer, "before")
    producer.offer("leased", [1])
    consumer.load(producer.source, "later", [1], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 2)
    port = rank.agent.port
    rank.agent.rest()
    assert rank.at_rest(), "its engine need not step for anything"
    if rank is producer:
        assert producer.freed("leased").cause == Cause.ASLEEP
        assert consumer.loaded("later").cause == Cause.SESSION_LOST
    else:
        assert consumer.loaded("later").cause == Cause.ASLEEP
    rank.agent.rest()
    wake(rank)
    assert_serves_on(producer, consumer)
    assert rank.agent.port == port
    assert not rank.count("agent_failures")
    assert not rank.count("agent_restarts")
    if rank is consumer:
        consumer.load(producer.source, "leased", [2])
        assert consumer.loaded("leased").cause is None


def test_kv_of_before_is_not_sent_afterwards(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(SETTINGS)
    producer.offer("t", [1])
    producer.agent.rest()
    empty(producer)
    wake(producer)
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause in (Cause.UNKNOWN_TRANSFER, Cause.SESSION_LOST)
    assert producer.freed("t").cause == Cause.ASLEEP


def test_a_copy_that_is_under_way_ends_before_the_pages_go(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ranks.pair(SETTINGS)
    assert_serves_on(producer, consumer, "before")
    hang = Hang(monkeypatch, ReceivePipeline, "place")
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert hang.reached.wait(60)
    rests = threading.Thread(target=consumer.agent.rest)
    rests.start()
    rests.join(0.2)
    assert rests.is_alive()
    hang.release.set()
    rests.join(60)
    assert not rests.is_alive()
    assert consumer.loaded("t").cause in (None, Cause.ASLEEP)
    empty(consumer)
    wake(consumer)
    assert not any(consumer.page(5)), "nothing of before is written afterwards"
    assert_serves_on(producer, consumer)


def test_what_is_submitted_meanwhile_is_done_afterwards(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(SETTINGS)
    for rank in (producer, consumer):
        rank.agent.rest()
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert not producer.look()
    assert not consumer.look(), "an agent at rest does not count as hung"
    for rank in (producer, consumer):
        wake(rank)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [1], consumer, [5])
    assert producer.freed("t")


def test_an_agent_that_does_not_answer_is_said_and_goes_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ranks.pair(SETTINGS | {"agent_timeout_s": 0.5})
    hang = Hang(monkeypatch, consumer.loop, "step")
    consumer.load(producer.source, "t", [1])
    assert hang.reached.wait(60)
    with pytest.raises(PDConnectorError, match=r"not answered for 0\.5 s \(agent_timeout_s\)"):
        consumer.agent.rest()
    hang.release.set()
    consumer.loaded("t")
    assert_serves_on(producer, consumer)
    consumer.counts.clear()


def test_it_is_closed_while_it_rests(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(SETTINGS)
    for rank in (producer, consumer):
        rank.agent.rest()
        ranks.stop(rank)


def test_where_no_loop_can_be_made_it_is_tried_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ranks.pair(SETTINGS)
    make, calls = producer.agent._thread._make_loop, []

    def fail_once(port: int) -> Any:
        calls.append(port)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return make(port)

    monkeypatch.setattr(producer.agent._thread, "_make_loop", fail_once)
    producer.agent.rest()
    producer.offer("t", [1])
    producer.agent.wake()
    assert producer.freed("t").cause == Cause.INTERNAL
    until(lambda: producer.count("agent_restarts") == 1)
    assert_serves_on(producer, consumer)
    producer.counts.clear()
