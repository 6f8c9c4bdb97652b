# SPDX-License-Identifier: Apache-2.0
"""Producer and consumers coupled without sockets: each guard, and the harm when it is off.

Random orders, faults and lies in combination: test_pair_interleavings.py.
"""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines import (
    CONFIG,
    FALSE_FIELDS,
    HALVES,
    STAGES,
    WHOLE,
    Link,
    World,
    identity_of,
)

from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.producing.outgoing_stream import OutgoingStream
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import ChunkHeader

SHAPES = {
    "one to one": ((WHOLE,), (WHOLE,)),
    "one to two halves": ((WHOLE,), HALVES),
    "two halves to one": (HALVES, (WHOLE,)),
    "two halves to two stages": (HALVES, STAGES),
}
"""Ranks of the producer, and of each consumer."""


@given(seed=st.integers(0, 2**32), shape=st.sampled_from(sorted(SHAPES)), one_sided=st.booleans())
@settings(max_examples=60, deadline=None)
def test_without_faults_every_load_arrives_in_any_order_of_events(
    seed: int, shape: str, one_sided: bool
):
    chance = random.Random(seed)
    sources, shards = SHAPES[shape]
    world = World(consumers=2, sources=sources, shards=shards, one_sided=one_sided)
    engines = [world.links[i : i + len(shards)] for i in range(0, len(world.links), len(shards))]
    asked: list[tuple[Link, str]] = []
    running: list[str] = []
    for name in [f"transfer{i}" for i in range(6)]:
        tokens, late = chance.randint(1, 18), chance.random() < 0.7
        request = world.begin(name, tokens)
        if late:
            running.append(request)
            for rank in world.ranks:
                rank.producer.expect(name, world.now)
        else:
            world.finish(request)
        first = chance.randrange(tokens) // 2 * 2
        engine = chance.choice(engines)
        asked += [(link, world.load(link, name, tokens, first=first, wait=late)) for link in engine]
    for _ in range(100_000):
        if all(request in link.finished for link, request in asked):
            break
        random_step(chance, world, running)
    assert [link.finished[request].cause for link, request in asked] == [None] * len(asked)
    while running:
        world.finish(running.pop())
    world.run()
    assert {cause for rank in world.ranks for cause in rank.freed.values()} == {None}
    world.settle()


def random_step(chance: random.Random, world: World, running: list[str]) -> None:
    link = chance.choice(world.links)
    line = chance.choice(link.lines)
    step = chance.randrange(8)
    if step == 0 and running:
        prefill_step(chance, world, running)
    elif step == 1 and line.dialling:
        world.connect(link, line=line)
    elif step == 2:
        world.hear(link, line)
    elif step == 3:
        world.listen(link, line)
    elif step == 4:
        world.send(chance.choice(world.ranks))
    elif step == 5 and world.flights:
        world.land(world.flights.pop(chance.randrange(len(world.flights))))
    elif step == 6 and chance.random() < 0.1:
        world.send(chance.choice(world.ranks), gate_shut=True)
    elif world.writes:
        world.end_write(chance.choice(world.writes))


def prefill_step(chance: random.Random, world: World, running: list[str]) -> None:
    request = chance.choice(running)
    kind = chance.randrange(8)
    if kind == 0:
        world.preempt(request)
    elif kind == 1:
        running.remove(request)
        world.finish(request)
    else:
        world.compute(request, chance.randint(0, 18), chance.choice([None, 0, 1, 2]))


def opened(one_sided: bool = True, tokens: int = 12) -> tuple[World, Link, str]:
    """A transfer that streams: its first chunks are in flight."""
    world = World(one_sided=one_sided)
    link = world.links[0]
    world.prefill("transfer0", tokens)
    request = world.load(link, "transfer0", tokens)
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
    world, link, _ = opened(tokens=2)
    flight = world.flights[0]
    flight.header = msgspec.structs.replace(flight.header, identity=b"other tokens")
    monkeypatch.setattr(ChunkHeader, "__ne__", lambda self, other: False)
    world.land(flight)
    assert len(link.received) == 1


def test_a_corrupt_chunk_fails_its_load_and_without_the_checksum_it_would_not():
    world, link, request = opened(tokens=2)
    world.flights[0].payload = bytes(len(world.flights[0].payload))
    world.land(world.flights[0])
    assert link.finished[request].cause == Cause.CHECKSUM

    world, link, request = opened(tokens=2)
    world.flights[0].payload = bytes(len(world.flights[0].payload))
    world.verifies = False
    with pytest.raises(AssertionError, match="wrong KV"):
        world.land(world.flights[0])


