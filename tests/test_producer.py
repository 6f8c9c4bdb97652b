# SPDX-License-Identifier: Apache-2.0
"""The producer's rules, one at a time. Orders and faults in combination: test_pair.py."""

import pytest
from support.machines import CONFIG, GEOMETRY, identity_of

from pd_connector import wire
from pd_connector.errors import Cause
from pd_connector.producer import Free, Offer, Producer, Reply

ONE, TWO = b"session one", b"session two"
OFFER = Offer("t", "request", [7, 3, 9, 1, 5, 2], identity_of("t"))


@pytest.fixture
def producer() -> Producer:
    return Producer(CONFIG, GEOMETRY)


def opening(
    *,
    first: int = 0,
    stop: int = 6,
    wait: bool = False,
    slots: tuple[int, ...] = (),
    tokens: str = "t",
) -> wire.Open:
    return wire.Open("t", identity_of(tokens), first, stop, wait, ["raw"], list(slots))


def refused(actions: object, cause: Cause) -> bool:
    match actions:
        case [Reply(_, wire.Refuse(_, found, _))]:
            return found == cause
    return False


def test_pages_offered_before_and_after_the_opening_are_streamed(producer: Producer):
    assert producer.offer(OFFER, 0.0) == []
    assert producer.open(ONE, opening(), 0.0) == [Reply(ONE, wire.Accept("t", "raw", 4))]
    other = Producer(CONFIG, GEOMETRY)
    assert other.open(ONE, opening(wait=True), 0.0) == []
    assert other.offer(OFFER, 0.0) == [Reply(ONE, wire.Accept("t", "raw", 4))]


def test_nothing_is_sent_without_credit_and_each_credit_is_used_once(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), 0.0)
    assert producer.next_send() is None
    producer.credit(ONE, "t", [2, 0])
    sent = [producer.next_send(), producer.next_send()]
    assert [send.slot for send in sent if send] == [2, 0]
    assert [list(send.pages) for send in sent if send] == [[7, 3, 9, 1], [7, 3, 9, 1]]
    assert producer.next_send() is None


def test_only_the_pages_that_were_asked_for_are_sent(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(first=4, slots=(0, 1)), 0.0)
    send = producer.next_send()
    assert send is not None
    assert list(send.pages) == [5, 2]


def test_credits_beyond_the_plan_and_of_strangers_are_not_kept(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), 0.0)
    for _ in range(1000):
        producer.credit(ONE, "t", [0] * 1000)
        producer.credit(TWO, "t", [1] * 1000)
    sent = [send.slot for send in iter(producer.next_send, None)]
    assert sent == [0, 0, 0, 0]
    assert len(producer._transfers["t"].credits) == 0


def test_transfers_are_sent_in_turn(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.offer(OFFER._replace(transfer="u", request="other", identity=identity_of("u")), 0.0)
    producer.open(ONE, opening(slots=(0, 1, 2)), 0.0)
    producer.open(ONE, wire.Open("u", identity_of("u"), 0, 6, False, ["raw"], [3, 4, 5]), 0.0)
    sent = [send.transfer for send in iter(producer.next_send, None)]
    assert sent == ["t", "u", "t", "u", "t", "u"]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (opening(tokens="others"), Cause.TOKENS),
        (opening(stop=7), Cause.TOKENS),
        (opening(first=6), Cause.TOKENS),
        (opening(first=5, stop=4), Cause.TOKENS),
        (opening(stop=2**62), Cause.TOKENS),
        (wire.Open("t", identity_of("t"), 0, 6, False, ["int9"], []), Cause.GEOMETRY),
        (wire.Open("u", identity_of("u"), 0, 6, False, ["raw"], []), Cause.UNKNOWN_TRANSFER),
        (wire.Open("t", identity_of("t"), 0, 6, False, ["raw"], [], 1), Cause.GEOMETRY),
        (wire.Open("t", identity_of("t"), 0, 6, False, ["raw"], [], 2**62), Cause.GEOMETRY),
    ],
)
def test_what_cannot_be_sent_is_refused_and_the_lease_stands(
    producer: Producer, message: wire.Open, cause: Cause
):
    producer.offer(OFFER, 0.0)
    assert refused(producer.open(ONE, message, 0.0), cause)
    assert producer.leased_pages == 6
    producer.cancel(ONE, "t", cause, 0.0) if message.transfer == "t" else None
    assert producer.open(TWO, opening(), 0.0) == [Reply(TWO, wire.Accept("t", "raw", 4))]


