# SPDX-License-Identifier: Apache-2.0
"""UCX closes its listening socket when it has no descriptor for a connection."""

import multiprocessing
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
    starved = no_descriptors(but=1)
    while True:
        for _ in range(100):
            transport.poll()
        if not pipe.poll(0.001):
            continue
        match pipe.recv():
            case "address":
                pipe.send(transport.address())
            case "starve":
                starved.__enter__()
                pipe.send(None)
            case "feed":
                starved.__exit__(None, None, None)
                pipe.send(None)


def _moves(transport: Transport, link: Link) -> bool:
    token = transport.write(link, b"header", memoryview(b"payload"), 0)
    ended: dict[int, bool] = {}

    def done() -> bool:
        ended.update({one.token: one.ok for one in transport.poll()[0]})
        return token in ended

    until(done, "end of the write")
    return ended[token]


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
        first = ask("address")
        assert first == ask("address"), "nothing is made anew without need"
        ask("starve")
        refused = False
        for _ in range(5):  # UCX notices at some connection
            try:
                producer.disconnect(producer.connect(first))
            except TransportError:
                refused = True
        assert refused
        ask("feed")
        with pytest.raises(TransportError, match="cannot reach"):
            producer.connect(first)
        second = ask("address")
        assert second != first
        assert _moves(producer, producer.connect(second))
    finally:
        process.terminate()
        process.join()
        producer.close()
