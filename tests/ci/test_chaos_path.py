# SPDX-License-Identifier: Apache-2.0
"""Faults meet the path that chunks take without them, and a network does to records what is drawn."""

import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.agents import KEY, LONG, Ranks, geometry_of, ranks  # noqa: F401
from support.faulty_transport import FaultPlan, FaultTransport

from chaos.faults import Fault
from chaos.seam import TamperingTransport
from chaos.tampering import Tampering
from chaos.wire import Wires
from chaos.wrapping import WrappingTransport
from pd_connector.transport.tcp import TcpTransport
from pd_connector.transport.tcp.address import (
    IDENTITY_BYTES,
    SECRET_BYTES,
    TcpAddress,
    read_address,
)
from pd_connector.transport.tcp.frames import DATA, DIAL_BYTES, PING, TAG_BYTES, prefix
from pd_connector.transport.tcp.landing import Landing


@pytest.mark.parametrize("key", [KEY, ""], ids=["key", "sums"])
def test_chunks_take_the_same_way_with_each_wrapper_as_without(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    """Two transfers between agents in this process, counted in the transport itself."""
    counts: Counter[str] = Counter()
    prepare, destination = TcpTransport.prepare, Landing.destination

    def prepared(*arguments: Any) -> Any:
        found = prepare(*arguments)
        counts["prepared"] += found is not None
        return found

    def known(*arguments: Any) -> Any:
        found = destination(*arguments)
        counts["known"] += found is not None
        return found

    monkeypatch.setattr(TcpTransport, "prepare", prepared)
    monkeypatch.setattr(Landing, "destination", known)
    wide = {"geometry": geometry_of(page_size=16, key_dim=64, value_dim=64), "pages": 48}
    settings = LONG | {"transports": ("tcp",), "key": key}
    ways = []
    for wrap in (
        lambda inner: inner,
        WrappingTransport,
        lambda inner: TamperingTransport(inner, Tampering(1)),
        lambda inner: FaultTransport(inner, FaultPlan()),
    ):
        producer, consumer = ranks.pair(settings, wrap=wrap, **wide)
        for name in ("first", "second"):  # what is sent before the connection stands is gathered
            counts.clear()
            producer.offer(name, range(20))
            consumer.load(producer.source, name, range(24, 44))
            assert consumer.loaded(name).cause is None
        ways.append(dict(counts))
    assert ways[0]["prepared"] == ways[0]["known"] > 0
    assert all(way == ways[0] for way in ways), ways


FIRST = bytes(DIAL_BYTES)
RECORDS = [prefix(DATA, 3) + b"one" + bytes(TAG_BYTES), prefix(PING, 0) + b"2" * TAG_BYTES]


class Ends:
    """Both ends of a connection over a wire."""

    def __init__(self, wires: Wires, listener: socket.socket, dialler: socket.socket) -> None:
        self.wires, self.listener, self.dialler = wires, listener, dialler

    def heard(self, nbytes: int) -> bytes:
        """What the producer's end hears, up to this number of bytes, or the connection's end."""
        found = b""
        while len(found) < nbytes:
            try:
                data = self.listener.recv(nbytes - len(found))
            except ConnectionResetError:
                break
            if not data:
                break
            found += data
        return found


@pytest.fixture
def tampering() -> Tampering:
    return Tampering(1)


@pytest.fixture
def ends(tampering: Tampering) -> Iterator[Ends]:
    wires = Wires(tampering)
    with socket.create_server(("127.0.0.1", 0)) as server:
        identity, secret = bytes(IDENTITY_BYTES), bytes(SECRET_BYTES)
        address = TcpAddress("127.0.0.1", server.getsockname()[1], identity, secret, 1, 1, True)
        told = []
        wires.expect(address.encode(), lambda changed: told.append(read_address(changed)) or 1)
        with socket.create_connection((told[0].host, told[0].port)) as dialler:
            listener, _ = server.accept()
            with listener:
                for one in (dialler, listener):
                    one.settimeout(10.0)
                dialler.sendall(FIRST)
                ends = Ends(wires, listener, dialler)
                assert ends.heard(len(FIRST)) == FIRST
                yield ends
    wires.close()


def test_a_wire_forwards_both_ways(ends: Ends) -> None:
    ends.dialler.sendall(b"".join(RECORDS))
    assert ends.heard(len(b"".join(RECORDS))) == b"".join(RECORDS)
    ends.listener.sendall(b"answer")
    ends.listener.close()
    assert ends.dialler.recv(100) == b"", "an answer that is cut off is not passed"


@pytest.mark.parametrize(
    ("fault", "passes"),
    [
        (Fault.REPLAY_RECORD, [0, 0, 1]),
        (Fault.SWAP_RECORDS, [1, 0]),
        (Fault.LOSE_RECORD, [1]),
    ],
)
def test_a_record_is_repeated_overtaken_or_lost(
    ends: Ends, tampering: Tampering, fault: Fault, passes: list[int]
) -> None:
    tampering.arm(fault, 1, 1.0)
    ends.dialler.sendall(b"".join(RECORDS))
    wanted = b"".join(RECORDS[number] for number in passes)
    assert ends.heard(len(wanted)) == wanted
    assert tampering.disarm() == 1


@pytest.mark.parametrize("fault", [Fault.FLIP_RECORD, Fault.CORRUPT])
def test_one_bit_of_a_record_is_flipped(ends: Ends, tampering: Tampering, fault: Fault) -> None:
    tampering.arm(fault, 1, 1.0)
    ends.dialler.sendall(RECORDS[0])
    found = ends.heard(len(RECORDS[0]))
    changed = [number for number, byte in enumerate(found) if byte != RECORDS[0][number]]
    assert len(changed) == 1
    assert (found[changed[0]] ^ RECORDS[0][changed[0]]).bit_count() == 1
    if fault is Fault.CORRUPT:
        assert changed[0] in range(8, 11), "a bit of the chunk's bytes"


def test_a_connection_ends_within_a_record(ends: Ends, tampering: Tampering) -> None:
    tampering.arm(Fault.CUT_RECORD, 1, 1.0)
    ends.dialler.sendall(RECORDS[0])
    assert len(ends.heard(1000)) < len(RECORDS[0])
    assert ends.dialler.recv(1) == b""


def test_what_overtakes_nothing_is_not_counted(ends: Ends, tampering: Tampering) -> None:
    tampering.arm(Fault.SWAP_RECORDS, 1, 1.0)
    ends.dialler.sendall(RECORDS[0])
    assert ends.heard(len(RECORDS[0])) == RECORDS[0]
    assert tampering.disarm() == 0
