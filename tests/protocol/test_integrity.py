# SPDX-License-Identifier: Apache-2.0
"""The state machines notice when their books disagree: each case breaks one entry of a machine that is right."""

from collections import deque
from collections.abc import Callable

import pytest
from support.machines import World

from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages


@pytest.fixture
def world() -> World:
    """A transfer of which some chunks have been placed, some are under way and some are to come."""
    world = World()
    world.prefill("transfer0", 12)
    world.load(world.links[0], "transfer0", 12)
    world.talk()
    for _ in range(2):
        world.send()
    world.land(world.flights.pop(0))
    world.check_integrity()
    return world


def outgoing_of(producer: Producer):
    return producer._transfers["transfer0"]


def stream_of(producer: Producer):
    (stream,) = outgoing_of(producer).streams.values()
    return stream


def no_offer(producer: Producer) -> None:
    outgoing = outgoing_of(producer)
    assert outgoing.offer is not None
    outgoing.offer = outgoing.offer._replace(transfer="transfer9")


def lose_a_chunk(producer: Producer) -> None:
    next(iter(stream_of(producer).queues.values())).chunks.popleft()


def a_write_too_many(producer: Producer) -> None:
    stream_of(producer).writing += 9


def never_accepted(producer: Producer) -> None:
    stream_of(producer).accepted = False


def two_readers_of_one(producer: Producer) -> None:
    outgoing_of(producer).finished[b"other"] = None


def leased_twice(producer: Producer) -> None:
    offer = outgoing_of(producer).offer
    assert isinstance(offer, Offer)
    producer.offer(offer._replace(transfer="transfer1"), 1000.0)


def still_draining(producer: Producer) -> None:
    (session,) = outgoing_of(producer).streams
    producer._openings._draining._writing[session, "transfer0"] = 1


def drains_nothing(producer: Producer) -> None:
    producer._openings._draining._writing[b"session", "transfer9"] = 0


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (no_offer, "transfer transfer0: has the offer of transfer transfer9"),
        (lose_a_chunk, "transfer transfer0: .* chunks are queued, wanted"),
        (a_write_too_many, "transfer transfer0: .* writes are under way"),
        (
            never_accepted,
            "transfer transfer0: chunks were sent to a consumer that was not accepted",
        ),
        (two_readers_of_one, "transfer transfer0: 2 readers read or have ended, wanted 1"),
        (leased_twice, "request .* is leased to transfer0 and transfer1"),
        (still_draining, "reads it while its last opening still ends"),
        (drains_nothing, "drain, but have no writes"),
    ],
)
def test_a_producer_names_what_is_wrong(
    world: World, damage: Callable[[Producer], None], named: str
):
    damage(world.producer)
    with pytest.raises(RuntimeError, match=named):
        world.producer.check_integrity()


def incoming_of(consumer: Consumer):
    incoming = consumer._transfers["transfer0"]
    (stream,) = incoming.streams.values()
    return incoming, stream


def slots_without_chunks(consumer: Consumer) -> None:
    incoming_of(consumer)[1].slots.append(77)


def lose_a_slot(consumer: Consumer) -> None:
    consumer._grants._pool._holder.popitem()


def slot_of_another(consumer: Consumer) -> None:
    incoming_of(consumer)[1].slots[0] = 77


def slot_twice(consumer: Consumer) -> None:
    slots = incoming_of(consumer)[1].slots
    slots[0] = slots[1]


def ends_and_holds(consumer: Consumer) -> None:
    stream = incoming_of(consumer)[1]
    consumer._grants._ending["transfer9", next(iter(consumer._sessions))] = (stream.slots, 0.0)


def all_received(consumer: Consumer) -> None:
    stream = incoming_of(consumer)[1]
    stream.missing.clear()


def no_session(consumer: Consumer) -> None:
    consumer._sessions.clear()


def a_load_of_another(consumer: Consumer) -> None:
    incoming = incoming_of(consumer)[0]
    assert incoming.load is not None
    incoming.load = incoming.load._replace(transfer="transfer9")


def kept_back(consumer: Consumer) -> None:
    source = next(iter(consumer._sessions))
    consumer._fetches._unsent[source] = deque([(0.0, messages.Done("transfer9"))])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lose_a_slot, "landing slots: .* wanted 3"),
        (slot_of_another, "slot 77 is granted to .*, which does not hold it"),
        (slots_without_chunks, "has slots .* for 3 chunks"),
        (slot_twice, "has a slot twice"),
        (ends_and_holds, "are granted, and .* still ends"),
        (all_received, "transfer transfer0: all KV has been received, and the load has not ended"),
        (no_session, "transfer transfer0: .* was asked for KV, and has no session"),
        (a_load_of_another, "transfer transfer0: loads transfer9"),
        (kept_back, "messages to .* are kept back, and sessions stand"),
    ],
)
def test_a_consumer_names_what_is_wrong(
    world: World, damage: Callable[[Consumer], None], named: str
):
    consumer = world.links[0].consumer
    damage(consumer)
    with pytest.raises(RuntimeError, match=named):
        consumer.check_integrity()