def test_a_producer_checks_whose_tokens_are_asked_for_and_without_that_sends_wrong_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    world = World()
    link = world.links[0]
    world.prefill("transfer0", 4)
    request = world.load(link, "transfer0", 4, identity=b"other tokens")
    world.run()
    assert link.finished[request].cause == Cause.TOKENS
    assert world.flights == []

    world = World()
    link = world.links[0]
    world.prefill("transfer0", 4)
    world.load(link, "transfer0", 4, identity=b"other tokens")
    world.connect(link)
    monkeypatch.setattr(Offer, "problem", lambda offer, message, routes, slot_bytes: None)
    world.hear(link)
    assert world.send() is not None, "pages of other tokens leave the producer"


def test_a_chunk_in_a_slot_of_another_transfer_is_dropped_and_without_that_breaks_the_books(
    monkeypatch: pytest.MonkeyPatch,
):
    world, link, _ = opened(one_sided=False, tokens=4)
    source = link.line.rank.source
    world.prefill("transfer1", 4)
    world.load(link, "transfer1", 4)
    world.hear(link)
    world.listen(link)
    foreign = next(i for i in range(CONFIG.slots) if link.pool.holds(("transfer1", source), i))
    flight = world.flights[0]
    flight.slot = foreign
    world.land(flight)
    assert link.pool.holds(("transfer1", source), foreign)
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
    world.prefill("transfer1", 12)
    again = world.load(link, "transfer1", 12)
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
    early = world.load(link, "transfer0", 12)
    assert link.finished[early].cause == Cause.DUPLICATE
    world.run()
    world.prefill("transfer0", 12)
    later = world.load(link, "transfer0", 12)
    world.run()
    assert link.received == [later]
    world.settle()


def test_an_opening_while_the_last_one_ends_is_refused_and_leaves_nothing_behind():
    world, link, _ = opened()
    writes = list(world.writes)
    identity, slot = identity_of("transfer0"), CONFIG.slot_bytes
    again = messages.Open("transfer0", identity, 0, 3, True, [], slot)
    link.line.to_producer.clear()
    link.line.to_producer.extend([messages.Done("transfer0"), again])
    world.hear(link)
    world.hear(link)
    for write in writes:
        world.end_write(write)
    world.settle()


# Streams: KV that is computed while it is sent.


def streaming(tokens: int = 12) -> tuple[World, Link, str, str]:
    """A load that has slots, and waits for a prefill of which nothing is computed."""
    world = World(config=msgspec.structs.replace(CONFIG, slots=8))
    link = world.links[0]
    prefill = world.begin("transfer0", tokens)
    world.producer.expect("transfer0", world.now)
    world.compute(prefill, 0)
    request = world.load(link, "transfer0", tokens, wait=True)
    world.run()
    return world, link, prefill, request


def test_a_chunk_is_sent_when_it_is_computed_and_without_that_wrong_kv_would_be(
    monkeypatch: pytest.MonkeyPatch,
):
    world, link, prefill, request = streaming()
    for tokens in (3, 6, 12):
        world.compute(prefill, tokens)
        world.run()
    assert link.received == [request], "although the request goes on"
    world.finish(prefill)
    assert world.freed == {prefill: None}
    world.settle()

    world, _, prefill, _ = streaming()
    world.compute(prefill, 3)
    take = OutgoingStream.take_chunk
    monkeypatch.setattr(
        OutgoingStream,
        "take_chunk",
        lambda self, offer, step: take(self, offer._replace(tokens=offer.prompt_tokens), step),
    )
    assert world.send() is not None
    monkeypatch.undo()
    world.finish(prefill)
    with pytest.raises(AssertionError, match="wrong KV"):
        world.run()


def test_layers_are_sent_within_a_step():
    world, link, prefill, request = streaming()
    world.compute(prefill, 12, stop_layer=1)
    assert world.send() is not None
    assert world.send() is not None
    assert world.send() is None
    world.compute(prefill, 12, stop_layer=2)
    world.run()
    assert link.received == [request]


def test_after_a_preemption_the_rest_comes_from_the_new_pages_and_without_revoke_would_not():
    world, link, prefill, request = streaming()
    world.compute(prefill, 6)
    assert world.send() is not None
    world.preempt(prefill)
    assert world.send() is None
    world.compute(prefill, 4)
    assert world.send() is None
    world.finish(prefill)
    world.run()
    assert link.received == [request]
    world.settle()

    world, _, prefill, _ = streaming()
    world.compute(prefill, 6)
    world.producer.revoke = lambda transfer, request: None  # type: ignore[method-assign]
    world.preempt(prefill)
    assert world.send() is not None, "of pages that are someone else's"


