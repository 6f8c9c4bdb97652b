# SPDX-License-Identifier: Apache-2.0
"""The producer's rules, one at a time. Orders and faults in combination: test_pair.py."""

from typing import Any

import msgspec
import pytest
from support.machines import CONFIG, HALVES, ROUTES, STAGES, WHOLE, identity_of, routes_of

from pd_connector.errors import Cause
from pd_connector.protocol.producing.outgoing import Free, Offer, Reply
from pd_connector.protocol.producing.producer import LAYERS_PAY_S, Producer
from pd_connector.protocol.wire import messages

ONE, TWO = b"session one", b"session two"
PAGES = [7, 3, 9, 1, 5, 2]
OFFER = Offer("t", "request", (PAGES,), identity_of("t"), prompt_tokens=12, tokens=12, final=True)
SLOT = CONFIG.slot_bytes
ACCEPT = messages.Accept("t", 4, True)


@pytest.fixture
def producer() -> Producer:
    return Producer(CONFIG)


def opening(
    *,
    first: int = 0,
    stop: int = 12,
    wait: bool = False,
    slots: tuple[int, ...] = (),
    tokens: str = "t",
    **fields: Any,
) -> messages.Open:
    message = messages.Open("t", identity_of(tokens), first, stop, wait, list(slots), SLOT)
    return msgspec.structs.replace(message, **fields)


def refused(actions: object, cause: Cause) -> bool:
    match actions:
        case [Reply(_, messages.Refuse(_, found, _))]:
            return found == cause
    return False


def grown(tokens: int) -> Offer:
    """The same prompt while it is being computed."""
    return OFFER._replace(tokens=tokens, final=False)


def sent(producer: Producer) -> list[tuple[int, int, int, int]]:
    """Layers and tokens of everything that can be sent now."""
    return [tuple(chunk.planned[2:6]) for chunk in iter(producer.next_send, None)]


def test_pages_offered_before_and_after_the_opening_are_streamed(producer: Producer):
    assert producer.offer(OFFER, 0.0) == []
    assert producer.open(ONE, opening(), ROUTES, 0.0) == [Reply(ONE, ACCEPT)]
    other = Producer(CONFIG)
    assert other.open(ONE, opening(wait=True), ROUTES, 0.0) == []
    assert other.offer(OFFER, 0.0) == [Reply(ONE, ACCEPT)]


def test_nothing_is_sent_without_credit_and_each_credit_is_used_once(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), ROUTES, 0.0)
    assert producer.next_send() is None
    producer.credit(ONE, "t", [2, 0])
    sends = [producer.next_send(), producer.next_send()]
    assert [send.slot for send in sends if send] == [2, 0]
    assert [list(send.pages) for send in sends if send] == [[7, 3, 9], [7, 3, 9]]
    assert producer.next_send() is None


def test_only_the_tokens_that_were_asked_for_are_sent(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(first=8, slots=(0, 1)), ROUTES, 0.0)
    send = producer.next_send()
    assert send is not None
    assert list(send.pages) == [5, 2]


def test_credits_beyond_the_plan_and_of_strangers_are_not_kept(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), ROUTES, 0.0)
    for _ in range(1000):
        producer.credit(ONE, "t", [0] * 1000)
        producer.credit(TWO, "t", [1] * 1000)
    slots = [send.slot for send in iter(producer.next_send, None)]
    assert slots == [0, 0, 0, 0]
    assert len(producer._transfers["t"].streams[ONE].credits) == 0


def test_a_busy_session_holds_up_no_other_and_goes_on_where_it_was(producer: Producer):
    producer.offer(OFFER, 0.0)
    for session, slots in ((ONE, (0, 1, 2, 3)), (TWO, (4, 5, 6, 7))):
        producer.open(session, opening(slots=slots, readers=2), ROUTES, 0.0)
    busy = {ONE}
    served = [send.session for send in iter(lambda: producer.next_send(busy), None)]
    assert served == [TWO] * 4
    busy.clear()
    served = [send.session for send in iter(lambda: producer.next_send(busy), None)]
    assert served == [ONE] * 4


