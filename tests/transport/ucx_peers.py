# SPDX-License-Identifier: Apache-2.0
"""Ends of UCX in processes of their own, which starve or die when they are told to."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from support.descriptors import no_descriptors

SLOT_BYTES = 4 << 20


class UcxPeer:
    """A process that runs `live`, and ends when `peer` does.

    Args:
        live: is given `settings`, and the pipe over which it is asked.
    """

    def __init__(self, live: Callable[..., None], *settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=live, args=(*settings, theirs))
        self._process.start()
        theirs.close()

    def ask(self, what: str) -> Any:
        """Let it do something; returns what it answers."""
        self._pipe.send(what)
        assert self._pipe.poll(60.0), f"the other process answers to {what!r}"
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def peer(live: Callable[..., None], *settings: Any) -> Iterator[UcxPeer]:
    """See `UcxPeer`."""
    started = UcxPeer(live, *settings)
    try:
        yield started
    finally:
        started.kill()


def consume(producer: bytes, pipe: Connection) -> None:
    """Expect the producer with this address, for ever."""
    from pd_connector.transport.ucx import UcxTransport

    transport = UcxTransport(SLOT_BYTES)
    transport.expect(producer)
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


def produce(consumer: bytes, pipe: Connection) -> None:
    """Send a message to the consumer with this address, and some of the bytes of another."""
    from pd_connector.transport.ucx import UcxTransport

    transport = UcxTransport(SLOT_BYTES)
    while True:
        transport.poll()
        if not pipe.poll(0.001):
            continue
        match pipe.recv():
            case "address":
                pipe.send(transport.address())
            case "send":
                link = transport.connect(consumer)
                transport.write(link, b"header", memoryview(b"payload"), 0)
                pipe.send(None)
            case "send some":
                transport.write(link, b"header", memoryview(bytes(SLOT_BYTES)), 0)
                transport.poll()
                pipe.send(None)
                pipe.recv()  # not polled any more: the rest is never sent
