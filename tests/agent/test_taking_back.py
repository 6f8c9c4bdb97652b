# SPDX-License-Identifier: Apache-2.0
"""An engine takes pages back in whatever state their transfer is: from then on nobody touches them."""

import threading
from typing import Any

import pytest
from support.agents import LONG, TOKENS, WHOLE, Rank, Ranks, assert_pages, ranks, until
from support.waits import meanwhile

from pd_connector.agent.commands import Drop, Expect, Withdraw
from pd_connector.agent.page_gate import PageGate
from pd_connector.errors import Cause
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer

__all__ = ["ranks"]

TCP: dict[str, Any] = LONG | {"transports": ("tcp",)}
PAGES = [1, 2, 3]


class Pausing:
    """Copies of one side that stop before they begin, one at a time, until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.copies = 0
        copy = getattr(PagedCache, side)

        def paused(*arguments: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(30.0)
            self.copies += 1
            return copy(*arguments)

        monkeypatch.setattr(PagedCache, side, paused)


def withdraw(rank: Rank) -> None:
    rank.agent.submit(Withdraw("t", "offer of t"))


def drop(rank: Rank) -> None:
    rank.agent.submit(Drop("load of t", Cause.ABORTED))


@pytest.mark.parametrize("side", ["gather", "scatter"])
def test_taking_back_waits_for_the_copy_under_way_and_lets_no_other_begin(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    pausing = Pausing(monkeypatch, side)
    producer, consumer = ranks.pair(TCP)
    producer.offer("t", PAGES)
    consumer.load(producer.source, "t", PAGES)
    assert pausing.begun.wait(30.0)
    take_back, rank = (withdraw, producer) if side == "gather" else (drop, consumer)
    with meanwhile(take_back, rank) as returned:
        assert not returned.wait(0.2), "the copy goes on, and its pages were given back"
        pausing.go_on.set()
    copies = pausing.copies
    mine = rank.page(1)
    producer.offer("u", [5])
    consumer.load(producer.source, "u", [6])
    assert consumer.loaded("u").cause is None, "another request's copies go on"
    if side == "scatter":
        assert pausing.copies == copies + 1
        assert rank.page(1) == mine


def test_without_the_gate_a_dropped_request_is_written_to(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(PageGate, "shut", lambda gate, request, timeout_s: True)
    monkeypatch.setattr(PageGate, "open", lambda gate, request: None)
    pausing = Pausing(monkeypatch, "scatter")
    producer, consumer = ranks.pair(TCP)
    producer.offer("t", PAGES)
    before = consumer.page(1)
    consumer.load(producer.source, "t", PAGES)
    assert pausing.begun.wait(30.0)
    drop(consumer)
    assert consumer.page(1) == before
    pausing.go_on.set()
    until(lambda: consumer.page(1) != before, "another request's page is overwritten")
    consumer.loaded("t")  # the agent has carried out the `Drop`, or needs it no more
    until(lambda: consumer.at_rest() and not consumer.agent._commands._commands.qsize())


def test_leased_pages_are_taken_back_and_whoever_comes_for_them_is_refused(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(TCP)
    producer.offer("t", PAGES)
    until(lambda: producer.gauge("leased_pages") == len(PAGES))
    withdraw(producer)
    until(lambda: producer.gauge("leased_pages") == 0)
    consumer.load(producer.source, "t", PAGES)
    assert consumer.loaded("t").cause is Cause.PREFILL_ENDED
    assert "offer of t" not in producer.look(), "who takes back need not be told"


def test_a_load_of_leased_pages_that_are_taken_back_fails(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = Pausing(monkeypatch, "gather")
    producer, consumer = ranks.pair(TCP)
    producer.offer("t", PAGES)
    consumer.load(producer.source, "t", PAGES)
    assert pausing.begun.wait(30.0)
    with meanwhile(withdraw, producer):
        pausing.go_on.set()
    ended = consumer.loaded("t")
    # Either the one chunk was on its way before, and was right, or nothing of it counts.
    assert ended.cause in (None, Cause.PREFILL_ENDED)
    producer.assert_at_rest()
    consumer.assert_at_rest()


def test_a_transfer_that_was_taken_back_can_be_offered_again(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(TCP)
    producer.offer("t", PAGES)
    withdraw(producer)
    producer.agent.submit(Expect("t"))
    producer.offer("t", [7, 8, 9])
    consumer.load(producer.source, "t", PAGES)
    assert consumer.loaded("t").cause is None
    assert producer.freed("t").cause is None
    assert_pages(producer, [7, 8, 9], consumer, PAGES)


def test_another_requests_offer_is_not_taken_back(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(TCP)
    producer.offer("t", PAGES)
    producer.agent.submit(Withdraw("t", "another request"))
    consumer.load(producer.source, "t", PAGES)
    assert consumer.loaded("t").cause is None


def test_an_engine_may_say_itself_what_its_copies_wait_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that computes on a stream of its own gives that stream's event."""
    waited: list[Any] = []
    for side in ("gather", "scatter"):
        copy = getattr(PagedCache, side)

        def touched(*arguments: Any, copy: Any = copy) -> Any:
            waited.append(arguments[5])
            return copy(*arguments[:5])

        monkeypatch.setattr(PagedCache, side, touched)
    producer, consumer = ranks.pair(TCP)
    offer = Offer("t", "offer of t", ([5],), TOKENS, 4, 4, True)
    producer.agent.submit(offer, fence="the forward pass")
    peers = (Peer(producer.source, WHOLE),)
    load = Load("load of t", "t", peers, TOKENS, 0, 4, ([7],), False)
    consumer.agent.submit(load, fence="who had these pages")
    assert consumer.loaded("t").cause is None
    assert waited == ["the forward pass", "who had these pages"]
