# SPDX-License-Identifier: Apache-2.0
"""What only the tcp transport has: a port that anybody can dial, keys, hosts, and lost connections."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from support.clocks import Clock
from support.leftovers import resident_bytes
from support.relay import Relay
from transport_ends import SLOT_BYTES, SLOTS, Arrival, End, drive, meet

from pd_connector.errors import TransportError
from pd_connector.hosts import is_loopback
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import Slab
from pd_connector.transport.tcp import TcpTransport, cipher, listening, receiving, transport
from pd_connector.transport.tcp.address import LEAST_RECORD_BYTES, TcpAddress, read_address
from pd_connector.transport.tcp.connection import Pace
from pd_connector.transport.tcp.frames import DIAL_BYTES, MAGIC
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.receiving import Receiving

MakeEnd = Callable[..., End]
QUICK = Pace(0.05, 1.0)


@pytest.fixture(params=["tcp", "tcp+key"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _fields(end: End) -> list[Any]:
    fields = msgspec.msgpack.decode(end.transport.address())
    assert isinstance(fields, list)
    return fields


def _port(end: End) -> int:
    return int(_fields(end)[1])


def _address(end: End, **changes: Any) -> bytes:
    known = dict(zip(TcpAddress.__struct_fields__, _fields(end), strict=True)) | changes
    return msgspec.msgpack.encode(list(known.values()))


def _assert_serves(producer: End, consumer: End) -> None:
    link, _ = meet(producer, consumer)
    producer.send(link, b"still", b"here", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"still", 0, b"here")]


@pytest.fixture
def detour() -> Iterator[Callable[[End], tuple[Relay, bytes]]]:
    """Makes a relay to an end, and the address under which a peer reaches the end through it."""
    relays: list[Relay] = []

    def make(end: End) -> tuple[Relay, bytes]:
        relays.append(Relay(_port(end)))
        return relays[-1], _address(end, port=relays[-1].port)

    yield make
    for relay in relays:
        relay.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 1000,
        b"\xff" * 100_000,
        os.urandom(4096),
        MAGIC + os.urandom(DIAL_BYTES - len(MAGIC)),
        MAGIC,
    ],
    ids=["http", "zeros", "ones", "random", "a dial without the secret", "a dial cut short"],
)
def test_strangers_are_ignored(make_end: MakeEnd, garbage: bytes) -> None:
    producer, consumer = make_end(), make_end()
    with socket.create_connection(("127.0.0.1", _port(producer))) as stranger:
        with contextlib.suppress(ConnectionError):  # cut off already
            stranger.sendall(garbage)
        _assert_serves(producer, consumer)


def test_a_crowd_of_silent_strangers_is_bounded_and_keeps_nobody_out(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    before = len(os.listdir("/proc/self/fd"))
    crowd = [socket.create_connection(("127.0.0.1", _port(producer))) for _ in range(100)]
    for _ in range(3):
        crowd += [socket.create_connection(("127.0.0.1", _port(producer))) for _ in range(60)]
        producer.poll()
    for _ in range(20):
        producer.poll()
    ours = len(os.listdir("/proc/self/fd")) - before - len(crowd)
    assert ours <= listening.MAX_PENDING
    _assert_serves(producer, consumer)
    for stranger in crowd:
        stranger.close()


def test_a_stranger_who_says_nothing_is_cut_off(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.2)
    producer = make_end()
    with socket.create_connection(("127.0.0.1", _port(producer))) as stranger:
        stranger.setblocking(False)

        def cut_off() -> bool:
            try:
                return stranger.recv(1) == b""
            except BlockingIOError:
                return False

        drive(producer, until=cut_off)


def test_a_chunk_larger_than_a_slot_is_not_sent(make_end: MakeEnd) -> None:
    producer, consumer = make_end(slot_bytes=2 * SLOT_BYTES), make_end()
    link, _ = meet(producer, consumer)
    with pytest.raises(TransportError, match=f"slots of {SLOT_BYTES} bytes"):
        producer.send(link, b"", b"x" * (SLOT_BYTES + 1), slot=0)


def test_a_producer_that_believes_in_larger_slots_is_cut_off(make_end: MakeEnd) -> None:
    producer, consumer = make_end(slot_bytes=2 * SLOT_BYTES), make_end()
    link = producer.transport.connect(_address(consumer, slot_bytes=2 * SLOT_BYTES))
    consumer.transport.expect(producer.transport.address())
    producer.send(link, b"too large", b"x" * 2 * SLOT_BYTES, slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written))
    assert not producer.written[0].ok
    producer.send(link, b"fits", b"x" * SLOT_BYTES, slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"fits", 0, b"x" * SLOT_BYTES)]


def test_a_write_has_ended_when_the_consumer_has_it_and_not_before(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    link, _ = meet(producer, consumer)
    producer.send(link, b"first", b"x", slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written))
    producer.send(link, b"second", b"x", slot=1)
    for _ in range(100):
        producer.poll()
    assert len(producer.written) == 1
    drive(producer, consumer, until=lambda: len(producer.written) == 2)
    assert len(consumer.landed) == 2


def test_what_a_consumer_does_not_take_is_neither_copied_nor_without_bound(
    make_end: MakeEnd,
) -> None:
    nbytes = 4 << 20
    producer, consumer = make_end(slot_bytes=nbytes), make_end(slot_bytes=nbytes)
    link, _ = meet(producer, consumer)
    producer.send(link, b"", b"x" * nbytes, slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written))
    payload = producer.sending.slot(0)
    before = resident_bytes()
    for slot in range(2 * SLOTS):
        producer.transport.write(link, b"", payload, slot % SLOTS)
        producer.poll()
    with pytest.raises(TransportError, match="16 writes wait for a consumer with 8 slots"):
        producer.transport.write(link, b"", payload, 0)
    assert resident_bytes() - before < nbytes, "2 x 8 chunks wait"


@pytest.mark.parametrize("fault", [Relay.forget, Relay.reset], ids=["forgotten", "reset"])
def test_a_lost_connection_fails_its_writes_and_is_made_again(
    make_end: MakeEnd,
    detour: Callable[[End], tuple[Relay, bytes]],
    fault: Callable[[Relay], None],
) -> None:
    producer, consumer = make_end(pace=QUICK), make_end(pace=QUICK)
    relay, address = detour(producer)
    link = producer.transport.connect(consumer.transport.address())
    consumer.transport.expect(address)
    for number in range(3):
        producer.send(link, b"%d" % number, b"payload", slot=0)
        drive(producer, consumer, until=lambda: bool(producer.written and consumer.landed))
        assert producer.written.pop().ok
        assert consumer.landed == [Arrival(b"%d" % number, 0, b"payload")]
        consumer.landed.clear()
        fault(relay)
        producer.send(link, b"lost", b"payload", slot=1)
        drive(producer, consumer, until=lambda: bool(producer.written))
        assert not producer.written.pop().ok
        assert consumer.landed == []
    assert relay.accepted >= 3


def test_a_slow_link_is_not_taken_for_a_dead_one(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but heartbeats for several times what counts as silence."""
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    producer, consumer = make_end(pace=Pace(0.02, 0.5)), make_end(pace=Pace(0.02, 0.5))
    link, _ = meet(producer, consumer)
    producer.send(link, b"", b"x", slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written))
    connection = producer.transport._links[link]._connection  # type: ignore[attr-defined]
    end = clock.now + 2

    def is_over() -> bool:
        clock.now += 0.01
        return clock.now > end

    drive(producer, consumer, until=is_over)
    assert producer.transport._links[link]._connection is connection  # type: ignore[attr-defined]