def test_a_withdrawal_in_the_middle_ends_the_load():
    world, link, prefill, request = streaming()
    world.compute(prefill, 6)
    assert world.send() is not None
    world.withdraw(prefill)
    world.run()
    assert link.finished[request].cause == Cause.PREFILL_ENDED
    assert link.pool.held == 0
    world.settle()


def test_a_request_that_waits_is_told_when_it_can_allocate_pages():
    world = World(sources=HALVES)
    link = world.links[0]
    held = world.hold(link, "transfer0", watch=True)
    prefill = world.begin("transfer0", 12)
    world.run()
    assert link.held == {}
    world.compute(prefill, 2)
    world.run()
    assert link.held[held].cause is None
    world.load(link, "transfer0", 12, request=held, wait=True)
    world.run()
    assert link.finished == {}
    world.finish(prefill)
    world.run()
    assert link.received == [held]
    world.settle()


# Several ranks.


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_gets_its_part_and_pages_are_freed_when_all_have(shape: str):
    sources, shards = SHAPES[shape]
    world = World(sources=sources, shards=shards)
    prefill = world.prefill("transfer0", 11)
    requests = []
    for link in world.links:
        assert all(rank.freed == {} for rank in world.ranks)
        requests.append((link, world.load(link, "transfer0", 11)))
        world.run()
    assert all(link.received == [request] for link, request in requests)
    assert all(rank.freed == {prefill: None} for rank in world.ranks)
    world.settle()


def two_readers(meanwhile: Any) -> tuple[World, Link, Link, str, str]:
    """Two ranks of a consumer read from one rank; something happens to the first in the middle."""
    world = World(shards=HALVES)
    one, two = world.links
    world.prefill("transfer0", 12)
    first, second = (world.load(link, "transfer0", 12) for link in (one, two))
    for link in (one, two):
        world.connect(link)
        world.hear(link)
    assert world.send() is not None
    meanwhile(world, one, first)
    world.run()
    return world, one, two, first, second


def break_it(world: World, link: Link, request: str) -> None:
    world.break_session(link, noticed=True)


def drop_it(world: World, link: Link, request: str) -> None:
    world.drop(link, request)


@pytest.mark.parametrize(("fault", "cause"), [(break_it, "session_lost"), (drop_it, "aborted")])
def test_one_rank_ends_badly_and_the_other_gets_everything(fault: Any, cause: str):
    world, one, two, first, second = two_readers(fault)
    assert one.finished[first].cause == cause
    assert two.received == [second]
    assert list(world.freed.values()) == [cause]
    world.settle()


@pytest.mark.parametrize("shape", ["two halves to one", "two halves to two stages"])
def test_a_rank_that_dies_in_the_middle_fails_the_load_once_and_all_slots_come_home(shape: str):
    sources, shards = SHAPES[shape]
    world = World(sources=sources, shards=shards)
    world.prefill("transfer0", 12)
    requests = [(link, world.load(link, "transfer0", 12)) for link in world.links]
    for link in world.links:
        for line in link.lines:
            world.connect(link, line=line)
            world.hear(link, line)
    while world.send():
        pass
    for link in world.links:
        world.break_session(link, noticed=True, line=link.lines[1])
    world.run()
    assert [link.finished[request].cause for link, request in requests] == [
        Cause.SESSION_LOST for _ in requests
    ]
    world.pass_time(CONFIG.lease_s)
    assert all(link.pool.held == 0 for link in world.links)
    world.settle()


@pytest.mark.parametrize("shard", [HALVES[0], STAGES[0]])
def test_a_producer_that_does_not_hold_everything_never_finishes_a_load_well(shard: Shard):
    world = World(sources=(shard,))
    link = world.links[0]
    world.prefill("transfer0", 12)
    request = world.load(link, "transfer0", 12)
    world.run()
    assert link.finished[request].cause == Cause.GEOMETRY
    world.settle()


def test_without_the_look_at_what_came_half_of_the_heads_would_count(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "pd_connector.protocol.consuming.fetches.uncovered", lambda known, geometry: ""
    )
    world = World(sources=HALVES[:1])
    world.prefill("transfer0", 12)
    world.load(world.links[0], "transfer0", 12)
    with pytest.raises(AssertionError, match="wrong KV"):
        world.run()


def test_ranks_of_one_producer_may_be_at_different_points():
    world = World(sources=HALVES)
    link = world.links[0]
    world.prefill("transfer0", 12)
    request = world.load(link, "transfer0", 12)
    world.connect(link, line=link.lines[0])
    world.hear(link, link.lines[0])
    for _ in range(3):
        while world.send():
            pass
        while world.flights:
            world.land(world.flights.pop())
        world.listen(link, link.lines[0])
        world.hear(link, link.lines[0])
    assert link.finished == {}, "the other rank has not even been reached"
    world.run()
    assert link.received == [request]
    world.settle()
