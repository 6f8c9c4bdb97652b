# SPDX-License-Identifier: Apache-2.0
"""An engine tells what its device computes before that is done. Nobody waits for it but who needs it.

The device is a double: an event that a test declares done.
"""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from support.agents import LONG, TOKENS, Rank, Ranks, assert_pages, ranks, until

from pd_connector.agent.commands import ChangeModel, Computed, Expect, Revoke, Withdraw
from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.producing.outgoing import Offer

__all__ = ["ranks"]

TCP: dict[str, Any] = LONG | {"transports": ("tcp",)}
PAGES = [1, 2, 3]
PROMPT = 12  # tokens


@dataclass
class Step:
    """What a device computes."""

    done: bool = False


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Steps for which a gather had to wait, on the thread that is there for all."""
    found: list[Step] = []
    gather = PagedCache.gather

    def gathers(*arguments: Any) -> Any:
        if arguments[5] is not None and not arguments[5].done:
            found.append(arguments[5])
        return gather(*arguments)

    monkeypatch.setattr(PagedCache, "gather", gathers)
    monkeypatch.setattr(PagedCache, "happened", lambda cache, fence: fence is None or fence.done)
    return found


def offer(rank: Rank, transfer: str, step: Step | None, *, tokens: int, final: bool) -> None:
    told = Offer(transfer, f"offer of {transfer}", (PAGES,), TOKENS, PROMPT, tokens, final)
    rank.agent.submit(told, fence=step)


def computes(rank: Rank, transfer: str, step: Step, tokens: int) -> None:
    rank.agent.submit(Computed(transfer, f"offer of {transfer}", tokens), fence=step)


def test_kv_that_a_device_still_computes_holds_up_no_other_transfer(
    ranks: Ranks, early: list[Step]
) -> None:
    producer, consumer = ranks.pair(TCP)
    step = Step()
    offer(producer, "t", step, tokens=PROMPT, final=True)
    consumer.load(producer.source, "t", [4, 5, 6])
    producer.offer("u", [7])
    consumer.load(producer.source, "u", [8])
    assert consumer.loaded("u").cause is None
    assert "load of t" not in consumer.look()
    step.done = True
    assert consumer.loaded("t").cause is None
    assert producer.freed("t").cause is None
    assert_pages(producer, PAGES, consumer, [4, 5, 6])
    assert not early


def test_each_part_passes_when_its_own_step_is_done(ranks: Ranks, early: list[Step]) -> None:
    """The engine has queued the next one by then."""
    producer, consumer = ranks.pair(TCP)
    first, second = Step(), Step()
    producer.agent.submit(Expect("t"))
    offer(producer, "t", first, tokens=0, final=False)
    computes(producer, "t", first, 8)
    computes(producer, "t", second, PROMPT)
    consumer.load(producer.source, "t", [4, 5], tokens=8, wait=True)
    until(lambda: producer.gauge("consumer_sessions"))
    assert "load of t" not in consumer.look()
    first.done = True
    until(lambda: producer.page(2) == consumer.page(5), "the first step's KV")
    second.done = True
    offer(producer, "t", None, tokens=PROMPT, final=True)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [1, 2], consumer, [4, 5])
    assert not early


def test_the_end_of_a_prefill_waits_for_no_step_that_came_after_it(
    ranks: Ranks, early: list[Step]
) -> None:
    producer, consumer = ranks.pair(TCP)
    own, others = Step(), Step()
    offer(producer, "t", own, tokens=0, final=False)
    computes(producer, "t", own, PROMPT)
    offer(producer, "t", others, tokens=PROMPT, final=True)
    consumer.load(producer.source, "t", [4, 5, 6], wait=True)
    own.done = True
    assert consumer.loaded("t").cause is None
    assert producer.freed("t").cause is None
    assert_pages(producer, PAGES, consumer, [4, 5, 6])
    assert not early


@pytest.mark.parametrize("final", [False, True])
def test_what_a_device_computes_is_taken_back_without_waiting_for_it(
    ranks: Ranks, final: bool
) -> None:
    producer, consumer = ranks.pair(TCP)
    step = Step()
    offer(producer, "t", step, tokens=PROMPT, final=final)
    consumer.load(producer.source, "t", PAGES, wait=True)
    until(lambda: producer.gauge("consumer_sessions"))
    producer.agent.submit(Withdraw("t", "offer of t"))
    assert consumer.loaded("t").cause in (Cause.PREFILL_ENDED, Cause.UNKNOWN_TRANSFER)
    step.done = True  # nothing of it comes back


def test_another_requests_offer_is_not_taken_back_while_it_waits(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(TCP)
    step = Step()
    offer(producer, "t", step, tokens=PROMPT, final=True)
    consumer.load(producer.source, "t", [4, 5, 6], wait=True)
    side = producer.loop.producer_side
    assert side is not None
    until(lambda: (known := side._producer._transfers.get("t")) and known.streams)
    producer.agent.submit(Withdraw("t", "another request"))
    step.done = True
    assert consumer.loaded("t").cause is None
    assert_pages(producer, PAGES, consumer, [4, 5, 6])


def test_a_preempted_step_is_forgotten(ranks: Ranks, early: list[Step]) -> None:
    """Its pages are another request's when it is done."""
    producer, consumer = ranks.pair(TCP)
    lost, again = Step(), Step()
    offer(producer, "t", lost, tokens=0, final=False)
    computes(producer, "t", lost, PROMPT)
    producer.agent.submit(Revoke("t", "offer of t"))
    offer(producer, "t", again, tokens=0, final=False)
    offer(producer, "t", again, tokens=PROMPT, final=True)
    consumer.load(producer.source, "t", [4, 5, 6], wait=True)
    lost.done = True
    producer.offer("u", [7])
    consumer.load(producer.source, "u", [8])
    assert consumer.loaded("u").cause is None
    assert producer.page(1) != consumer.page(4)
    again.done = True
    assert consumer.loaded("t").cause is None
    assert not early


def test_kv_that_the_old_weights_still_compute_ends_with_them(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(TCP)
    offer(producer, "t", Step(), tokens=PROMPT, final=True)
    consumer.load(producer.source, "t", PAGES, wait=True)
    producer.agent.submit(ChangeModel(ModelFacts(config=b"other")))
    assert producer.freed("t").cause == Cause.MODEL
    assert consumer.loaded("t").cause in (Cause.MODEL, Cause.UNKNOWN_TRANSFER)


def test_a_look_at_the_device_is_no_turn(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the agent's loop costs the engine Python's lock."""
    producer, consumer = ranks.pair(TCP | {"heartbeat_s": 60.0, "session_timeout_s": 120.0})
    consumer.load(producer.source, "t", [4, 5, 6], wait=True)
    step, looks = Step(), 0
    many = threading.Event()

    def happened(cache: PagedCache, fence: Step | None) -> bool:
        nonlocal looks
        looks += 1
        if looks > 50:
            many.set()
        return fence is None or fence.done

    monkeypatch.setattr(PagedCache, "happened", happened)
    offer(producer, "t", step, tokens=PROMPT, final=True)
    loop = producer.loop
    turns = 0
    take_turn = loop.step

    def counted(now: float) -> None:
        nonlocal turns
        turns += 1
        take_turn(now)

    monkeypatch.setattr(loop, "step", counted)
    assert many.wait(30.0)
    assert turns < 20
    step.done = True
    assert consumer.loaded("t").cause is None
