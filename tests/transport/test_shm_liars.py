# SPDX-License-Identifier: Apache-2.0
"""Processes of the same user that speak the shared-memory transport's protocol, and do not keep it."""

import os
import select
import socket
from collections.abc import Iterator

import msgspec
import pytest

from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.transport.shm.address import read_address
from pd_connector.transport.shm.rendezvous import Listener, connect
from pd_connector.transport.shm.transport import ShmTransport

SLOT_BYTES = 4096
TOKEN = b"token of a liar."


@pytest.fixture
def transport() -> Iterator[ShmTransport]:
    landing, sending = (Slab(4, SLOT_BYTES, shared=True) for _ in range(2))
    made = ShmTransport(landing, sending)
    yield made
    made.close()
    landing.close()
    sending.close()


class Liar:
    """A consumer that listens as one does, and hands over nothing by itself."""

    def __init__(self, transport: ShmTransport) -> None:
        self._listener = Listener()
        told = read_address(transport.address())
        address = msgspec.structs.replace(told, listener=self._listener.name, token=TOKEN)
        self.link = transport.connect(msgspec.msgpack.encode(address))
        (connection,) = self._listener.accept({told.token})
        self.socket: socket.socket = connection.link
        for descriptor in connection.descriptors:
            os.close(descriptor)

    def close(self) -> None:
        self.socket.close()
        self._listener.close()


@pytest.fixture
def liar(transport: ShmTransport) -> Iterator[Liar]:
    made = Liar(transport)
    yield made
    made.close()


def wakes(transport: ShmTransport) -> bool:
    """Whether the agent's thread would be woken again after it has polled."""
    transport.poll()
    return bool(select.select(transport.pollables, [], [], 0)[0])


def test_chunks_for_a_consumer_that_hands_over_no_slab_are_not_piled_up(
    transport: ShmTransport, liar: Liar
):
    payload = memoryview(bytes(SLOT_BYTES))
    for _ in range(8):
        transport.write(liar.link, b"header", payload, 0)
        transport.poll()
    for _ in range(2):
        with pytest.raises(TransportError, match="wait for the consumer's slab"):
            transport.write(liar.link, b"header", payload, 0)


def test_a_consumer_that_has_hung_up_wakes_nobody(transport: ShmTransport, liar: Liar):
    liar.socket.close()
    assert not wakes(transport)
    with pytest.raises(TransportError, match="has hung up"):
        transport.write(liar.link, b"header", memoryview(b"payload"), 0)


def test_a_consumer_that_hands_over_something_else_is_told_no_more(
    transport: ShmTransport, liar: Liar
):
    transport.write(liar.link, b"header", memoryview(b"waits"), 0)
    socket.send_fds(liar.socket, [b"\0"], [0])
    assert not wakes(transport)
    with pytest.raises(TransportError, match="no slab as it announced"):
        transport.write(liar.link, b"header", memoryview(b"payload"), 0)


def test_a_producer_does_not_take_descriptors_without_end(transport: ShmTransport):
    told = read_address(transport.address())
    source = transport.expect(transport_address(told.listener))
    links = []
    for _ in range(40):
        links.append(connect(told.listener, TOKEN, []))
        transport.poll()
    producer = transport._consuming._producer_of(source)
    assert producer is not None
    assert len(producer.links) == 16
    for link in links:
        link.close()


def transport_address(listener: str) -> bytes:
    return msgspec.msgpack.encode([listener, TOKEN, 4, SLOT_BYTES])
