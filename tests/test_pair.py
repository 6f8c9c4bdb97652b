# SPDX-License-Identifier: Apache-2.0
"""Producer and consumers coupled, under every order of events that hypothesis can think of.

`support.machines.World` asserts at each step: one `Free` an offer, one `Finished` a load, no page
touched that belongs to another load, and exact bytes in every page that counts as received.
"""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.machines import CONFIG, Flight, Link, World, identity_of

from pd_connector import wire
from pd_connector.errors import Cause
from pd_connector.slab import SlotPool

NAMES = [f"transfer{i}" for i in range(4)]
names = st.sampled_from(NAMES)
which = st.integers(0, 11)
MESSAGES_TO_PRODUCER = ("done", "cancel", "credit", "open", "range", "beat")
MESSAGES_TO_CONSUMER = ("accept", "refuse", "cancelled")
FALSE_FIELDS = {
    "transfer": "transfer9",
    "epoch": 77,
    "sequence": 900,
    "identity": b"other tokens",
    "first_layer": 1,
    "stop_layer": 7,
    "first_page": 5,
    "stop_page": 2**40,
    "codec": "int8",
    "nbytes": 2**40,
    "checksum": b"",
}


class Interleavings(RuleBasedStateMachine):
    """Two consumers, one producer, three slots a consumer, faults and lies at any moment."""

    one_sided = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(consumers=2, one_sided=self.one_sided)

    def link(self, i: int) -> Link:
        return self.world.links[i % 2]

    def flight(self, i: int) -> Flight:
        return self.world.flights[i % len(self.world.flights)]

    @rule(transfer=names, pages=st.integers(1, 10), announced=st.booleans())
    def prefill(self, transfer: str, pages: int, announced: bool) -> None:
        if announced:
            self.world.producer.expect(transfer, self.world.now)
        self.world.prefill(transfer, pages)

    @rule(transfer=names)
    def withdraw(self, transfer: str) -> None:
        self.world.produce(self.world.producer.withdraw(transfer))

    @rule(
        i=which,
        transfer=names,
        pages=st.integers(1, 10),
        first=st.integers(0, 3),
        wait=st.booleans(),
    )
    def load(self, i: int, transfer: str, pages: int, first: int, wait: bool) -> None:
        self.world.load(self.link(i), transfer, pages, first_page=first, wait=wait)

    @rule(i=which, transfer=names)
    def load_other_tokens(self, i: int, transfer: str) -> None:
        self.world.load(self.link(i), transfer, 3, identity=b"other tokens")

    @rule(i=which, transfer=names, then_load=st.booleans())
    def hold(self, i: int, transfer: str, then_load: bool) -> None:
        link, request = self.link(i), f"held{self.world.number()}"
        self.world.consume(link, link.consumer.hold(request, transfer, link.source))
        if then_load:
            self.world.load(link, transfer, 5, request=request)

    @rule(i=which, j=which)
    def drop(self, i: int, j: int) -> None:
        link = self.link(i)
        loading = [request for request, lent in link.lent.items() if not lent.arrived]
        if loading:
            self.world.drop(link, loading[j % len(loading)])

    @rule(i=which)
    def retire(self, i: int) -> None:
        link = self.link(i)
        for request in [r for r, lent in link.lent.items() if lent.arrived][:1]:
            self.world.retire(link, request)

    @rule(i=which, fails=st.sampled_from([False, False, False, True]))
    def connect(self, i: int, fails: bool) -> None:
        if self.link(i).dialling:
            self.world.connect(self.link(i), Cause.UNREACHABLE if fails else None)

    @rule(i=which, messages=st.integers(1, 6))
    def hear(self, i: int, messages: int) -> None:
        for _ in range(messages):
            self.world.hear(self.link(i))

    @rule(i=which, messages=st.integers(1, 6))
    def listen(self, i: int, messages: int) -> None:
        for _ in range(messages):
            self.world.listen(self.link(i))

    @rule(chunks=st.integers(1, 4))
    def send(self, chunks: int) -> None:
        for _ in range(chunks):
            self.world.send()

    @precondition(lambda self: self.world.flights)
    @rule(i=which, again=st.sampled_from([False, False, True]))
    def land(self, i: int, again: bool) -> None:
        flight = self.flight(i)
        self.world.land(flight)
        if not again:
            self.world.flights.remove(flight)

    @precondition(lambda self: self.world.flights)
    @rule(i=which, field=st.sampled_from([None, *FALSE_FIELDS]))
    def land_a_lie(self, i: int, field: str | None) -> None:
        flight = self.flight(i)
        if field is None:
            flight.payload = bytes(len(flight.payload))
        else:
            flight.header = msgspec.structs.replace(flight.header, **{field: FALSE_FIELDS[field]})
        self.world.land(flight)

    @precondition(lambda self: self.world.flights)
    @rule(i=which, slot=st.integers(0, 4))
    def land_in_another_slot(self, i: int, slot: int) -> None:
        flight = self.flight(i)
        flight.slot = slot
        self.world.land(flight)

    @precondition(lambda self: self.world.flights)
    @rule(i=which)
    def lose_a_chunk(self, i: int) -> None:
        self.world.flights.remove(self.flight(i))

    @precondition(lambda self: self.world.writes)
    @rule(i=which, ok=st.sampled_from([True, True, True, False]))
    def end_a_write(self, i: int, ok: bool) -> None:
        self.world.end_write(self.world.writes[i % len(self.world.writes)], ok)

    @rule(i=which, noticed=st.booleans())
    def break_session(self, i: int, noticed: bool) -> None:
        self.world.break_session(self.link(i), noticed)

    @rule()
    def restart_producer(self) -> None:
        self.world.restart_producer()

    @rule(i=which, to_producer=st.booleans(), twice=st.booleans())
    def garble(self, i: int, to_producer: bool, twice: bool) -> None:
        """A control message is lost, or comes twice."""
        queue = self.link(i).to_producer if to_producer else self.link(i).to_consumer
        if queue and twice:
            queue.appendleft(queue[0])
        elif queue:
            queue.popleft()

    @rule(i=which, transfer=names, lie=st.sampled_from(MESSAGES_TO_PRODUCER))
    def lie_to_producer(self, i: int, transfer: str, lie: str) -> None:
        link = self.link(i)
        identity = identity_of(transfer)
        message: wire.ConsumerMessage = {
            "done": wire.Done(transfer),
            "cancel": wire.Cancel(transfer, Cause.ABORTED),
            "credit": wire.Credit(transfer, [0, 1, 2, 2**40]),
            "open": wire.Open(transfer, identity, 0, 3, True, ["raw"], [0, 0, 9]),
            "range": wire.Open(transfer, identity, 4, 2**62, False, ["none"], []),
            "beat": wire.Heartbeat([*NAMES, "transfer9"]),
        }[lie]
        if link.session is not None:
            link.to_producer.append(message)

    @rule(i=which, transfer=names, lie=st.sampled_from(MESSAGES_TO_CONSUMER))
    def lie_to_consumer(self, i: int, transfer: str, lie: str) -> None:
        link = self.link(i)
        message: wire.ProducerMessage = {
            "accept": wire.Accept(transfer, "raw", 2),
            "refuse": wire.Refuse(transfer, "no such cause", ""),
            "cancelled": wire.Cancelled(transfer),
        }[lie]
        if link.session is not None:
            link.to_consumer.append(message)

    @rule(i=which)
    def beat(self, i: int) -> None:
        self.world.beat(self.link(i))

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 40.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def run_fairly(self) -> None:
        self.world.run()

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        for link in self.world.links:
            assert link.pool.free + link.pool.held == CONFIG.slots
        offered = sum(len(offer.pages) for offer in self.world.offers.values())
        assert self.world.producer.leased_pages == offered

    def teardown(self) -> None:
        self.world.settle()