class Trickle(Relay):
    """A link of about 25 KB a second. A clock of its own goes on with what passes, so that a machine that stands still for
    a moment makes no silence."""

    def __init__(self, port: int, clock: Clock) -> None:
        self._clock = clock
        super().__init__(port)

    def _forward(self, link: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):  # the peer at the other end sees the failure
            data = link.recv(512)
            (pair[1] if link is pair[0] else pair[0]).sendall(data)
        time.sleep(0.02)
        self._clock.now += 0.02


@pytest.mark.parametrize("looks", [True, False])
def test_a_record_that_takes_longer_than_silence_may_last_is_not_silence(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """The system wakes nobody before there is more of it; who is not woken must look."""
    if not looks:
        monkeypatch.setattr(Receiving, "grows", lambda self: False)
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    producer, consumer = make_end(), make_end(pace=Pace(0.05, 0.5))
    relay = Trickle(_port(producer), clock)
    try:
        link = producer.transport.connect(consumer.transport.address())
        consumer.transport.expect(_address(producer, port=relay.port))
        producer.send(link, b"", b"x" * 40_000, slot=0)
        drive(producer, consumer, until=lambda: bool(producer.written))
    finally:
        relay.close()
    assert producer.written[0].ok == looks


def test_an_old_dial_that_is_sent_again_takes_nobodys_place(
    kind: str, make_end: MakeEnd, detour: Callable[[End], tuple[Relay, bytes]]
) -> None:
    if kind == "tcp":
        pytest.skip("without keys whoever sees the wire is let in")
    producer, consumer = make_end(), make_end()
    relay, address = detour(producer)
    relay.records = True
    link = producer.transport.connect(consumer.transport.address())
    consumer.transport.expect(address)
    producer.send(link, b"first", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written))
    said = bytes(relay.seen)
    dial = said[said.index(MAGIC) :][:DIAL_BYTES]
    connection = producer.transport._links[link]._connection  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", _port(producer))) as replayer:
        replayer.sendall(dial + said[len(dial) :])
        for _ in range(200):
            producer.poll()
            consumer.poll()
        assert producer.transport._links[link]._connection is connection  # type: ignore[attr-defined]
        producer.send(link, b"second", b"payload", slot=0)
        drive(producer, consumer, until=lambda: len(consumer.landed) == 2)


