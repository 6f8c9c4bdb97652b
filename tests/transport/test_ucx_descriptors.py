# SPDX-License-Identifier: Apache-2.0
"""What descriptors do to UCX: it closes its listening socket when it has none for a connection, and keeps those
of dials that failed, and of workers that cancelled a write."""

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest
from support.descriptors import no_descriptors
from support.waits import until
from transport_kinds import UCX

from pd_connector.errors import TransportError
from pd_connector.transport.base import Link, Transport


def _consume(pipe: Connection) -> None:
    """A consumer, in a process of its own: it expects its producer, for ever."""
    from pd_connector.transport.ucx import UcxTransport

    transport = UcxTransport(1 << 16)
    transport.expect(pipe.recv())
    starved = contextlib.ExitStack()
    while True:
        for _ in range(100):
            transport.poll()
        if not pipe.poll(0.001):
            continue
        match pipe.recv():
            case "address":
                pipe.send(transport.address())
            case "starve":
                starved.enter_context(no_descriptors(but=1))
                pipe.send(None)
            case "feed":
                starved.close()
                pipe.send(None)


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

    producer = UcxTransport(1 << 16)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_consume, args=(theirs,), daemon=True)
    process.start()

    def ask(what: str) -> Any:
        ours.send(what)
        assert ours.poll(60.0), "the consumer answers"
        return ours.recv()

    try:
        ours.send(producer.address())
        address = ask("address")
        assert address == ask("address"), "nothing is made anew without need"
        first = link = producer.connect(address)
        for _ in range(3):  # a later worker's sockets have the numbers of those before
            assert _moves(producer, link)
            ask("starve")
            until(lambda address=address: _is_refused(producer, address), "refusal")
            ask("feed")
            with pytest.raises(TransportError, match="cannot reach"):
                producer.connect(address)
            before, address = address, ask("address")
            assert address != before
            link = producer.connect(address)
        assert _moves(producer, first), "who had a session before has it still"
    finally:
        process.terminate()
        process.join()
        producer.close()


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


@pytest.mark.parametrize("kind", [UCX])
@pytest.mark.parametrize("waits", [True, False], ids=["", "that would not wait"])
def test_a_transport_that_is_closed_with_writes_under_way_leaves_nothing_behind(
    kind: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pd_connector.transport.ucx import UcxTransport, transport

    monkeypatch.setattr(transport, "_LINGER_S", 60.0 if waits else 0.0)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_consume, args=(theirs,), daemon=True)
    process.start()

    def close_one() -> int:
        with contextlib.closing(UcxTransport(1 << 20)) as producer:
            link = producer.connect(address)
            for slot in range(8):
                producer.write(link, b"header", memoryview(bytes(1 << 20)), slot)
        return len(os.listdir("/proc/self/fd"))

    with contextlib.closing(UcxTransport(1 << 20)) as expected:
        ours.send(expected.address())
    try:
        ours.send("address")
        assert ours.poll(60.0), "the consumer answers"
        address = ours.recv()
        before = close_one()
        for _ in range(3):
            after = close_one()
        assert (after <= before) == waits, "ucxx keeps workers that cancelled a write"
    finally:
        process.terminate()
        process.join()