def test_transfers_are_sent_in_turn(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.offer(OFFER._replace(transfer="u", request="other", identity=identity_of("u")), 0.0)
    producer.open(ONE, opening(slots=(0, 1, 2)), ROUTES, 0.0)
    other = opening(slots=(3, 4, 5), tokens="u", transfer="u")
    producer.open(ONE, other, ROUTES, 0.0)
    turns = [send.transfer for send in iter(producer.next_send, None)]
    assert turns == ["t", "u", "t", "u", "t", "u"]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (opening(tokens="others"), Cause.TOKENS),
        (opening(stop=13), Cause.TOKENS),
        (opening(first=5, stop=4), Cause.TOKENS),
        (opening(stop=2**62), Cause.TOKENS),
        (opening(transfer="u", tokens="u"), Cause.UNKNOWN_TRANSFER),
        (opening(chunk_bytes=0), Cause.GEOMETRY),
        (opening(chunk_bytes=SLOT - 1), Cause.GEOMETRY),
        (opening(chunk_bytes=SLOT + 1), Cause.GEOMETRY),
        (opening(chunk_bytes=2**62), Cause.GEOMETRY),
    ],
)
def test_what_cannot_be_sent_is_refused_and_the_lease_stands(
    producer: Producer, message: messages.Open, cause: Cause
):
    producer.offer(OFFER, 0.0)
    assert refused(producer.open(ONE, message, ROUTES, 0.0), cause)
    assert producer.leased_pages == 6
    producer.cancel(ONE, "t", cause, 0.0) if message.transfer == "t" else None
    assert producer.open(TWO, opening(), ROUTES, 0.0) == [Reply(TWO, ACCEPT)]


def test_what_was_refused_is_kept_for_a_moment_unless_another_consumer_waits(producer: Producer):
    """The proxy named one consumer, and sent it another prompt."""
    moment_s = 2 * CONFIG.heartbeat_s
    assert moment_s < CONFIG.lease_s
    producer.offer(OFFER, 0.0)
    assert producer.tick(moment_s) == []
    assert refused(producer.open(ONE, opening(tokens="others"), ROUTES, moment_s), Cause.TOKENS)
    producer.cancel(ONE, "t", Cause.TOKENS, moment_s)
    producer.heartbeat(["t"], 1.5 * moment_s)
    assert producer.tick(2 * moment_s) == []
    producer.open(ONE, opening(tokens="others"), ROUTES, 2 * moment_s)
    producer.cancel(ONE, "t", Cause.TOKENS, 2 * moment_s)
    assert producer.tick(3 * moment_s) == [Free("request", Cause.LEASE_EXPIRED)]


@pytest.mark.parametrize("another", [False, True])
def test_what_was_refused_before_the_prefill_has_ended_is_kept_for_a_moment(
    producer: Producer, another: bool
):
    """Control: another consumer waits for the same prefill, and its heartbeats keep the pages."""
    moment_s = 2 * CONFIG.heartbeat_s
    producer.expect("t", 0.0)
    producer.offer(OFFER._replace(tokens=4, final=False), 0.0)
    assert refused(producer.open(ONE, opening(tokens="others"), ROUTES, 0.0), Cause.TOKENS)
    producer.cancel(ONE, "t", Cause.TOKENS, 0.0)
    if another:
        producer.open(TWO, opening(slots=()), ROUTES, 0.0)
    assert producer.offer(OFFER, 1.0)[-1:] != [Free("request", Cause.TOKENS)]
    assert producer.leased_pages == 6
    if another:
        producer.heartbeat(["t"], 1.0 + moment_s / 2)
    ended = producer.tick(1.0 + moment_s)
    assert ended == ([] if another else [Free("request", Cause.LEASE_EXPIRED)])


def test_a_transfer_is_opened_once(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), ROUTES, 0.0)
    assert refused(producer.open(TWO, opening(), ROUTES, 0.0), Cause.DUPLICATE)
    assert refused(producer.open(ONE, opening(), ROUTES, 0.0), Cause.DUPLICATE)
    assert producer.done(ONE, "t") == [Free("request", None)]


def test_only_who_opened_a_transfer_can_end_it(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(), ROUTES, 0.0)
    assert producer.done(TWO, "t") == []
    assert producer.session_lost(TWO) == []
    assert producer.cancel(TWO, "t", Cause.ABORTED, 0.0) == [Reply(TWO, messages.Cancelled("t"))]
    assert producer.leased_pages == 6
    assert producer.session_lost(ONE) == [Free("request", Cause.SESSION_LOST)]


