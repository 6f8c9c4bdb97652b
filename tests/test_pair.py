# SPDX-License-Identifier: Apache-2.0
"""Producer and consumers coupled without sockets: each guard, and the harm when it is off.

Random orders, faults and lies in combination: test_pair_interleavings.py.
"""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines import CONFIG, FALSE_FIELDS, Link, World, identity_of

from pd_connector import wire
from pd_connector.errors import Cause
from pd_connector.slab import SlotPool


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
    for _ in range(100_000):
        if all(request in link.finished for link, request in asked):
            break
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


@pytest.mark.parametrize(("one_sided", "free"), [(True, 0), (False, CONFIG.slots)])
def test_slots_of_a_cancelled_load_stay_away_while_a_lost_producer_may_write(
    one_sided: bool, free: int
):
    world, link, request = opened(one_sided)
    world.drop(link, request)
    world.break_session(link, noticed=True)
    assert link.pool.free == free


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