class TwoSidedInterleavings(Interleavings):
    one_sided = False


_settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOneSidedInterleavings = Interleavings.TestCase
TestOneSidedInterleavings.settings = _settings
TestTwoSidedInterleavings = TwoSidedInterleavings.TestCase
TestTwoSidedInterleavings.settings = _settings


@given(seed=st.integers(0, 2**32), one_sided=st.booleans())
@settings(max_examples=60, deadline=None)
def test_without_faults_every_load_arrives_in_any_order_of_events(seed: int, one_sided: bool):
    chance = random.Random(seed)
    world = World(consumers=2, one_sided=one_sided)
    transfers = [f"transfer{i}" for i in range(6)]
    asked: list[tuple[Link, str]] = []
    late = [name for name in transfers if chance.random() < 0.5]
    sizes = {name: chance.randint(1, 10) for name in transfers}
    for name in transfers:
        if name not in late:
            world.prefill(name, sizes[name])
        link = chance.choice(world.links)
        first = chance.randrange(sizes[name])
        wait = name in late
        asked.append(
            (link, world.load(link, name, sizes[name] - first, first_page=first, wait=wait))
        )
    while not all(request in link.finished for link, request in asked):
        link = chance.choice(world.links)
        step = chance.randrange(7)
        if step == 0 and late:
            world.prefill(late[-1], sizes[late.pop()])
        elif step == 1 and link.dialling:
            world.connect(link)
        elif step == 2:
            world.hear(link)
        elif step == 3:
            world.listen(link)
        elif step == 4:
            world.send()
        elif step == 5 and world.flights:
            world.land(world.flights.pop(chance.randrange(len(world.flights))))
        elif world.writes:
            world.end_write(chance.choice(world.writes))
    assert [link.finished[request].cause for link, request in asked] == [None] * len(asked)
    world.run()
    assert set(world.freed.values()) == {None}
    world.settle()