def test_a_lease_ends_and_a_heartbeat_moves_its_end(producer: Producer):
    producer.offer(OFFER, 0.0)
    assert producer.tick(CONFIG.lease_s - 0.1) == []
    producer.heartbeat(["t", "unknown"], CONFIG.lease_s - 0.1)
    assert producer.tick(CONFIG.lease_s) == []
    assert producer.tick(2 * CONFIG.lease_s) == [Free("request", Cause.LEASE_EXPIRED)]


def test_a_second_offer_of_a_transfer_is_freed_at_once(producer: Producer):
    producer.offer(OFFER, 0.0)
    again = OFFER._replace(request="another")
    assert producer.offer(again, 0.0) == [Free("another", Cause.DUPLICATE)]


def test_a_second_request_with_a_leased_transfer_does_not_make_its_lease_longer(
    producer: Producer,
):
    producer.offer(OFFER, 0.0)
    producer.expect("t", CONFIG.lease_s - 0.1)
    producer.check_integrity()
    assert producer.tick(CONFIG.lease_s) == [Free("request", Cause.LEASE_EXPIRED)]


@pytest.mark.parametrize("cause", [Cause.ABORTED, Cause.NOT_NEEDED])
def test_a_cancel_before_the_pages_exist_frees_them_when_they_come(
    producer: Producer, cause: Cause
):
    producer.expect("t", 0.0)
    assert producer.cancel(ONE, "t", cause, 0.0) == [Reply(ONE, messages.Cancelled("t"))]
    assert producer.offer(grown(4), 1.0) == []
    assert producer.offer(OFFER, 1.0) == [Free("request", cause)]
    assert producer.transfers == 0


def test_a_second_cancel_neither_hides_the_first_ones_reason_nor_is_remembered_less_long(
    producer: Producer,
):
    """As vLLM does it: the request is announced again after its end, and aborted again."""
    producer.watch(ONE, "t", 0.0)
    producer.cancel(ONE, "t", Cause.ABORTED, 0.0)
    assert producer.watch(ONE, "t", 0.0) == [
        Reply(ONE, messages.Refuse("t", Cause.ABORTED, "it was cancelled before its prefill ended"))
    ]
    producer.cancel(ONE, "t", Cause.NOT_NEEDED, 0.0)
    later = CONFIG.wait_timeout_s - 1
    assert later > CONFIG.lease_s
    producer.tick(later)
    assert producer.offer(OFFER, later) == [Free("request", Cause.ABORTED)]


def test_cancelled_is_said_when_the_last_write_has_ended(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(slots=(0, 1)), ROUTES, 0.0)
    producer.next_send()
    producer.next_send()
    assert producer.cancel(ONE, "t", Cause.ABORTED, 0.0) == [Free("request", Cause.ABORTED)]
    assert producer.written(ONE, "t", True, "") == []
    assert producer.written(ONE, "t", False, "gone") == [Reply(ONE, messages.Cancelled("t"))]


def test_also_where_one_of_two_writes_has_failed_already(producer: Producer):
    producer.offer(OFFER, 0.0)
    message = opening(readers=2, slots=(0, 1))
    producer.open(ONE, message, routes_of(WHOLE, HALVES[0]), 0.0)
    assert producer.next_send() is not None
    assert producer.next_send() is not None
    refuse = Reply(ONE, messages.Refuse("t", Cause.TRANSPORT, "no route"))
    assert producer.written(ONE, "t", False, "no route") == [refuse]
    assert producer.cancel(ONE, "t", Cause.TRANSPORT, 0.0, 2) == [], "a write is under way"
    assert producer.written(ONE, "t", True, "") == [Reply(ONE, messages.Cancelled("t"))]


def test_a_session_that_is_lost_is_told_nothing_more(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(slots=(0,)), ROUTES, 0.0)
    producer.next_send()
    producer.cancel(ONE, "t", Cause.ABORTED, 0.0)
    assert producer.session_lost(ONE) == []
    assert producer.written(ONE, "t", False, "disconnected") == []


def test_a_failed_write_ends_its_transfer(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(slots=(0,)), ROUTES, 0.0)
    producer.next_send()
    refuse, free = producer.written(ONE, "t", False, "no route")
    assert refuse == Reply(ONE, messages.Refuse("t", Cause.TRANSPORT, "no route"))
    assert free == Free("request", Cause.TRANSPORT)