def test_a_transfer_is_opened_once(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), 0.0)
    assert refused(producer.open(TWO, opening(), 0.0), Cause.DUPLICATE)
    assert refused(producer.open(ONE, opening(), 0.0), Cause.DUPLICATE)
    assert producer.done(ONE, "t") == [Free("request", None)]


def test_only_who_opened_a_transfer_can_end_it(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), 0.0)
    assert producer.done(TWO, "t") == []
    assert producer.session_lost(TWO) == []
    assert producer.cancel(TWO, "t", Cause.ABORTED, 0.0) == [Reply(TWO, wire.Cancelled("t"))]
    assert producer.leased_pages == 6
    assert producer.session_lost(ONE) == [Free("request", Cause.SESSION_LOST)]


def test_a_lease_ends_and_a_heartbeat_moves_its_end(producer: Producer):
    producer.offer(OFFER, 0.0)
    assert producer.tick(CONFIG.lease_s - 0.1) == []
    producer.heartbeat(ONE, ["t", "unknown"], CONFIG.lease_s - 0.1)
    assert producer.tick(CONFIG.lease_s) == []
    assert producer.tick(2 * CONFIG.lease_s) == [Free("request", Cause.LEASE_EXPIRED)]


def test_a_second_offer_of_a_transfer_is_freed_at_once(producer: Producer):
    producer.offer(OFFER, 0.0)
    again = OFFER._replace(request="another")
    assert producer.offer(again, 0.0) == [Free("another", Cause.DUPLICATE)]


def test_a_cancel_before_the_pages_exist_frees_them_when_they_come(producer: Producer):
    producer.expect("t", 0.0)
    assert producer.cancel(ONE, "t", Cause.ABORTED, 0.0) == [Reply(ONE, wire.Cancelled("t"))]
    assert producer.offer(OFFER, 1.0) == [Free("request", Cause.ABORTED)]
    assert producer.transfers == 0


def test_cancelled_is_said_when_the_last_write_has_ended(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(slots=(0, 1)), 0.0)
    producer.next_send()
    producer.next_send()
    assert producer.cancel(ONE, "t", Cause.ABORTED, 0.0) == [Free("request", Cause.ABORTED)]
    assert producer.written(ONE, "t", True, "") == []
    assert producer.written(ONE, "t", False, "gone") == [Reply(ONE, wire.Cancelled("t"))]


def test_a_session_that_is_lost_is_told_nothing_more(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(slots=(0,)), 0.0)
    producer.next_send()
    producer.cancel(ONE, "t", Cause.ABORTED, 0.0)
    assert producer.session_lost(ONE) == []
    assert producer.written(ONE, "t", False, "disconnected") == []


def test_a_failed_write_ends_its_transfer(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(slots=(0,)), 0.0)
    producer.next_send()
    refuse, free = producer.written(ONE, "t", False, "no route")
    assert refuse == Reply(ONE, wire.Refuse("t", Cause.TRANSPORT, "no route"))
    assert free == Free("request", Cause.TRANSPORT)


def test_an_opening_waits_for_an_expected_prefill_and_not_for_ever(producer: Producer):
    producer.expect("t", 0.0)
    assert producer.open(ONE, opening(wait=True), 0.0) == []
    assert producer.tick(CONFIG.wait_timeout_s - 1) == []
    assert refused(producer.tick(CONFIG.wait_timeout_s), Cause.WAIT_TIMEOUT)


def test_an_opening_that_waits_is_told_that_the_prefill_ended_early(producer: Producer):
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True), 0.0)
    assert refused(producer.withdraw("t"), Cause.PREFILL_ENDED)
    assert producer.transfers == 0


def test_an_opening_that_comes_after_the_end_does_not_wait(producer: Producer):
    producer.expect("t", 0.0)
    producer.withdraw("t")
    (reply,) = producer.open(ONE, opening(wait=True), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, wire.Refuse)
    assert reply.message.cause == Cause.UNKNOWN_TRANSFER
    producer.expect("t", 0.0)  # the name is used again
    assert producer.open(ONE, opening(wait=True), 0.0) == []