@pytest.mark.parametrize("key", ["another secret of some length", ""])
def test_a_consumer_with_another_key_or_none_gets_nothing(
    kind: str, make_end: MakeEnd, key: str
) -> None:
    if kind == "tcp":
        pytest.skip("without keys everybody who was told the address is let in")
    producer, rightful, wrong = make_end(), make_end(), make_end(key=key)
    link, _ = meet(producer, wrong)
    producer.send(link, b"secret", b"payload", slot=0)
    _assert_serves(producer, rightful)
    for _ in range(50):
        for end in (producer, rightful, wrong):
            end.poll()
    assert wrong.landed == []


def test_a_producer_with_another_key_is_not_believed(kind: str, make_end: MakeEnd) -> None:
    if kind == "tcp":
        pytest.skip("without keys everybody who was told the address is believed")
    rightful, wrong, consumer = make_end(), make_end(key="another secret of 16"), make_end()
    link, _ = meet(wrong, consumer)
    wrong.send(link, b"forged", b"payload", slot=0)
    _assert_serves(rightful, consumer)
    assert [arrival.header for arrival in consumer.landed] == [b"still"]


def test_who_was_not_told_the_secret_of_the_address_gets_nothing(make_end: MakeEnd) -> None:
    """It travels over the control channel; without a key, too, a stranger on the machine lacks it."""
    producer, stranger = make_end(), make_end()
    link = producer.transport.connect(stranger.transport.address())
    producer.send(link, b"secret", b"payload", slot=0)
    stranger.transport.expect(_address(producer, secret=bytes(32)))
    for _ in range(200):
        producer.poll()
        stranger.poll()
    assert stranger.landed == []
    assert producer.written == []


