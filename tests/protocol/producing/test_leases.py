# SPDX-License-Identifier: Apache-2.0
"""Consumers that do not come for their KV cannot hold a producer's cache, and two engines that wait
for each other's room do not wait for ever."""

from dataclasses import dataclass, field

import msgspec
import pytest
from support.machines import CONFIG, ROUTES, identity_of

from pd_connector.errors import Cause
from pd_connector.protocol.producing.outgoing import Action, Free, Offer, Reply
from pd_connector.protocol.producing.outgoing_transfer import OutgoingTransfer
from pd_connector.protocol.producing.producer import STARVED_S, Producer
from pd_connector.protocol.wire import messages

HALF = msgspec.structs.replace(CONFIG, lease_share=0.5)
ONE, TWO = b"one", b"two"


def offer(transfer: str, pages: int) -> Offer:
    tokens = 2 * pages
    table = (list(range(pages)),)
    return Offer(
        transfer, f"request {transfer}", table, identity_of(transfer), tokens, tokens, True
    )


def opening(transfer: str, pages: int, slots: tuple[int, ...] = (0,)) -> messages.Open:
    identity, slot_bytes = identity_of(transfer), CONFIG.slot_bytes
    return messages.Open(transfer, identity, 0, 2 * pages, False, list(slots), slot_bytes)


def freed(actions: list[Action]) -> list[tuple[str, Cause | None]]:
    return [(a.request, a.cause) for a in actions if isinstance(a, Free)]


def test_the_oldest_that_wait_lose_their_leases_when_too_much_is_leased():
    producer = Producer(HALF, pages=20)
    for transfer in "abc":
        assert freed(producer.offer(offer(transfer, 3), 0.0)) == []
    assert freed(producer.offer(offer("d", 6), 0.0)) == [
        ("request a", Cause.LEASE_EVICTED),
        ("request b", Cause.LEASE_EVICTED),
    ]
    assert producer.leased_pages == 9
    producer.check_integrity()


def test_what_is_audited_keeps_its_lease_and_of_each_consumer_one_transfer():
    """A prompt that is computed on both sides is fetched only when the other side has computed it."""
    producer = Producer(HALF, pages=20)
    producer.watch(ONE, "b", 0.0, keep=True)  # before its prefill
    for transfer in "abc":
        producer.offer(offer(transfer, 3), 0.0)
    producer.watch(ONE, "a", 0.0, keep=True)
    assert freed(producer.offer(offer("d", 3), 0.0)) == [("request b", Cause.LEASE_EVICTED)]
    producer.session_lost(ONE)
    assert freed(producer.offer(offer("e", 3), 0.0)) == [("request a", Cause.LEASE_EVICTED)]
    producer.check_integrity()


def test_without_a_limit_nobody_loses_a_lease():
    for producer in (Producer(HALF), Producer(CONFIG, pages=5)):
        assert freed([a for t in "abcd" for a in producer.offer(offer(t, 1), 0.0)]) == []
    producer = Producer(HALF)
    assert freed([a for t in "abcd" for a in producer.offer(offer(t, 50), 0.0)]) == []


def test_who_has_begun_to_fetch_keeps_the_lease_and_who_is_larger_than_the_share_gets_one():
    producer = Producer(HALF, pages=8)
    assert freed(producer.offer(offer("whole", 8), 0.0)) == []
    producer.open(ONE, opening("whole", 8), ROUTES, 0.0)
    assert freed(producer.offer(offer("next", 1), 0.0)) == []
    assert freed(producer.offer(offer("after", 1), 0.0)) == [("request next", Cause.LEASE_EVICTED)]


def test_who_comes_too_late_is_told_why():
    producer = Producer(HALF, pages=4)
    producer.offer(offer("a", 2), 0.0)
    producer.watch(TWO, "a", 0.0)
    producer.offer(offer("b", 2), 0.0)
    (reply,) = producer.open(ONE, opening("a", 2), ROUTES, 1.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, messages.Refuse)
    assert reply.message.cause == Cause.LEASE_EVICTED


def test_a_lease_without_room_ends_where_a_consumer_has_pages_for_what_finds_none_here():
    """The consumer asks for a prompt again, and keeps its pages meanwhile: the lease waits for these pages."""
    producer = Producer(HALF, pages=20)
    for transfer in "ab":
        producer.offer(offer(transfer, 5), 0.0)
    producer.expect("again", 1.0)
    producer.open(ONE, msgspec.structs.replace(opening("again", 5), wait=True), ROUTES, 1.0)
    before = [freed(producer.tick(0.9 * STARVED_S)) for _ in range(2)]
    assert before == [[], []], "the consumer may have room soon"
    assert freed(producer.tick(STARVED_S)) == [("request a", Cause.LEASE_EVICTED)]
    assert freed(producer.tick(1.5 * STARVED_S)) == [], "one at a time"
    producer.offer(offer("again", 5), 1.9 * STARVED_S)
    assert freed(producer.tick(2.5 * STARVED_S)) == [], "it computes"
    producer.check_integrity()


