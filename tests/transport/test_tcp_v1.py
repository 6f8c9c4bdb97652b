# SPDX-License-Identifier: Apache-2.0
"""What only the tcp transport of the previous release has: its port, keys, and hosts."""

import contextlib
import os
import socket
from collections.abc import Callable

import msgspec
import pytest
import zmq
from transport_ends import SLOT_BYTES, Arrival, End, drive, meet

from pd_connector.control.keys import CurveKeys
from pd_connector.errors import TransportError
from pd_connector.hosts import is_loopback
from pd_connector.transport.tcp_v1 import TcpV1Transport

MakeEnd = Callable[..., End]


@pytest.fixture(params=["tcp-v1", "tcp-v1+key"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _port(end: End) -> int:
    port = msgspec.msgpack.decode(end.transport.address())[1]
    assert isinstance(port, int)
    return port


def _assert_serves(producer: End, consumer: End) -> None:
    link, _ = meet(producer, consumer)
    producer.send(link, b"still", b"here", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"still", 0, b"here")]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000, b"\xff" * 100_000, os.urandom(4096)],
    ids=["http", "zeros", "ones", "random"],
)
def test_bytes_that_are_not_zeromq_are_ignored(make_end: MakeEnd, garbage: bytes) -> None:
    producer, consumer = make_end(), make_end()
    with socket.create_connection(("127.0.0.1", _port(producer))) as stranger:
        with contextlib.suppress(ConnectionError):  # cut off already
            stranger.sendall(garbage)
        _assert_serves(producer, consumer)


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"hello"], [b"a"] * 100, [b"\x00pd-tcp", b""], [b"x" * 1_000_000]],
    ids=["empty", "word", "hundred frames", "greeting and more", "too large"],
)
def test_messages_that_are_no_greeting_are_ignored(make_end: MakeEnd, frames: list[bytes]) -> None:
    producer, consumer = make_end(), make_end()
    stranger = consumer.context.socket(zmq.DEALER)
    stranger.linger = 0
    if consumer.keys:
        consumer.keys.present(stranger)
    stranger.connect(f"tcp://127.0.0.1:{_port(producer)}")
    for _ in range(5):
        stranger.send_multipart(frames)
    _assert_serves(producer, consumer)


