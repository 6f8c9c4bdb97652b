# SPDX-License-Identifier: Apache-2.0
"""What every transport owes to the agent (`pd_connector/transport/base.py`), both ends in reach."""

import contextlib
import os
from collections.abc import Callable

import pytest
from support.leftovers import census, wait_for_leftovers
from transport_ends import SLOT_BYTES, SLOTS, Arrival, End, drive, meet

from pd_connector.errors import TransportError

MakeEnd = Callable[..., End]


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65_537, SLOT_BYTES])
def test_bytes_header_and_slot_arrive_as_they_were_given(make_end: MakeEnd, nbytes: int) -> None:
    producer, consumer = make_end(), make_end()
    route, _ = meet(producer, consumer)
    payload, header = os.urandom(nbytes), os.urandom(300)
    token = producer.send(route, header, payload, slot=SLOTS - 1)
    drive(producer, consumer, until=lambda: bool(producer.written and consumer.landed))
    assert consumer.landed == [Arrival(header, SLOTS - 1, payload)]
    assert [(w.token, w.ok) for w in producer.written] == [(token, True)]


def test_both_ends_produce_and_consume_at_once(make_end: MakeEnd) -> None:
    left, right = make_end(), make_end()
    to_right, _ = meet(left, right)
    to_left, _ = meet(right, left)
    left.send(to_right, b"from left", b"l" * 1000, slot=1)
    right.send(to_left, b"from right", b"r" * 1000, slot=2)
    drive(left, right, until=lambda: bool(left.landed and right.landed))
    assert right.landed == [Arrival(b"from left", 1, b"l" * 1000)]
    assert left.landed == [Arrival(b"from right", 2, b"r" * 1000)]


def test_every_write_of_many_arrives_once_and_ends_once(make_end: MakeEnd) -> None:
    producer, consumer = make_end(slots=200, slot_bytes=4096), make_end(slots=200, slot_bytes=4096)
    route, _ = meet(producer, consumer)
    sent = [Arrival(b"%d" % i, i, os.urandom(4096 - i)) for i in range(200)]
    tokens = [producer.send(route, a.header, a.payload, a.slot, source=a.slot) for a in sent]
    drive(
        producer,
        consumer,
        until=lambda: len(producer.written) >= 200 and len(consumer.landed) >= 200,
    )
    assert sorted(consumer.landed) == sorted(sent)
    assert sorted(w.token for w in producer.written) == sorted(tokens)
    assert all(w.ok for w in producer.written)
    assert len(set(tokens)) == 200


def test_a_source_may_be_overwritten_once_its_write_has_ended(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    route, _ = meet(producer, consumer)
    for value in range(3):
        producer.written.clear()
        producer.send(route, b"", bytes([value]) * SLOT_BYTES, slot=value, source=0)
        # The consumer is polled, too: without its help no bulk data moves over some links.
        drive(producer, consumer, until=lambda: bool(producer.written))
    drive(producer, consumer, until=lambda: len(consumer.landed) == 3)
    assert [set(arrival.payload) for arrival in consumer.landed] == [{0}, {1}, {2}]


def test_a_producer_may_be_expected_before_it_connects(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    consumer.transport.expect(producer.transport.address())
    for _ in range(20):
        consumer.poll()
        producer.poll()
    route = producer.transport.connect(consumer.transport.address())
    producer.send(route, b"header", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"header", 0, b"payload")]


def test_a_write_before_the_consumer_has_dialled_waits_for_it(kind: str, make_end: MakeEnd) -> None:
    if kind == "nixl":
        pytest.skip("its consumer does not dial; see test_nixl.py")
    producer, consumer = make_end(), make_end()
    route = producer.transport.connect(consumer.transport.address())
    for number in range(3):
        producer.send(route, b"%d" % number, b"early" * 100, slot=number)
        producer.poll()
    if producer.transport.copies:
        producer.sending.slot(0)[:] = bytes(SLOT_BYTES)
    consumer.transport.expect(producer.transport.address())
    drive(producer, consumer, until=lambda: len(consumer.landed) == 3)
    assert consumer.landed == [Arrival(b"%d" % n, n, b"early" * 100) for n in range(3)]


def test_writes_under_way_at_a_disconnect_end_once_and_read_their_source_no_more(
    make_end: MakeEnd,
) -> None:
    producer, consumer = make_end(), make_end()
    landing = consumer.landing.slot(0, consumer.landing.nbytes)
    landing[:] = bytes(len(landing))  # whatever was in that memory before
    route, _ = meet(producer, consumer)
    producer.send(route, b"first", b"\x01" * SLOT_BYTES, slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written and consumer.landed))
    tokens = [
        producer.send(route, b"", b"\x01" * SLOT_BYTES, slot=slot, source=slot)
        for slot in range(SLOTS)
    ]
    producer.transport.disconnect(route)
    drive(producer, until=lambda: len(producer.written) == 1 + SLOTS)
    assert sorted(w.token for w in producer.written[1:]) == tokens
    for slot in range(SLOTS):
        producer.sending.slot(slot)[:] = b"\xee" * SLOT_BYTES
    for _ in range(300):
        consumer.poll()
        producer.poll()
    written = b"".join(a.payload for a in consumer.landed)
    assert 0xEE not in written
    assert b"\xee" not in bytes(landing)
    landing.release()
    assert len(producer.written) == 1 + SLOTS
    with pytest.raises(TransportError, match="no such consumer"):
        producer.send(route, b"", b"late", slot=0)