def opened(one_sided: bool = True, pages: int = 10) -> tuple[World, Link, str]:
    """A transfer that streams: its first chunks are in flight."""
    world = World(one_sided=one_sided)
    link = world.links[0]
    world.prefill("transfer0", pages)
    request = world.load(link, "transfer0", pages)
    world.connect(link)
    world.hear(link)
    world.listen(link)
    while world.send():
        pass
    return world, link, request


@pytest.mark.parametrize("field", FALSE_FIELDS)
def test_a_chunk_with_one_false_field_is_never_counted(field: str):
    world, link, request = opened(one_sided=False)
    flight = world.flights[0]
    flight.header = msgspec.structs.replace(flight.header, **{field: FALSE_FIELDS[field]})
    world.run()
    assert link.received == []
    world.settle()
    assert link.finished[request].cause in (Cause.CHUNK_MISMATCH, Cause.CHECKSUM, Cause.STALLED)


def test_without_the_comparison_of_headers_other_tokens_would_be_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    world, link, _ = opened(pages=2)
    flight = world.flights[0]
    flight.header = msgspec.structs.replace(flight.header, identity=b"other tokens")
    monkeypatch.setattr(wire.ChunkHeader, "__ne__", lambda self, other: False)
    world.land(flight)
    assert len(link.received) == 1


def test_a_corrupt_chunk_fails_its_load_and_without_the_checksum_it_would_not():
    world, link, request = opened(pages=2)
    world.flights[0].payload = bytes(len(world.flights[0].payload))
    world.land(world.flights[0])
    assert link.finished[request].cause == Cause.CHECKSUM

    world, link, request = opened(pages=2)
    world.flights[0].payload = bytes(len(world.flights[0].payload))
    world.verifies = False
    with pytest.raises(AssertionError, match="wrong KV"):
        world.land(world.flights[0])


def test_a_producer_checks_whose_tokens_are_asked_for_and_without_that_sends_wrong_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    world = World()
    link = world.links[0]
    world.prefill("transfer0", 2)
    request = world.load(link, "transfer0", 2, identity=b"other tokens")
    world.run()
    assert link.finished[request].cause == Cause.TOKENS
    assert world.flights == []

    world = World()
    link = world.links[0]
    world.prefill("transfer0", 2)
    world.load(link, "transfer0", 2, identity=b"other tokens")
    world.connect(link)
    monkeypatch.setattr(world.producer, "_start", blind(world))
    world.hear(link)
    assert world.send() is not None, "pages of other tokens leave the producer"


