# SPDX-License-Identifier: Apache-2.0
"""Producer and consumers coupled, under every order of events that hypothesis can think of.

`support.machines.World` asserts at each step: one `Free` an offer, one `Finished` a load, no page
touched that belongs to another load, and exact bytes in every page that counts as received.
"""

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.machines import CONFIG, FALSE_FIELDS, Flight, Link, World, identity_of

from pd_connector import wire
from pd_connector.errors import Cause

NAMES = [f"transfer{i}" for i in range(4)]
names = st.sampled_from(NAMES)
which = st.integers(0, 11)
MESSAGES_TO_PRODUCER = ("done", "cancel", "credit", "open", "range", "beat")
MESSAGES_TO_CONSUMER = ("accept", "refuse", "cancelled")


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
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOneSidedInterleavings = Interleavings.TestCase
TestOneSidedInterleavings.settings = _settings
TestTwoSidedInterleavings = TwoSidedInterleavings.TestCase
TestTwoSidedInterleavings.settings = _settings