def test_nothing_is_taken_from_a_dismissed_producer(make_end: MakeEnd) -> None:
    producer, other, consumer = make_end(), make_end(), make_end()
    route, source = meet(producer, consumer)
    producer.send(route, b"before", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    consumer.transport.dismiss(source)
    with contextlib.suppress(TransportError):
        producer.send(route, b"after", b"payload", slot=1)
    its_route, _ = meet(other, consumer)
    other.send(its_route, b"other", b"payload", slot=2)
    drive(producer, other, consumer, until=lambda: len(consumer.landed) == 2)
    assert [arrival.header for arrival in consumer.landed] == [b"before", b"other"]


@pytest.mark.parametrize("polled_between", [False, True])
def test_a_consumer_that_comes_back_is_written_to_again(
    make_end: MakeEnd, polled_between: bool
) -> None:
    producer, consumer = make_end(), make_end()
    for number in range(4):
        consumer.landed.clear()
        route, source = meet(producer, consumer)
        producer.send(route, b"%d" % number, b"payload", slot=number)
        drive(producer, consumer, until=lambda: bool(consumer.landed))
        assert consumer.landed == [Arrival(b"%d" % number, number, b"payload")]
        consumer.transport.dismiss(source)
        if polled_between:
            producer.poll()
        producer.transport.disconnect(route)


def test_the_end_of_an_old_route_does_not_touch_the_consumers_new_one(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    old, source = meet(producer, consumer)
    producer.send(old, b"old", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    # The producer notices the end of the old session long after the new one has begun.
    consumer.transport.dismiss(source)
    new, _ = meet(producer, consumer)
    producer.transport.disconnect(old)
    producer.send(new, b"new", b"payload", slot=1)
    drive(producer, consumer, until=lambda: len(consumer.landed) == 2)
    assert consumer.landed[1] == Arrival(b"new", 1, b"payload")


def test_a_new_route_waits_for_the_new_dial_of_its_consumer(kind: str, make_end: MakeEnd) -> None:
    if kind == "nixl":
        pytest.skip("its consumer does not dial")
    producer, consumer = make_end(), make_end()
    old, source = meet(producer, consumer)
    producer.send(old, b"old", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    consumer.transport.dismiss(source)
    new = producer.transport.connect(consumer.transport.address())
    producer.send(new, b"new", b"payload", slot=1)
    consumer.transport.expect(producer.transport.address())
    drive(producer, consumer, until=lambda: len(consumer.landed) == 2)
    assert consumer.landed[1] == Arrival(b"new", 1, b"payload")


def test_two_sessions_with_one_producer_end_one_by_one(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    first, its_source = meet(producer, consumer)
    second, _ = meet(producer, consumer)
    producer.send(first, b"first", b"payload", slot=0)
    producer.send(second, b"second", b"payload", slot=1, source=1)
    drive(producer, consumer, until=lambda: len(consumer.landed) == 2)
    consumer.transport.dismiss(its_source)
    producer.transport.disconnect(first)
    producer.send(second, b"third", b"payload", slot=2)
    drive(producer, consumer, until=lambda: len(consumer.landed) == 3)
    assert consumer.landed[2] == Arrival(b"third", 2, b"payload")


def test_ending_what_has_ended_already_is_harmless(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    route, source = meet(producer, consumer)
    for _ in range(2):
        producer.transport.disconnect(route)
        consumer.transport.dismiss(source)


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"\xc1",
        b"no msgpack at all",
        b"\x93\x01\x02\x03",
        b"\x80",
        bytes(1000),
        b"\x93\xa3\xed\xa0\xbd\x01\xc4\x00",  # a text that is not UTF-8
        b"\x91" * 100_000,
    ],
    ids=["empty", "reserved", "text", "numbers", "map", "zeros", "utf-8", "deep"],
)
def test_an_address_that_cannot_be_read_is_refused(make_end: MakeEnd, address: bytes) -> None:
    end = make_end()
    with pytest.raises(TransportError, match="cannot be read"):
        end.transport.connect(address)
    with pytest.raises(TransportError, match="cannot be read"):
        end.transport.expect(address)


def test_a_write_beyond_the_landing_slab_is_refused(make_end: MakeEnd) -> None:
    producer, consumer = make_end(slot_bytes=8192), make_end(slot_bytes=4096)
    if not consumer.transport.one_sided:
        pytest.skip("payloads arrive in memory of their own")
    route, _ = meet(producer, consumer)
    with pytest.raises(TransportError, match=f"slot {SLOTS}"):
        producer.send(route, b"", b"payload", slot=SLOTS)
    with pytest.raises(TransportError, match="4097 bytes"):
        producer.send(route, b"", b"x" * 4097, slot=0)


def test_a_transport_that_is_idle_and_meets_nobody_need_not_be_polled(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    assert not producer.transport.restless
    route, source = meet(producer, consumer)
    producer.send(route, b"", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written and consumer.landed))
    producer.transport.disconnect(route)
    consumer.transport.dismiss(source)
    drive(producer, consumer, until=lambda: not producer.transport.restless)
    assert not consumer.transport.restless


def test_closing_gives_back_every_descriptor_and_thread(kind: str) -> None:
    def cycle() -> None:
        producer, consumer = End(kind), End(kind)
        for _ in range(2):
            route, source = meet(producer, consumer)
            for slot in range(SLOTS):
                producer.send(route, b"", b"payload", slot=slot, source=slot)
            drive(producer, consumer, until=lambda: len(consumer.landed) >= SLOTS)
            consumer.landed.clear()
            producer.send(route, b"under way", b"x" * SLOT_BYTES, slot=0)
            if kind == "ucx":  # ucxx keeps the worker of a cancelled write until the process ends
                drive(producer, consumer, until=lambda: bool(consumer.landed))
                consumer.landed.clear()
                drive(producer, until=lambda: len(producer.written) == 1 + SLOTS)
            producer.written.clear()
            consumer.transport.dismiss(source)
        producer.close()
        consumer.close()

    cycle()  # loads libraries, which keep a few for themselves
    before = census()
    for _ in range(3):
        cycle()
        wait_for_leftovers(before)


def test_sessions_that_come_and_go_leave_nothing_behind(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()

    def session(number: int) -> None:
        route, source = meet(producer, consumer)
        producer.send(route, b"%d" % number, b"payload", slot=0)
        drive(producer, consumer, until=lambda: bool(consumer.landed))
        consumer.landed.clear()
        producer.transport.disconnect(route)
        consumer.transport.dismiss(source)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    session(0)  # what libraries open once
    before = descriptors()
    for number in range(1, 13):
        session(number)
    # That a peer has closed is noticed some polls later; twelve leaks would be noticed here.
    drive(producer, consumer, until=lambda: descriptors() <= before + 3)