def test_payloads_are_not_readable_on_the_wire_when_a_key_is_set(
    kind: str, make_end: MakeEnd, detour: Callable[[End], tuple[Relay, bytes]]
) -> None:
    secret = b"the plain text of a prompt" * 50
    producer, consumer = make_end(), make_end()
    relay, address = detour(producer)
    relay.records = True
    link = producer.transport.connect(consumer.transport.address())
    consumer.transport.expect(address)
    producer.send(link, b"a header", secret, slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed[0].payload == secret
    assert (secret in relay.seen) == (b"a header" in relay.seen) == (kind == "tcp")


@pytest.mark.parametrize("tells", [False, True])
def test_a_consumer_that_opens_small_records_only_gets_small_ones(
    kind: str, make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """It is of a version that does not say so. If it said what newer ones say, it would get records
    that it refuses."""
    monkeypatch.setattr(receiving, "RECORD_BYTES", LEAST_RECORD_BYTES)
    nbytes = 3 * LEAST_RECORD_BYTES
    producer, consumer = make_end(slot_bytes=nbytes), make_end(slot_bytes=nbytes)
    silent = msgspec.msgpack.encode(_fields(consumer)[:-2])
    said = read_address(consumer.transport.address() if tells else silent).record_bytes
    assert said > LEAST_RECORD_BYTES or not tells
    theirs = _address(consumer, record_bytes=said)
    link = producer.transport.connect(theirs)
    consumer.transport.expect(producer.transport.address())
    producer.send(link, b"", b"x" * nbytes, slot=0)
    drive(producer, consumer, until=lambda: bool(producer.written))
    arrives = kind == "tcp" or not tells
    assert (producer.written[0].ok, len(consumer.landed)) == (arrives, arrives)


def test_a_peer_that_opens_next_to_nothing_is_refused(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    with pytest.raises(TransportError, match="cannot be read"):
        producer.transport.connect(_address(consumer, record_bytes=LEAST_RECORD_BYTES - 1))


@pytest.mark.parametrize("fast", [(True, True), (True, False), (False, False)])
def test_the_cipher_is_what_both_processors_are_fast_at(
    kind: str, make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, fast: tuple[bool, bool]
) -> None:
    made: list[bool] = []
    aead = cipher._aead
    monkeypatch.setattr(cipher, "_aead", lambda key, aes: made.append(aes) or aead(key, aes))
    ends = []
    for is_fast in fast:
        monkeypatch.setattr(transport, "fast_aes", lambda is_fast=is_fast: is_fast)
        ends.append(make_end())
    _assert_serves(*ends)
    assert set(made) == ({all(fast)} if kind == "tcp+key" else set())


@pytest.mark.parametrize("old", ["", "producer", "consumer"])
def test_what_lands_is_verified_where_records_have_tags(
    kind: str, make_end: MakeEnd, old: str
) -> None:
    """Without a key a peer of a version before gives them none."""
    producer, consumer = make_end(), make_end()
    for name, end in (("producer", producer), ("consumer", consumer)):
        address = end.transport._address
        end.transport._address = msgspec.structs.replace(address, sums=old != name)
    link, _ = meet(producer, consumer)

    def verified() -> bool:
        landed: list[bool] = []
        while not landed:
            producer.poll()
            landed += [arrival.verified for arrival in consumer.transport.poll()[1]]
        return landed.pop()

    producer.send(link, b"", b"payload", slot=0)
    assert verified() == producer.transport.verifies == (kind == "tcp+key")
    payload = np.frombuffer(b"payload", np.uint8)
    pieces = Pieces(np.array([payload.ctypes.data], np.uint64), len(payload))
    into = memoryview(bytearray(len(payload)))
    begin = producer.transport.prepare(link, b"", pieces, 0, into)
    assert (begin is None) == (kind == "tcp" and bool(old))
    if begin is not None:
        begin()
        assert verified()


def test_more_chunks_at_once_than_landing_slots_wait_for_each_other(make_end: MakeEnd) -> None:
    consumer = make_end(slots=2)
    producers = [make_end() for _ in range(5)]
    for number, producer in enumerate(producers):
        link, _ = meet(producer, consumer)
        producer.send(link, b"%d" % number, bytes([number]) * SLOT_BYTES, slot=0)
    drive(*producers, consumer, until=lambda: len(consumer.landed) == 5)
    assert sorted(a.payload[0] for a in consumer.landed) == list(range(5))
    assert not consumer.transport.restless


def test_a_host_that_the_config_does_not_permit_is_not_dialled(make_end: MakeEnd) -> None:
    consumer = make_end()
    with pytest.raises(TransportError, match=r"'192\.0\.2\.1' is not loopback"):
        consumer.transport.expect(_address(consumer, host="192.0.2.1"))


@pytest.mark.parametrize("port", [-1, 0, 65_536, 1 << 62])
def test_a_port_that_does_not_exist_is_refused(make_end: MakeEnd, port: int) -> None:
    end = make_end()
    with pytest.raises(TransportError, match="cannot be read"):
        end.transport.expect(_address(end, port=port))


@pytest.mark.parametrize("host", ["", "localhost", "a.name", "host\0name", "[", "127.0.0.1:1"])
def test_a_name_is_not_looked_up_and_says_what_is_wanted(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    end = make_end()
    monkeypatch.setattr(socket, "getaddrinfo", None)
    for learn in (end.transport.expect, end.transport.connect):
        with pytest.raises(TransportError, match=r"is not numeric.*config key host"):
            learn(_address(end, host=host))


def test_a_host_that_is_a_name_is_told_to_peers_as_a_number() -> None:
    slab = Slab(1, SLOT_BYTES)
    made = TcpTransport(slab, slab, "localhost", is_loopback)
    try:
        assert msgspec.msgpack.decode(made.address())[0] in ("127.0.0.1", "::1")
    finally:
        made.close()


def test_a_host_that_is_not_this_machines_cannot_be_listened_on() -> None:
    slab = Slab(1, SLOT_BYTES)
    for host in ("192.0.2.1", "name.invalid"):
        with pytest.raises(TransportError, match=f"cannot listen on '{host}'"):
            TcpTransport(slab, slab, host, is_loopback)


def test_ipv6_loopback_works_like_ipv4() -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    slab = Slab(1, SLOT_BYTES)
    producer, consumer = (TcpTransport(slab, slab, "::1", is_loopback) for _ in range(2))
    try:
        link = producer.connect(consumer.address())
        consumer.expect(producer.address())
        producer.write(link, b"header", memoryview(b"payload"), 0)
        landed: list[bytes] = []
        while not landed:
            producer.poll()
            landed += [bytes(arrival.payload) for arrival in consumer.poll()[1]]
        assert landed == [b"payload"]
    finally:
        producer.close()
        consumer.close()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_who_waits_for_landing_memory_is_not_forgotten_when_somebody_else_gets_some():
    landing = Landing(Slab(1, 64))
    slot = landing.lend()
    assert slot is not None
    assert landing.lend() is None  # it waits
    landing.give_back(slot)
    assert landing.lend() is not None  # another one, in the same turn
    assert landing.starved


def test_the_port_for_data_may_be_fixed() -> None:
    slab = Slab(1, 4096)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        ports = range(port, port + 1)
        with pytest.raises(TransportError, match=f"port {port} is taken.*data_port"):
            TcpTransport(slab, slab, "127.0.0.1", is_loopback, ports=ports)
    made = TcpTransport(slab, slab, "127.0.0.1", is_loopback, ports=ports)
    assert made.port == port
    made.close()
    TcpTransport(slab, slab, "127.0.0.1", is_loopback, ports=ports).close()