def test_an_opening_waits_for_an_expected_prefill_and_not_for_ever(producer: Producer):
    producer.expect("t", 0.0)
    assert producer.open(ONE, opening(wait=True), ROUTES, 0.0) == []
    assert producer.tick(CONFIG.wait_timeout_s - 1) == []
    assert refused(producer.tick(CONFIG.wait_timeout_s), Cause.WAIT_TIMEOUT)


def test_an_opening_that_waits_is_told_that_the_prefill_ended_early(producer: Producer):
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True), ROUTES, 0.0)
    assert refused(producer.withdraw("t", "request"), Cause.PREFILL_ENDED)
    assert producer.transfers == 0


def test_an_opening_that_comes_after_the_end_does_not_wait(producer: Producer):
    producer.expect("t", 0.0)
    producer.withdraw("t", "request")
    assert refused(producer.open(ONE, opening(wait=True), ROUTES, 0.0), Cause.PREFILL_ENDED)
    producer.expect("t", 0.0)  # the name is used again
    assert producer.open(ONE, opening(wait=True), ROUTES, 0.0) == []


# Offers that grow while the prefill runs.


def test_what_is_computed_is_sent_and_what_is_not_waits(producer: Producer):
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3)), ROUTES, 0.0)
    assert producer.offer(grown(0), 0.0) == [Reply(ONE, messages.Accept("t", 4, False))]
    assert sent(producer) == []
    assert producer.computed("t", "request", 5, None) == []
    assert sent(producer) == [], "the first chunk has six tokens"
    producer.computed("t", "request", 6, None)
    assert sent(producer) == [(0, 1, 0, 6), (1, 2, 0, 6)]
    assert producer.offer(grown(11), 0.0) == [], "accepted is said once"
    assert sent(producer) == []
    assert producer.offer(OFFER, 0.0) == [Reply(ONE, ACCEPT)], "and that it is complete"
    assert sent(producer) == [(0, 1, 6, 12), (1, 2, 6, 12)]
    assert producer.done(ONE, "t") == [Free("request", None)]


def test_within_a_step_the_layers_that_are_computed_are_sent(producer: Producer):
    producer.expect("t", 0.0)
    producer.offer(grown(6), 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3)), ROUTES, 0.0)
    assert sent(producer) == [(0, 1, 0, 6), (1, 2, 0, 6)]
    producer.computed("t", "request", 12, 0)
    assert sent(producer) == []
    producer.computed("t", "request", 12, 1)
    assert sent(producer) == [(0, 1, 6, 12)]
    producer.computed("t", "request", 12, 2)
    assert sent(producer) == [(1, 2, 6, 12)]


def test_a_chunk_is_early_while_its_prompt_is_being_computed(producer: Producer):
    producer.expect("t", 0.0)
    producer.offer(grown(6), 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3)), ROUTES, 0.0)
    producer.computed("t", "request", 12, 1)
    assert [send.early for send in iter(producer.next_send, None)] == [True] * 3
    producer.computed("t", "request", 12, None)
    assert [send.early for send in iter(producer.next_send, None)] == [False]


def test_what_is_computed_beyond_what_a_consumer_asked_for_makes_nothing_early(producer: Producer):
    producer.offer(grown(6), 0.0)
    producer.open(ONE, opening(stop=6, wait=True, slots=(0, 1)), ROUTES, 0.0)
    assert [send.early for send in iter(producer.next_send, None)] == [False] * 2


def test_layers_of_a_later_pipeline_stage_are_told_by_their_number_in_the_model():
    producer = Producer(CONFIG)
    producer.expect("t", 0.0)
    producer.offer(grown(0), 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1)), routes_of(STAGES[1], WHOLE), 0.0)
    producer.computed("t", "request", 12, 1)
    assert sent(producer) == [], "layer 0 is another rank's"
    producer.computed("t", "request", 12, 2)
    assert sent(producer) != []


