# SPDX-License-Identifier: Apache-2.0
"""What a transport owes to the agent when the consumer reads from the producer's sending slab."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.faulty_transport import (
    Corrupt,
    Delay,
    Fail,
    FaultPlan,
    FaultTransport,
    Lose,
    Repeat,
    Truncate,
)
from support.leftovers import census, wait_for_leftovers
from transport_ends import SLOT_BYTES, SLOTS, Arrival, End, drive, meet
from transport_kinds import READABLE_KINDS
from transport_peer import Peer

from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.transport.shm.address import read_address
from pd_connector.transport.shm.rendezvous import connect

MakeEnd = Callable[..., End]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=READABLE_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65_537, SLOT_BYTES])
def test_bytes_header_and_slot_come_as_they_were_asked_for(make_end: MakeEnd, nbytes: int) -> None:
    producer, consumer = make_end(), make_end()
    _, source = meet(producer, consumer)
    payload, header = os.urandom(nbytes), os.urandom(300)
    producer.offer(3, payload)
    consumer.transport.read(source, 3, nbytes, SLOTS - 1, header)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(header, SLOTS - 1, payload)]
    assert producer.written == []


def test_every_read_of_many_ends_once(make_end: MakeEnd) -> None:
    producer, consumer = make_end(slots=100, slot_bytes=4096), make_end(slots=100, slot_bytes=4096)
    _, source = meet(producer, consumer)
    offered = [Arrival(b"%d" % n, n, os.urandom(4096 - n)) for n in range(100)]
    for arrival in offered:
        nbytes = producer.offer(arrival.slot, arrival.payload)
        consumer.transport.read(source, arrival.slot, nbytes, arrival.slot, arrival.header)
    drive(producer, consumer, until=lambda: len(consumer.landed) >= 100)
    for _ in range(50):
        producer.poll()
        consumer.poll()
    assert sorted(consumer.landed) == sorted(offered)


def test_reads_and_writes_of_one_session_do_not_disturb_each_other(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    route, source = meet(producer, consumer)
    for slot in range(0, SLOTS, 2):
        nbytes = producer.offer(slot, bytes([slot]) * SLOT_BYTES)
        consumer.transport.read(source, slot, nbytes, slot, b"%d" % slot)
        producer.send(route, b"%d" % (slot + 1), bytes([slot + 1]) * 999, slot + 1, slot + 1)
    drive(producer, consumer, until=lambda: len(consumer.landed) == SLOTS)
    assert {(a.header, a.payload[:1]) for a in consumer.landed} == {
        (b"%d" % slot, bytes([slot])) for slot in range(SLOTS)
    }


def test_a_read_before_the_producer_has_connected_waits_for_it(
    kind: str, make_end: MakeEnd
) -> None:
    producer, consumer = make_end(), make_end()
    source = consumer.transport.expect(producer.transport.address())
    nbytes = producer.offer(0, b"payload")
    consumer.transport.read(source, 0, nbytes, 0, b"header")
    for _ in range(20):
        consumer.poll()
    if kind == "shm":  # others read without the producer's help
        assert consumer.landed == []
        assert not consumer.transport.restless
    producer.transport.connect(consumer.transport.address())
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"header", 0, b"payload")]


def test_nothing_of_a_dismissed_producer_is_delivered_or_written_any_more(
    make_end: MakeEnd,
) -> None:
    producer, consumer = make_end(), make_end()
    landing = consumer.landing.slot(0, consumer.landing.nbytes)
    _, source = meet(producer, consumer)
    for slot in range(SLOTS):
        nbytes = producer.offer(slot, b"\x07" * SLOT_BYTES)
        consumer.transport.read(source, slot, nbytes, slot, b"")
    consumer.transport.dismiss(source)
    landing[:] = bytes(len(landing))
    for _ in range(200):
        producer.poll()
        consumer.poll()
    assert consumer.landed == []
    assert 0x07 not in bytes(landing)
    landing.release()
    with pytest.raises(TransportError, match="no such producer"):
        consumer.transport.read(source, 0, 1, 0, b"")


def test_the_end_of_one_session_leaves_the_reads_of_another_alone(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    _, first = meet(producer, consumer)
    _, second = meet(producer, consumer)
    nbytes = producer.offer(1, b"payload")
    consumer.transport.read(first, 1, nbytes, 1, b"first")
    consumer.transport.read(second, 1, nbytes, 2, b"second")
    consumer.transport.dismiss(first)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"second", 2, b"payload")]


def test_a_read_beyond_either_slab_is_refused(make_end: MakeEnd) -> None:
    producer, consumer = make_end(slot_bytes=8192), make_end(slot_bytes=4096)
    _, source = meet(producer, consumer)
    read = consumer.transport.read
    for send_slot, nbytes, slot, said in [
        (SLOTS, 1, 0, f"slot {SLOTS} and 1 bytes; the producer"),
        (-1, 1, 0, "slot -1"),
        (0, 8193, 0, "8193 bytes; the producer"),
        (0, 4097, 0, "4097 bytes; this engine"),
        (0, 1, SLOTS, f"slot {SLOTS} and 1 bytes; this engine"),
    ]:
        with pytest.raises(TransportError, match=said):
            read(source, send_slot, nbytes, slot, b"")
    with pytest.raises(TransportError, match="no such producer"):
        read(12345, 0, 1, 0, b"")


def _faulty(make_end: MakeEnd, plan: FaultPlan, reads: int = 3) -> list[Arrival]:
    """What arrives of some reads, one after the other, under a plan of faults."""
    producer, consumer = make_end(), make_end()
    consumer.transport = FaultTransport(consumer.transport, plan)
    _, source = meet(producer, consumer)
    for number in range(reads):
        nbytes = producer.offer(number, bytes([number]) * 100)
        consumer.transport.read(source, number, nbytes, number, b"%d" % number)
        # In their order, so that the plan's numbers are theirs.
        drive(producer, consumer, until=lambda: _landings(consumer) > number)  # noqa: B023
    drive(producer, consumer, until=lambda: not consumer.transport._landed.waits)  # type: ignore[attr-defined]
    return consumer.landed


def _landings(consumer: End) -> int:
    return consumer.transport._landings  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("fault", "headers"),
    [
        (None, [b"0", b"1", b"2"]),
        (Lose(), [b"0", b"2"]),
        (Repeat(), [b"0", b"1", b"1", b"2"]),
        (Delay(100), [b"0", b"2", b"1"]),
    ],
)
def test_a_read_that_never_ends_ends_twice_or_late(
    make_end: MakeEnd, fault: Any, headers: list[bytes]
) -> None:
    landed = _faulty(make_end, FaultPlan(landings={1: fault} if fault else {}))
    assert [arrival.header for arrival in landed] == headers


@pytest.mark.parametrize(
    ("fault", "payload", "problem"),
    [
        (Truncate(7), b"\1" * 7, ""),
        (Corrupt(99), b"\1" * 99 + b"\xfe", ""),
        (Fail(), b"", "injected: landing 1 fails"),
    ],
)
def test_a_read_that_brings_other_bytes(
    make_end: MakeEnd, fault: Any, payload: bytes, problem: str
) -> None:
    landed = _faulty(make_end, FaultPlan(landings={1: fault}))
    assert landed[1] == Arrival(b"1", 1, payload, problem)
    assert [a.payload for a in (landed[0], landed[2])] == [b"\0" * 100, b"\2" * 100]


def test_bytes_are_read_from_another_process(
    make_end: MakeEnd, make_peer: Callable[[str], Peer]
) -> None:
    producer, consumer = make_peer("producer"), make_end()
    source = consumer.transport.expect(producer.address)
    producer.tell(consumer.transport.address())
    drive(consumer, until=lambda: len(consumer.landed) == SLOTS)  # it has filled its slots
    consumer.landed.clear()
    for slot in range(SLOTS):
        consumer.transport.read(source, slot, SLOT_BYTES, slot, b"%d" % slot)
    drive(consumer, until=lambda: len(consumer.landed) == SLOTS)
    assert sorted(consumer.landed) == [
        Arrival(b"%d" % slot, slot, bytes([slot]) * SLOT_BYTES) for slot in range(SLOTS)
    ]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_producer_that_dies_or_stops_spoils_no_read_of_another(
    make_end: MakeEnd, make_peer: Callable[[str], Peer], end: signal.Signals
) -> None:
    dying, other, consumer = make_peer("producer"), make_end(), make_end()
    source = consumer.transport.expect(dying.address)
    dying.tell(consumer.transport.address())
    drive(consumer, until=lambda: len(consumer.landed) == SLOTS)
    consumer.landed.clear()
    dying.signal(end)
    if end == signal.SIGKILL:
        dying.process.join()
    with contextlib.suppress(TransportError):  # some notice at once
        for slot in range(SLOTS - 1):
            consumer.transport.read(source, slot, SLOT_BYTES, slot, b"%d" % slot)
    for _ in range(100):
        consumer.poll()
        time.sleep(0.001)
    for header, slot, payload, problem in consumer.landed:
        assert header == b"%d" % slot
        assert payload == (b"" if problem else bytes([slot]) * SLOT_BYTES)
    consumer.transport.dismiss(source)
    consumer.landed.clear()
    _, its_source = meet(other, consumer)
    nbytes = other.offer(0, b"payload")
    consumer.transport.read(its_source, 0, nbytes, SLOTS - 1, b"alive")
    drive(other, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"alive", SLOTS - 1, b"payload")]


def test_reading_leaves_no_descriptor_and_no_thread_behind(kind: str) -> None:
    def cycle() -> None:
        producer, consumer = End(kind), End(kind)
        for _ in range(2):
            route, source = meet(producer, consumer)
            nbytes = producer.offer(0, b"x" * SLOT_BYTES)
            consumer.transport.read(source, 0, nbytes, 0, b"")
            drive(producer, consumer, until=lambda: bool(consumer.landed))
            consumer.landed.clear()
            consumer.transport.read(source, 0, nbytes, 0, b"under way")
            consumer.transport.dismiss(source)
            producer.transport.disconnect(route)
        producer.close()
        consumer.close()

    cycle()  # loads libraries, which keep a few for themselves
    first = census()
    for _ in range(3):
        cycle()
        wait_for_leftovers(first)


class TestOverSharedMemory:
    """What only the zero-copy read has."""

    @pytest.fixture
    def kind(self) -> str:
        return "shm"

    def test_a_read_is_a_view_that_cannot_be_written_through(self, make_end: MakeEnd) -> None:
        producer, consumer = make_end(), make_end()
        _, source = meet(producer, consumer)
        consumer.transport.read(source, 0, producer.offer(0, b"before"), 0, b"")
        (landed,) = consumer.transport.poll()[1]
        assert landed.payload.readonly
        assert bytes(landed.payload) == b"before"
        # A producer that meddles meanwhile is seen: the agent looks at the checksum twice.
        producer.offer(0, b"behind")
        assert bytes(landed.payload) == b"behind"
        consumer.close()
        assert bytes(landed.payload) == b"behind"

    def test_reads_under_way_fail_when_the_producer_hangs_up(self, make_end: MakeEnd) -> None:
        producer, consumer = make_end(), make_end()
        route, source = meet(producer, consumer)
        consumer.poll()
        producer.transport.disconnect(route)
        consumer.transport.read(source, 0, producer.offer(0, b"payload"), 0, b"header")
        consumer.poll()
        assert consumer.landed == [Arrival(b"header", 0, b"", "shm: the producer has hung up")]
        meet(producer, consumer)
        consumer.transport.read(source, 0, 7, 0, b"again")
        drive(producer, consumer, until=lambda: len(consumer.landed) == 2)
        assert consumer.landed[1] == Arrival(b"again", 0, b"payload")

    def test_a_slab_that_is_not_as_announced_is_not_mapped(self, make_end: MakeEnd) -> None:
        producer, consumer = make_end(), make_end()
        address = msgspec.msgpack.decode(producer.transport.address())
        address[4] += 1
        source = consumer.transport.expect(msgspec.msgpack.encode(address))
        producer.transport.connect(consumer.transport.address())
        consumer.transport.read(source, SLOTS, 1, 0, b"header")
        drive(producer, consumer, until=lambda: bool(consumer.landed))
        assert "not handed over" in consumer.landed[0].problem
        assert consumer.landed[0].payload == b""

    def test_a_version_without_reads_announces_no_slots(self, make_end: MakeEnd) -> None:
        producer, consumer = make_end(), make_end()
        older = msgspec.msgpack.decode(producer.transport.address())[:4]
        source = consumer.transport.expect(msgspec.msgpack.encode(older))
        with pytest.raises(TransportError, match="the producer has 0 slots"):
            consumer.transport.read(source, 0, 1, 0, b"")

    def test_a_version_that_shares_its_cache_as_well_is_read_and_leaves_nothing_open(
        self, make_end: MakeEnd
    ) -> None:
        producer, consumer = make_end(), make_end()
        newer = msgspec.msgpack.decode(producer.transport.address())
        newer.append([[4096, 1 << 20], [1 << 30, 4096]])  # where its cache lies
        source = consumer.transport.expect(msgspec.msgpack.encode(newer))
        before = len(os.listdir("/proc/self/fd"))
        listener = read_address(consumer.transport.address()).listener
        cache = Slab(1, 4096, shared=True)
        link = connect(listener, newer[1], [producer.sending.handle, cache.handle])
        consumer.transport.read(source, 3, producer.offer(3, b"payload"), 0, b"header")
        drive(consumer, until=lambda: bool(consumer.landed))
        assert consumer.landed == [Arrival(b"header", 0, b"payload")]
        consumer.transport.dismiss(source)
        link.close()
        cache.close()
        assert len(os.listdir("/proc/self/fd")) <= before + 1, "the mapping's own"


@pytest.mark.parametrize("which", ["tcp", "tcp+key"])
def test_a_transport_that_cannot_read_says_so(which: str) -> None:
    end = End(which)
    try:
        assert not end.transport.readable
        with pytest.raises(TransportError, match="cannot be read from"):
            end.transport.read(1, 0, 1, 0, b"")
    finally:
        end.close()
