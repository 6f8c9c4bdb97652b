# SPDX-License-Identifier: Apache-2.0
"""What a consumer asks for, and the engine knows nothing of, costs the producer a bounded amount of
memory, and others nothing."""

from collections.abc import Callable

import pytest
from support.machines import CONFIG, ROUTES, identity_of

from pd_connector.errors import Cause
from pd_connector.protocol.producing import outgoing_transfers, past_transfers
from pd_connector.protocol.producing.outgoing import Action, Offer, Reply
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages

LIAR, OTHER_LIAR, HONEST = b"liar", b"other liar", b"honest"
MANY = 1000
Ask = Callable[[Producer, bytes, str], list[Action]]


def opening(transfer: str, slots: int) -> messages.Open:
    granted = list(range(slots))
    return messages.Open(
        transfer, identity_of(transfer), 0, 4, True, granted, CONFIG.slot_bytes, readers=1
    )


def watch(producer: Producer, session: bytes, transfer: str) -> list[Action]:
    return producer.watch(session, transfer, 0.0)


def open_(producer: Producer, session: bytes, transfer: str) -> list[Action]:
    return producer.open(session, opening(transfer, 4096), ROUTES, 0.0)


def cancel(producer: Producer, session: bytes, transfer: str) -> list[Action]:
    return producer.cancel(session, transfer, Cause.ABORTED, 0.0, readers=2)


def answers(actions: list[Action]) -> list[messages.Message]:
    return [action.message for action in actions if isinstance(action, Reply)]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_transfers, "MOST_UNANNOUNCED", 100)
    monkeypatch.setattr(past_transfers, "_MOST_UNWANTED", 100)


@pytest.mark.parametrize("ask", [watch, open_, cancel])
def test_one_consumer_leaves_room_for_others(ask: Ask):
    producer = Producer(CONFIG)
    for number in range(MANY):
        ask(producer, LIAR, f"{number}")
    assert producer.transfers == 25
    producer.check_integrity()
    assert watch(producer, HONEST, "good") == []
    producer.expect("good", 0.0)
    told = answers(producer.offer(offer("good", final=False), 0.0))
    assert told == [messages.Ready("good")]


@pytest.mark.parametrize("ask", [watch, open_])
def test_many_consumers_are_refused_when_there_are_too_many(ask: Ask):
    producer = Producer(CONFIG)
    refused = 0
    for number in range(MANY):
        found = answers(ask(producer, b"liar %d" % (number % 10), f"{number}"))
        refused += any(isinstance(one, messages.Refuse) for one in found)
    assert producer.transfers == 100
    assert refused == MANY - 100
    for session in range(10):
        producer.session_lost(b"liar %d" % session)
    producer.tick(2 * CONFIG.lease_s)
    assert producer.transfers == 0
    producer.check_integrity()


def test_what_the_engine_announces_is_never_refused_nor_counted():
    producer = Producer(CONFIG)
    for number in range(MANY):
        producer.expect(f"mine {number}", 0.0)
        assert watch(producer, HONEST, f"mine {number}") == []
    for number in range(MANY):
        watch(producer, LIAR, f"{number}")
    producer.offer(offer("mine 0", final=True), 0.0)
    accepted = answers(open_(producer, OTHER_LIAR, "mine 0"))
    assert isinstance(accepted[0], messages.Accept)
    assert producer.transfers == MANY + 25
    producer.check_integrity()


def test_what_nobody_wants_is_remembered_for_so_many():
    producer = Producer(CONFIG)
    for number in range(MANY):
        producer.cancel(LIAR, f"{number}", Cause.ABORTED, 0.0)
    assert len(producer._past._unwanted) == 100
    producer.expect(f"{MANY - 1}", 0.0)  # a late one is still known
    assert producer.transfers == 0


def test_slots_that_mean_nothing_are_not_kept():
    producer = Producer(CONFIG)
    open_(producer, LIAR, "a")
    stream = producer._transfers["a"].streams[LIAR]
    assert len(stream.credits) == 64
    assert stream.message.slots == []
    producer.expect("a", 0.0)
    producer.offer(offer("a", final=True), 0.0)
    assert len(stream.credits) <= stream.planned


def offer(transfer: str, *, final: bool) -> Offer:
    table = ([0, 1],)
    identity = identity_of(transfer)
    return Offer(transfer, f"request {transfer}", table, identity, 4, 4, final)