@pytest.mark.parametrize(("overlap", "early"), [("auto", False), ("layer", True)])
def test_layers_are_sent_within_a_step_only_where_the_link_is_slow_enough_to_pay(
    overlap: Any, early: bool
):
    config = msgspec.structs.replace(CONFIG, overlap=overlap)
    token_bytes = 2 * 2 * 4
    slow, fast = (int(12 * token_bytes / (LAYERS_PAY_S * times)) for times in (2, 0.5))
    for rate, streams in ((slow, True), (fast, early)):
        producer = Producer(config)
        producer.expect("t", 0.0)
        producer.offer(grown(0), 0.0)
        message = opening(wait=True, slots=(0, 1, 2, 3), bytes_per_s=rate)
        producer.open(ONE, message, ROUTES, 0.0)
        producer.computed("t", "request", 12, 1)
        assert bool(sent(producer)) == streams


def test_done_before_the_last_offer_frees_at_once_when_it_comes(producer: Producer):
    producer.expect("t", 0.0)
    producer.offer(grown(12), 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3)), ROUTES, 0.0)
    assert len(sent(producer)) == 4
    assert producer.done(ONE, "t") == []
    assert producer.offer(OFFER, 0.0) == [Free("request", None)]
    assert producer.transfers == 0


def test_a_prefill_that_was_not_announced_is_expected_from_its_first_offer_on(producer: Producer):
    """Or the next tick would end the transfer, and what streams from it."""
    producer.offer(grown(6), 0.0)
    producer.open(ONE, opening(wait=True), ROUTES, 0.0)
    assert producer.tick(CONFIG.lease_s + 1) == []
    assert producer.offer(OFFER, CONFIG.lease_s + 2) == [Reply(ONE, ACCEPT)]


def test_a_prefill_that_never_ends_is_not_waited_for_for_ever(producer: Producer):
    producer.offer(grown(6), 0.0)
    assert producer.tick(CONFIG.wait_timeout_s - 1) == []
    producer.tick(CONFIG.wait_timeout_s)
    assert producer.transfers == 0


def test_a_prefill_whose_reader_is_lost_frees_its_pages_at_its_end(producer: Producer):
    producer.expect("t", 0.0)
    producer.offer(grown(4), 0.0)
    producer.open(ONE, opening(wait=True), ROUTES, 0.0)
    assert producer.session_lost(ONE) == []
    assert producer.offer(OFFER, 1.0) == [Free("request", Cause.SESSION_LOST)]
    assert producer.transfers == 0


def test_revoked_pages_are_not_sent_and_new_ones_are(producer: Producer):
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3)), ROUTES, 0.0)
    producer.offer(grown(12), 0.0)
    first = producer.next_send()
    producer.revoke("t", "request")
    assert sent(producer) == []
    producer.computed("t", "request", 12, None)
    assert sent(producer) == [], "what was queued before is of the old pages"
    again = [20, 21, 22, 23, 24, 25]
    producer.offer(grown(0)._replace(pages=(again,)), 0.0)
    assert sent(producer) == []
    producer.offer(OFFER._replace(pages=(again,)), 0.0)
    sends = list(iter(producer.next_send, None))
    assert first is not None
    assert list(first.pages) == PAGES[:3]
    assert [list(send.pages) for send in sends] == [again[:3], again[3:], again[3:]]
    assert producer.done(ONE, "t") == [Free("request", None)]


def streaming_late(*, late_revokes: bool = True, **fields: Any) -> Producer:
    """All is computed, the prefill has not ended, and what was computed may still be taken back: its engine revokes
    late, or has an adapter that may be replaced."""
    producer = Producer(CONFIG, late_revokes=late_revokes)
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3), **fields), ROUTES, 0.0)
    provisional = messages.Accept("t", 4, False, provisional=True)
    offer = grown(12)._replace(provisional=not late_revokes)
    assert producer.offer(offer, 0.0) == [Reply(ONE, provisional)]
    return producer


@pytest.mark.parametrize(("step", "doubtful"), [(3, False), (4, True), (5, True)])
def test_a_reader_of_pages_that_may_have_been_overwritten_is_refused(step: int, doubtful: bool):
    producer = streaming_late(provisional=True)
    send = producer.next_send()
    assert send is not None
    producer.gathered(send, step)
    actions = producer.revoke("t", "request", 4)
    assert refused(actions, Cause.PREEMPTED) if doubtful else actions == []
    freed = [] if not doubtful else [Free("request", Cause.PREEMPTED)]
    assert [a for a in producer.offer(OFFER, 0.0) if isinstance(a, Free)] == freed
    producer.check_integrity()


