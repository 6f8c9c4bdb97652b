# SPDX-License-Identifier: Apache-2.0
"""The contract between two processes, of which one may be killed or stopped."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable

import pytest
from transport_ends import SLOT_BYTES, SLOTS, End, drive
from transport_peer import Peer, digest

from pd_connector.errors import TransportError

MakeEnd = Callable[..., End]
MakePeer = Callable[[str], Peer]

pytestmark = pytest.mark.timeout(300)


def test_bytes_arrive_in_another_process_as_they_were_given(
    make_end: MakeEnd, make_peer: MakePeer
) -> None:
    consumer, producer = make_peer("consumer"), make_end()
    consumer.tell(producer.transport.address())
    route = producer.transport.connect(consumer.address)
    payloads = [os.urandom(SLOT_BYTES - 1000 * slot) for slot in range(SLOTS)]
    drive(producer, until=lambda: consumer.listen() == ["expected"])
    for slot, payload in enumerate(payloads):
        producer.send(route, b"header %d" % slot, payload, slot, source=slot)
    drive(
        producer,
        until=lambda: len(producer.written) == SLOTS and len(consumer.listen()) == 1 + SLOTS,
    )
    assert all(written.ok for written in producer.written)
    assert sorted(consumer.answers[1:]) == [
        [f"header {s}", s, digest(p)] for s, p in enumerate(payloads)
    ]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_consumer_that_dies_or_stops_holds_no_write_and_no_other_consumer_up(
    make_end: MakeEnd, make_peer: MakePeer, end: signal.Signals
) -> None:
    dying, other, producer = make_peer("consumer"), make_peer("consumer"), make_end()
    for peer in (dying, other):
        peer.tell(producer.transport.address())
    drive(producer, until=lambda: dying.listen() == other.listen() == ["expected"])
    routes = [producer.transport.connect(peer.address) for peer in (dying, other)]
    producer.send(routes[0], b"whole", b"payload", slot=0)
    drive(producer, until=lambda: len(dying.listen()) == 2 and bool(producer.written))
    producer.written.clear()

    dying.signal(end)
    if end == signal.SIGKILL:
        dying.process.join()
    tokens = set()
    with contextlib.suppress(TransportError):
        for slot in range(SLOTS):
            tokens.add(producer.send(routes[0], b"", b"x" * SLOT_BYTES, slot, source=slot))
    for _ in range(50):
        producer.poll()
    producer.transport.disconnect(routes[0])
    drive(producer, until=lambda: len(producer.written) >= len(tokens))
    assert {written.token for written in producer.written} == tokens

    producer.send(routes[1], b"alive", b"payload", slot=3)
    drive(producer, until=lambda: len(other.listen()) == 2)
    assert other.answers[1] == ["alive", 3, digest(b"payload")]


def test_a_producer_that_dies_leaves_whole_chunks_and_a_consumer_that_serves_on(
    make_end: MakeEnd, make_peer: MakePeer
) -> None:
    consumer = make_end()
    for is_killed in (True, False):
        producer = make_peer("producer")
        source = consumer.transport.expect(producer.address)
        producer.tell(consumer.transport.address())
        wanted = 1 if is_killed else SLOTS
        drive(consumer, until=functools.partial(_has, consumer, wanted))
        producer.kill()
        for _ in range(50):
            consumer.poll()
        for header, slot, payload, _ in consumer.landed:
            assert header == b"%d" % slot
            assert payload == bytes([slot]) * SLOT_BYTES
        consumer.transport.dismiss(source)
        consumer.landed.clear()


def _has(consumer: End, chunks: int) -> bool:
    return len(consumer.landed) >= chunks
