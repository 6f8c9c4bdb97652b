# SPDX-License-Identifier: Apache-2.0
"""What descriptors do to UCX: it closes its listening socket when it has none for a connection, and keeps those
of dials that failed."""

import contextlib
import os

import pytest
from support.waits import until
from transport_kinds import UCX
from ucx_peers import SLOT_BYTES, consume, peer

from pd_connector.errors import TransportError
from pd_connector.transport.base import Link, Transport


def _moves(transport: Transport, link: Link) -> bool:
    token = transport.write(link, b"header", memoryview(b"payload"), 0)
    ended: dict[int, bool] = {}

    def done() -> bool:
        ended.update({one.token: one.ok for one in transport.poll()[0]})
        return token in ended

    until(done, "end of the write")
    return ended[token]


def _is_refused(transport: Transport, address: bytes) -> bool:
    try:
        transport.connect(address)  # not ended: each connection must take a descriptor there
    except TransportError:
        return True
    return False


@pytest.mark.parametrize("kind", [UCX])
def test_a_consumer_that_had_no_descriptors_is_reached_again(kind: str) -> None:
    from pd_connector.transport.ucx import UcxTransport

    with (
        contextlib.closing(UcxTransport(SLOT_BYTES)) as producer,
        peer(consume, producer.address()) as consumer,
    ):
        address = consumer.ask("address")
        assert address == consumer.ask("address"), "nothing is made again without need"
        first = link = producer.connect(address)
        for _ in range(3):  # a later worker's sockets have the numbers of those before
            assert _moves(producer, link)
            consumer.ask("starve")
            until(lambda address=address: _is_refused(producer, address), "refusal")
            consumer.ask("feed")
            with pytest.raises(TransportError, match="cannot reach"):
                producer.connect(address)
            before, address = address, consumer.ask("address")
            assert address != before
            link = producer.connect(address)
        assert _moves(producer, first), "who had a session before has it still"


@pytest.mark.parametrize("kind", [UCX])
def test_dials_that_fail_do_not_use_up_descriptors(kind: str) -> None:
    from pd_connector.transport.ucx import UcxTransport

    with contextlib.closing(UcxTransport(1 << 16)) as gone:
        address = gone.address()
    with contextlib.closing(UcxTransport(1 << 16)) as producer:

        def open_after(dials: int) -> int:
            for _ in range(dials):
                with pytest.raises(TransportError, match="cannot reach"):
                    producer.connect(address)
            return len(os.listdir("/proc/self/fd"))

        most = max(open_after(1) for _ in range(20))
        assert max(open_after(1) for _ in range(20)) <= most