@pytest.mark.parametrize("late_revokes", [True, False])
def test_a_consumer_that_cannot_wait_is_sent_nothing_that_may_be_retracted(late_revokes: bool):
    producer = streaming_late(late_revokes=late_revokes)
    assert sent(producer) == []
    assert producer.offer(OFFER, 0.0) == [Reply(ONE, ACCEPT)]
    assert len(sent(producer)) == 4


def test_what_was_about_to_be_sent_when_the_gate_was_shut_is_sent_later(producer: Producer):
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True, slots=(3, 1)), ROUTES, 0.0)
    producer.offer(grown(12), 0.0)
    send = producer.next_send()
    assert send is not None
    producer.unsend(send)
    assert producer.next_send() is None, "or who sends all there is would never end"
    producer.revoke("t", "request")
    producer.offer(OFFER, 0.0)
    again = producer.next_send()
    assert again == send
    assert producer.written(ONE, "t", True, "") == []
    assert producer.cancel(ONE, "t", Cause.ABORTED, 0.0)[-1] == Reply(ONE, messages.Cancelled("t"))


def test_a_withdrawal_in_the_middle_refuses_what_streams(producer: Producer):
    producer.expect("t", 0.0)
    producer.offer(grown(6), 0.0)
    producer.open(ONE, opening(wait=True, slots=(0,)), ROUTES, 0.0)
    producer.next_send()
    assert refused(producer.withdraw("t", "request"), Cause.PREFILL_ENDED)
    assert producer.transfers == 0
    assert producer.cancel(ONE, "t", Cause.PREFILL_ENDED, 0.0) == [], "a write is under way"
    assert producer.written(ONE, "t", True, "") == [Reply(ONE, messages.Cancelled("t"))]


def test_a_request_with_the_transfer_of_another_changes_nothing(producer: Producer):
    """Or its progress would be taken for that of the other, whose pages hold no KV yet."""
    producer.expect("t", 0.0)
    producer.open(ONE, opening(wait=True, slots=(0, 1, 2, 3)), ROUTES, 0.0)
    producer.offer(grown(0), 0.0)
    assert producer.offer(grown(12)._replace(request="another"), 0.0) == []
    producer.computed("t", "another", 12, None)
    producer.computed("t", "another", 12, 2)
    assert sent(producer) == []
    producer.revoke("t", "another")
    assert producer.withdraw("t", "another") == []
    assert producer.offer(OFFER, 0.0) == [Reply(ONE, ACCEPT)]


# Several ranks of a consumer.


def opened_by_both(producer: Producer) -> None:
    for session, shard in ((ONE, HALVES[0]), (TWO, HALVES[1])):
        message = opening(readers=2, slots=(0, 1))
        (reply,) = producer.open(session, message, routes_of(WHOLE, shard), 0.0)
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, messages.Accept)


def test_pages_are_kept_until_every_reader_is_done(producer: Producer):
    producer.offer(OFFER, 0.0)
    opened_by_both(producer)
    assert producer.done(ONE, "t") == []
    assert producer.done(ONE, "t") == [], "saying it twice is not two"
    assert producer.leased_pages == 6
    assert producer.done(TWO, "t") == [Free("request", None)]


def test_a_third_reader_of_two_is_refused_also_when_the_others_are_done(producer: Producer):
    producer.offer(OFFER, 0.0)
    opened_by_both(producer)
    third = b"session three"
    assert refused(producer.open(third, opening(readers=2), ROUTES, 0.0), Cause.DUPLICATE)
    producer.done(ONE, "t")
    assert refused(producer.open(third, opening(readers=2), ROUTES, 0.0), Cause.DUPLICATE)
    assert refused(producer.open(ONE, opening(readers=2), ROUTES, 0.0), Cause.DUPLICATE)


@pytest.mark.parametrize("lost", [False, True])
def test_when_one_reader_ends_badly_the_other_gets_everything(producer: Producer, lost: bool):
    producer.offer(OFFER, 0.0)
    opened_by_both(producer)
    cause = Cause.SESSION_LOST if lost else Cause.ABORTED
    if lost:
        assert producer.session_lost(ONE) == []
    else:
        assert producer.cancel(ONE, "t", cause, 0.0, 2) == [Reply(ONE, messages.Cancelled("t"))]
    assert {send.session for send in iter(producer.next_send, None)} == {TWO}
    assert producer.done(TWO, "t") == [Free("request", cause)], "not delivered to all"


