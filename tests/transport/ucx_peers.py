# SPDX-License-Identifier: Apache-2.0
"""Ends of UCX in processes of their own, which starve or die when they are told to."""

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from support.descriptors import no_descriptors

SLOT_BYTES = 4 << 20


class UcxPeer:
    """A process that runs `consume` or `produce`, while inside the `with` block.

    Args:
        live: one of these.
        address: of the other end.
    """

    def __init__(self, live: Callable[[Connection], None], address: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=live, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.send(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._pipe.close()

    def ask(self, what: str) -> Any:
        """Let it do something; returns what it answers."""
        self._pipe.send(what)
        assert self._pipe.poll(60.0), f"the other process answers to {what!r}"
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def consume(pipe: Connection) -> None:
    """Expect a producer, for ever."""
    from pd_connector.transport.ucx import UcxTransport

    transport = UcxTransport(SLOT_BYTES)
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


def produce(pipe: Connection) -> None:
    """Send a message, and some of the bytes of another."""
    from pd_connector.transport.ucx import UcxTransport

    transport = UcxTransport(SLOT_BYTES)
    address = pipe.recv()
    while True:
        transport.poll()
        if not pipe.poll(0.001):
            continue
        match pipe.recv():
            case "address":
                pipe.send(transport.address())
            case "send":
                link = transport.connect(address)
                transport.write(link, b"header", memoryview(b"payload"), 0)
                pipe.send(None)
            case "send some":
                transport.write(link, b"header", memoryview(bytes(SLOT_BYTES)), 0)
                transport.poll()
                pipe.send(None)
                pipe.recv()  # not polled any more: the rest is never sent