def test_while_nobody_has_pages_for_more_a_lease_waits():
    producer = Producer(HALF, pages=20)
    producer.offer(offer("a", 10), 0.0)
    producer.expect("next", 0.0)
    producer.watch(ONE, "next", 0.0)
    assert freed(producer.tick(2 * STARVED_S)) == []


@dataclass
class Engine:
    """An engine with a cache: it leases what it has computed, and needs pages for what it fetches."""

    pages: int
    producer: Producer = field(init=False)
    held: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = msgspec.structs.replace(CONFIG, lease_share=1.0)
        self.producer = Producer(config, pages=self.pages)

    def compute(self, transfer: str, pages: int) -> None:
        self.held[f"request {transfer}"] = pages
        self.take(self.producer.offer(offer(transfer, pages), 0.0))

    def take(self, actions: list[Action]) -> None:
        for request, _ in freed(actions):
            self.held.pop(request)

    @property
    def free(self) -> int:
        return self.pages - sum(self.held.values())


def circular_wait(until: float) -> list[float]:
    """Two engines prefill for each other. Each cache is full of what the other one has no room
    for, so it only says that it still wants it. Returns when each had room."""
    one, two = Engine(10), Engine(10)
    one.compute("for two", 8)
    two.compute("for one", 8)
    room: list[float] = []
    now = 0.0
    while now < until and len(room) < 2:
        now += CONFIG.heartbeat_s
        for engine, other, wanted in ((one, two, "for one"), (two, one, "for two")):
            if engine.free >= 8:
                room.append(now)
            else:
                other.producer.heartbeat([wanted], now)
        for engine in (one, two):
            engine.take(engine.producer.tick(now))
    return room


def test_two_full_caches_that_wait_for_each_other_end_at_a_deadline():
    room = circular_wait(10 * CONFIG.wait_timeout_s)
    assert len(room) == 2
    assert max(room) <= CONFIG.wait_timeout_s + 2 * CONFIG.heartbeat_s


def test_without_that_deadline_they_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    def extend(self: OutgoingTransfer, until: float, lease_ends: float) -> None:
        self.expires = max(self.expires, until)

    monkeypatch.setattr(OutgoingTransfer, "extend", extend)
    assert circular_wait(10 * CONFIG.wait_timeout_s) == []


def test_who_opens_transfers_and_has_no_room_for_them_is_no_better_than_who_waits():
    producer = Producer(HALF, pages=12)
    for number in range(3):
        assert freed(producer.offer(offer(f"{number}", 2), 0.0)) == []
        producer.open(ONE, opening(f"{number}", 2, slots=()), ROUTES, 0.0)
    assert freed(producer.offer(offer("new", 2), 0.0)) == [("request 0", Cause.LEASE_EVICTED)]
    producer.check_integrity()


def speak(producer: Producer, *, slot_every_s: float, until: float) -> float:
    """A consumer says that it wants the transfer, and grants a slot now and then. Returns when the
    lease ended."""
    now, granted = 0.0, 0.0
    while now < until:
        now += CONFIG.heartbeat_s
        if now - granted >= slot_every_s:
            granted = now
            producer.credit(ONE, "a", [0])
        if send := producer.next_send():
            producer.written(send.session, send.transfer, True, "")
        producer.heartbeat(["a"], now)
        if freed(producer.tick(now)):
            return now
    return now


def test_a_lease_that_is_being_fetched_lasts_as_long_as_chunks_of_it_move():
    producer, wait_s = Producer(CONFIG), CONFIG.wait_timeout_s
    producer.offer(offer("a", 16), 0.0)
    (accepted,) = producer.open(ONE, opening("a", 16, slots=()), ROUTES, 0.0)
    assert isinstance(accepted, Reply)
    assert isinstance(accepted.message, messages.Accept)
    assert accepted.message.chunks > 4
    assert speak(producer, slot_every_s=0.9 * wait_s, until=3 * wait_s) >= 3 * wait_s


def test_a_lease_of_which_nothing_moves_ends_although_its_consumer_has_opened_it_and_speaks():
    producer, wait_s = Producer(CONFIG), CONFIG.wait_timeout_s
    producer.offer(offer("a", 2), 0.0)
    producer.open(ONE, opening("a", 2, slots=()), ROUTES, 0.0)
    ended = speak(producer, slot_every_s=float("inf"), until=3 * wait_s)
    assert ended <= wait_s + 2 * CONFIG.heartbeat_s
    producer.check_integrity()