def test_a_reader_that_never_comes_costs_a_lease(producer: Producer):
    producer.offer(OFFER, 0.0)
    producer.open(ONE, opening(readers=2), ROUTES, 0.0)
    assert producer.done(ONE, "t") == []
    assert producer.tick(CONFIG.lease_s) == [Free("request", Cause.LEASE_EXPIRED)]


def test_when_all_readers_cancel_before_the_pages_exist_these_are_freed_when_they_come(
    producer: Producer,
):
    producer.expect("t", 0.0)
    assert producer.cancel(ONE, "t", Cause.ABORTED, 0.0, 2) == [Reply(ONE, messages.Cancelled("t"))]
    assert producer.transfers == 1
    assert producer.cancel(TWO, "t", Cause.ABORTED, 0.0, 2) == [Reply(TWO, messages.Cancelled("t"))]
    assert producer.transfers == 0
    assert producer.offer(OFFER, 1.0) == [Free("request", Cause.ABORTED)]


def test_one_reader_cancels_before_the_pages_exist_and_the_other_gets_them(producer: Producer):
    producer.cancel(ONE, "t", Cause.ABORTED, 0.0, 2)
    producer.offer(OFFER, 1.0)
    message = opening(readers=2, slots=(0, 1))
    assert producer.open(TWO, message, routes_of(WHOLE, HALVES[1]), 1.0) != []
    assert sent(producer) != []
    assert producer.done(TWO, "t") == [Free("request", Cause.ABORTED)]


# Those that want to hear when there is something to open.


def test_a_watcher_is_told_when_the_prefill_begins(producer: Producer):
    ready = Reply(ONE, messages.Ready("t"))
    producer.expect("t", 0.0)
    assert producer.watch(ONE, "t", 0.0) == []
    assert producer.offer(grown(0), 0.0) == [ready]
    assert producer.offer(OFFER, 0.0) == [], "and once"
    assert producer.watch(ONE, "t", 0.0) == [ready], "unless it asks again"


def test_a_watcher_of_a_preempted_prefill_waits_until_it_goes_on(producer: Producer):
    producer.expect("t", 0.0)
    producer.offer(grown(6), 0.0)
    producer.revoke("t", "request")
    assert producer.watch(ONE, "t", 0.0) == []
    assert producer.offer(grown(0), 0.0) == [Reply(ONE, messages.Ready("t"))]


def test_a_watcher_is_refused_when_nothing_comes(producer: Producer):
    producer.expect("t", 0.0)
    producer.watch(ONE, "t", 0.0)
    assert refused(producer.withdraw("t", "request"), Cause.PREFILL_ENDED)
    assert refused(producer.watch(ONE, "t", 0.0), Cause.PREFILL_ENDED), "it came too late"
    assert producer.watch(ONE, "u", 0.0) == []
    assert refused(producer.tick(CONFIG.lease_s), Cause.UNKNOWN_TRANSFER)


def test_who_asks_after_an_unexpected_error_is_told_of_it(producer: Producer):
    producer.offer(OFFER, 0.0)
    assert producer.give_up("t", "a defect") == [Free("request", Cause.INTERNAL)]
    assert refused(producer.open(ONE, opening(), ROUTES, 0.0), Cause.INTERNAL)
    assert refused(producer.watch(ONE, "t", 0.0), Cause.INTERNAL)


def test_a_watcher_that_is_lost_is_forgotten(producer: Producer):
    producer.expect("t", 0.0)
    producer.watch(ONE, "t", 0.0)
    assert producer.session_lost(ONE) == []
    assert producer.offer(OFFER, 0.0) == []


def test_pages_that_a_window_has_passed_are_not_kept(producer: Producer):
    gone = [-1, -1, *PAGES[2:]]
    producer.offer(OFFER._replace(pages=(gone,)), 0.0)
    producer.open(ONE, opening(slots=(0, 1, 2, 3)), ROUTES, 0.0)
    assert [send.kept for send in iter(producer.next_send, None)] == [False, False, True, True]
    refuse, free = producer.fail(ONE, "t", Cause.WINDOW, "")
    assert refuse == Reply(ONE, messages.Refuse("t", Cause.WINDOW, ""))
    assert free == Free("request", Cause.WINDOW)