def test_a_flood_of_greetings_is_forgotten_and_not_kept(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    listener = producer.transport
    assert isinstance(listener, TcpV1Transport)
    strangers = []
    for number in range(30):
        stranger = consumer.context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.routing_id = b"stranger %d" % number
        if consumer.keys:
            consumer.keys.present(stranger)
        stranger.connect(f"tcp://127.0.0.1:{_port(producer)}")
        for _ in range(100):
            stranger.send(b"\x00pd-tcp")
        strangers.append(stranger)
    drive(producer, until=lambda: len(listener._early) == 30)
    _assert_serves(producer, consumer)


def test_chunks_larger_than_a_slot_are_not_taken(make_end: MakeEnd) -> None:
    producer = make_end(slot_bytes=4 * SLOT_BYTES)
    consumer, other = make_end(), make_end(slot_bytes=4 * SLOT_BYTES)
    link, _ = meet(producer, consumer)
    its_link, _ = meet(producer, other)
    producer.send(link, b"too large", b"x" * 4 * SLOT_BYTES, slot=0)
    producer.send(its_link, b"fits", b"x" * 4 * SLOT_BYTES, slot=0)
    drive(producer, consumer, other, until=lambda: bool(other.landed))
    assert consumer.landed == []


@pytest.mark.parametrize("key", ["another secret of some length", ""])
def test_a_consumer_with_another_key_or_none_gets_nothing(
    kind: str, make_end: MakeEnd, key: str
) -> None:
    if kind == "tcp-v1":
        pytest.skip("without keys everybody on the machine is let in")
    producer, rightful, wrong = make_end(), make_end(), make_end(key=key)
    link, _ = meet(producer, wrong)
    producer.send(link, b"secret", b"payload", slot=0)
    _assert_serves(producer, rightful)
    for _ in range(50):
        for end in (producer, rightful, wrong):
            end.poll()
    assert wrong.landed == []


def test_a_producer_with_another_key_is_not_believed(kind: str, make_end: MakeEnd) -> None:
    if kind == "tcp-v1":
        pytest.skip("without keys everybody on the machine is let in")
    rightful, wrong, consumer = make_end(), make_end(key="another secret of 16"), make_end()
    link, _ = meet(wrong, consumer)
    wrong.send(link, b"forged", b"payload", slot=0)
    _assert_serves(rightful, consumer)
    assert [arrival.header for arrival in consumer.landed] == [b"still"]


def test_payloads_are_not_readable_on_the_wire_when_a_key_is_set(kind: str) -> None:
    """A relay between the two ends looks for the payload in what passes."""
    secret = b"the plain text of a prompt" * 50
    producer, consumer = End(kind), End(kind)
    relay = socket.create_server(("127.0.0.1", 0))
    relay.settimeout(60)
    try:
        _, port, identity = msgspec.msgpack.decode(producer.transport.address())
        detour = msgspec.msgpack.encode(("127.0.0.1", relay.getsockname()[1], identity))
        link = producer.transport.connect(consumer.transport.address())
        consumer.transport.expect(detour)
        producer.send(link, b"", secret, slot=0)
        inner, _ = relay.accept()
        outer = socket.create_connection(("127.0.0.1", port))
        seen = _relay_until(inner, outer, producer, consumer)
        assert consumer.landed[0].payload == secret
        assert (secret in seen) == (kind == "tcp-v1")
        inner.close()
        outer.close()
    finally:
        relay.close()
        producer.close()
        consumer.close()


def _relay_until(inner: socket.socket, outer: socket.socket, *ends: End) -> bytes:
    seen = bytearray()
    for link in (inner, outer):
        link.setblocking(False)

    def relayed() -> bool:
        for link, other in ((inner, outer), (outer, inner)):
            try:
                data = link.recv(1 << 16)
            except BlockingIOError:
                continue
            other.sendall(data)
            seen.extend(data)
        return bool(ends[1].landed)

    drive(*ends, until=relayed)
    return bytes(seen)


def test_a_host_that_the_config_does_not_permit_is_not_dialled(make_end: MakeEnd) -> None:
    consumer = make_end()
    address = msgspec.msgpack.encode(("192.0.2.1", 1, b"identity"))
    with pytest.raises(TransportError, match=r"'192\.0\.2\.1' is not loopback"):
        consumer.transport.expect(address)


@pytest.mark.parametrize("port", [-1, 0, 65_536, 1 << 62])
def test_a_port_that_does_not_exist_is_refused(make_end: MakeEnd, port: int) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        make_end().transport.expect(msgspec.msgpack.encode(("127.0.0.1", port, b"identity")))


@pytest.mark.parametrize("host", ["", "a b", "host\0name", ";", "[", "127.0.0.1:1;127.0.0.1"])
def test_a_host_that_is_no_host_does_no_harm(host: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    transport = TcpV1Transport(context, SLOT_BYTES, "127.0.0.1", lambda _: True)
    try:
        # Refused at once, or found out by dialling, as a name is that does not resolve.
        with contextlib.suppress(TransportError):
            transport.dismiss(transport.expect(msgspec.msgpack.encode((host, 1, b"identity"))))
    finally:
        transport.close()
        context.destroy(linger=0)


def test_a_host_that_is_not_this_machines_cannot_be_listened_on() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for host in ("192.0.2.1", "name.invalid"):
            with pytest.raises(TransportError, match=f"cannot listen on '{host}'"):
                TcpV1Transport(context, SLOT_BYTES, host, is_loopback)
    finally:
        context.destroy(linger=0)


def test_ipv6_loopback_works_like_ipv4() -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    producer = TcpV1Transport(context, SLOT_BYTES, "::1", is_loopback)
    consumer = TcpV1Transport(context, SLOT_BYTES, "::1", is_loopback)
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
        context.destroy(linger=0)


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_the_keys_of_one_secret_are_those_of_no_other() -> None:
    assert CurveKeys.derive("a" * 16) == CurveKeys.derive("a" * 16)
    assert not set(CurveKeys.derive("a" * 16)) & set(CurveKeys.derive("b" * 16))