def blind(world: World):
    """A producer's `_start` that takes the consumer's word for whose tokens the pages are."""
    start = type(world.producer)._start

    def started(transfer, outgoing):
        outgoing.opening.message = msgspec.structs.replace(
            outgoing.opening.message, identity=outgoing.offer.identity
        )
        return start(world.producer, transfer, outgoing)

    return started


def test_a_chunk_in_a_slot_of_another_transfer_is_dropped_and_without_that_breaks_the_books(
    monkeypatch: pytest.MonkeyPatch,
):
    world, link, _ = opened(one_sided=False, pages=4)
    world.prefill("transfer1", 4)
    world.load(link, "transfer1", 4)
    world.hear(link)
    world.listen(link)
    foreign = next(i for i in range(CONFIG.slots) if link.pool.holds("transfer1", i))
    flight = world.flights[0]
    flight.slot = foreign
    world.land(flight)
    assert link.pool.holds("transfer1", foreign)
    assert link.received == []

    monkeypatch.setattr(SlotPool, "holds", lambda self, owner, slot: True)
    with pytest.raises(ValueError, match="not in list"):
        world.land(flight)


def test_a_late_write_cannot_reach_a_reused_page():
    world, link, request = opened()
    late = list(world.flights)
    world.drop(link, request)
    world.flights.clear()
    world.run()
    world.prefill("transfer1", 10)
    again = world.load(link, "transfer1", 10)
    world.run()
    for flight in late:
        world.land(flight)
    assert link.received == [again]
    world.retire(link, again)


def test_a_slot_is_not_lent_again_before_its_writer_has_stopped():
    world, link, request = opened()
    world.drop(link, request)
    world.hear(link)
    assert link.pool.free == 0, "writes are under way: Cancelled has not come"
    while world.writes:
        world.end_write(world.writes[0])
    world.listen(link)
    assert link.pool.free == CONFIG.slots


def test_slots_of_a_producer_that_vanished_come_home_when_no_write_can_be_under_way():
    world, link, _ = opened(one_sided=True)
    world.break_session(link, noticed=True)
    assert link.pool.free == 0
    world.pass_time(CONFIG.lease_s)
    assert link.pool.free == CONFIG.slots

    world, link, _ = opened(one_sided=False)
    world.break_session(link, noticed=True)
    assert link.pool.free == CONFIG.slots, "nobody but us writes into them"


def test_who_asks_with_other_tokens_does_not_cost_the_true_consumer_its_pages():
    world = World(consumers=2)
    true, other = world.links
    world.prefill("transfer0", 5)
    refused = world.load(other, "transfer0", 5, identity=b"other tokens")
    world.run()
    assert other.finished[refused].cause == Cause.TOKENS
    request = world.load(true, "transfer0", 5)
    world.run()
    assert true.received == [request]
    world.settle()


def test_a_transfer_is_not_loaded_again_before_its_last_end_is_confirmed():
    """Or the confirmation of the first end would free slots that the second load's writer has."""
    world, link, first = opened()
    world.drop(link, first)
    early = world.load(link, "transfer0", 10)
    assert link.finished[early].cause == Cause.DUPLICATE
    world.run()
    world.prefill("transfer0", 10)
    later = world.load(link, "transfer0", 10)
    world.run()
    assert link.received == [later]
    world.settle()


def test_an_opening_while_the_last_one_ends_is_refused_and_leaves_nothing_behind():
    world, link, _ = opened()
    assert link.session is not None
    writes = list(world.writes)
    again = wire.Open("transfer0", identity_of("transfer0"), 0, 3, True, ["raw"], [])
    link.to_producer.clear()
    link.to_producer.extend([wire.Done("transfer0"), again])
    world.hear(link)
    world.hear(link)
    for write in writes:
        world.end_write(write)
    world.settle()
