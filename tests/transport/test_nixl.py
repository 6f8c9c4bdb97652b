# SPDX-License-Identifier: Apache-2.0
"""What only the NIXL transport has: writes that nobody can stop, and notes from anybody."""

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from transport_ends import SLOT_BYTES, SLOTS, Arrival, End, drive, meet
from transport_peer import Peer

from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.transport.nixl.library import import_nixl
from pd_connector.transport.nixl.transport import NixlTransport

MakeEnd = Callable[..., End]

pytest.importorskip("nixl._api", reason="nixl cannot be imported")
api = import_nixl()

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def kind() -> str:
    return "nixl"


@pytest.fixture
def stranger() -> Any:
    """A NIXL agent that is not a transport of ours."""
    agent = api.nixl_agent("stranger", api.nixl_agent_config(False, backends=[]))
    agent.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"})
    return agent


def test_a_producer_that_is_not_expected_is_not_heard(make_end: MakeEnd) -> None:
    unexpected, expected, consumer = make_end(), make_end(), make_end()
    route = unexpected.transport.connect(consumer.transport.address())
    unexpected.send(route, b"unexpected", b"payload", slot=0)
    drive(unexpected, consumer, until=lambda: bool(unexpected.written))
    its_route, _ = meet(expected, consumer)
    expected.send(its_route, b"expected", b"payload", slot=1)
    drive(expected, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"expected", 1, b"payload")]


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\x00" * 11,
        struct.pack("<IQ", SLOTS, 1),
        struct.pack("<IQ", 0, SLOT_BYTES + 1),
        struct.pack("<IQ", 0xFFFFFFFF, (1 << 64) - 1),
        struct.pack("<IQ", 0, 1) + bytes(1 << 17),
    ],
    ids=["empty", "short", "slot", "too many bytes", "largest", "long header"],
)
def test_a_note_that_says_what_cannot_be_is_dropped(
    make_end: MakeEnd, stranger: Any, note: bytes
) -> None:
    producer, consumer = make_end(), make_end()
    route, _ = meet(producer, consumer)
    metadata = msgspec.msgpack.decode(consumer.transport.address())[1]
    name = stranger.add_remote_agent(metadata).decode()
    # The stranger is believed, so that only its note can be at fault.
    its_address = msgspec.msgpack.decode(producer.transport.address())
    its_name = msgspec.structs.replace(consumer.transport._address, name="")  # type: ignore[attr-defined]
    consumer.transport.expect(msgspec.msgpack.encode(its_name))
    stranger.send_notif(name, note)
    stranger.send_notif(name, struct.pack("<IQ", 2, 3) + b"good")
    while not consumer.landed:
        stranger.get_new_notifs()
        consumer.poll()
    assert [(arrival.header, arrival.slot) for arrival in consumer.landed] == [(b"good", 2)]
    producer.send(route, b"still", b"here", slot=0)
    drive(producer, consumer, until=lambda: len(consumer.landed) == 2)
    assert its_address[0].startswith("pd-")


def test_a_payload_outside_of_the_sending_slab_is_refused(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    route, _ = meet(producer, consumer)
    with pytest.raises(TransportError, match="is not in the sending slab"):
        producer.transport.write(route, b"", memoryview(bytearray(100)), 0)


@pytest.mark.parametrize("metadata", [b"", b"nixlSerDes|", b"garbage" * 100, None])
def test_metadata_that_nixl_cannot_read_is_refused(
    make_end: MakeEnd, metadata: bytes | None
) -> None:
    producer, consumer = make_end(), make_end()
    address = msgspec.msgpack.decode(consumer.transport.address())
    address[1] = address[1][:100] if metadata is None else metadata
    descriptors = []
    for _ in range(3):
        with pytest.raises(TransportError, match="cannot reach the consumer"):
            producer.transport.connect(msgspec.msgpack.encode(address))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert max(descriptors[1:]) <= descriptors[0]  # those of earlier tests may still be closed


def test_loopback_engines_listen_on_loopback_only(make_end: MakeEnd) -> None:
    end = make_end()
    end.transport.connect(make_end().transport.address())
    listening = _listening()
    assert listening
    assert {address for address, _ in listening} == {"0100007F"}


def test_bytes_that_are_not_ucx_are_ignored_on_its_port(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    strangers = []
    for _, port in _listening():
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), os.urandom(5000)):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(garbage)
    for _ in range(100):
        consumer.poll()
        producer.poll()
    route, _ = meet(producer, consumer)
    producer.send(route, b"still", b"here", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"still", 0, b"here")]
    for stranger in strangers:
        stranger.close()


def _listening() -> list[tuple[str, int]]:
    """Hexadecimal address and port of this process's listening TCP sockets."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    address, _, port = fields[1].partition(":")
                    found.append((address, int(port, 16)))
    return found


def test_an_idle_transport_uses_no_processor_time(make_end: MakeEnd) -> None:
    producer, consumer = make_end(), make_end()
    route, _ = meet(producer, consumer)
    producer.send(route, b"", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed and producer.written))
    began = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began < 0.2


def test_a_stopped_consumers_write_reads_its_source_no_more_after_the_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP, whose buffers fill up; releasing the transfer alone would fail this test."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    large = 8 << 20
    producer, consumer = End("nixl", slot_bytes=large), Peer("watcher", "nixl")
    try:
        consumer.tell(producer.transport.address())
        route = producer.transport.connect(consumer.address)
        producer.send(route, b"first", b"\x01", slot=0)
        drive(producer, until=lambda: bool(producer.written))
        consumer.signal(signal.SIGSTOP)
        for slot in range(SLOTS):
            producer.send(route, b"", b"\x07" * large, slot, source=slot)
        for _ in range(100):
            producer.poll()
        assert len(producer.written) < 1 + SLOTS, "the writes were to be under way"
        producer.transport.disconnect(route)
        drive(producer, until=lambda: len(producer.written) == 1 + SLOTS)
        assert not any(written.ok for written in producer.written[-1:])
        for slot in range(SLOTS):
            producer.sending.slot(slot)[:] = b"\xee" * large
        consumer.signal(signal.SIGCONT)
        for _ in range(500):
            producer.poll()
            time.sleep(0.001)
        consumer.tell(b"")
        drive(producer, until=lambda: len(consumer.listen()) == 1)
        assert 0xEE not in consumer.answers[0]
    finally:
        consumer.close()
        producer.close()


def test_the_extra_to_install_is_named_where_nixl_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransportError, match=r"pip install 'pd-connector\[nixl\]'"):
        NixlTransport(Slab(1, 4096), Slab(1, 4096))
