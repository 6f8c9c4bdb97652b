# SPDX-License-Identifier: Apache-2.0
"""Chunks that are opened into pages while they arrive: only while the pages are their load's."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from support.agents import (  # noqa: F401
    KEY,
    LONG,
    Rank,
    Ranks,
    assert_pages,
    geometry_of,
    ranks,
)
from support.relay import Relay
from support.waits import until

from pd_connector.agent.commands import Drop
from pd_connector.agent.consuming import receive_pipeline as receive_pipeline
from pd_connector.agent.producing import send_pipeline as send_pipeline
from pd_connector.errors import Cause
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.transport.base import Transport
from pd_connector.transport.tcp import TcpTransport

SEALED = LONG | {"transports": ("tcp",), "key": KEY}
each_seal = pytest.mark.parametrize("key", [KEY, ""], ids=["key", "sums"])
WIDE = {"geometry": geometry_of(page_size=16, key_dim=64, value_dim=64), "pages": 48}
"""A page of one layer is one piece of 16 KiB."""
FROM, INTO = range(20), range(24, 44)


class Dam(Relay):
    """Lets `passes` bytes pass to the dialling peer, and the rest when it is opened."""

    def __init__(self, port: int, passes: int) -> None:
        self._passes = passes
        self.opened = threading.Event()
        super().__init__(port)

    def _forward(self, link: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        if link is pair[0] or self.opened.is_set():
            super()._forward(link, pair)
        elif self._passes:
            data = link.recv(self._passes)
            self._passes -= len(data)
            pair[0].sendall(data)
        else:
            self.opened.wait(0.005)


@pytest.fixture
def dammed() -> Iterator[Callable[[int], Callable[[Transport], Transport]]]:
    """Makes agents whose peers reach their data port through a dam."""
    dams: list[Dam] = []

    def make(passes: int) -> Callable[[Transport], Transport]:
        def wrap(transport: Transport) -> Transport:
            if isinstance(transport, TcpTransport):
                address = msgspec.msgpack.decode(transport.address())
                dams.append(Dam(address[1], passes))
                address[1] = dams[-1].port
                changed = msgspec.msgpack.encode(address)
                transport.address = lambda: changed  # type: ignore[method-assign]
            return transport

        return wrap

    make.dams = dams  # type: ignore[attr-defined]
    yield make
    for dam in dams:
        dam.opened.set()
        dam.close()


def forbidden(*_: Any) -> None:
    raise AssertionError("the chunk was copied")


@each_seal
def test_whole_pages_are_neither_gathered_nor_scattered_nor_summed(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    producer, consumer = ranks.pair(SEALED | {"key": key}, **WIDE)
    producer.offer("first", INTO)  # what is sent before the connection stands is gathered
    consumer.load(producer.source, "first", INTO)
    assert consumer.loaded("first").cause is None
    for name in ("gather", "scatter"):
        monkeypatch.setattr(PagedCache, name, forbidden)
    for module in (receive_pipeline, send_pipeline):
        monkeypatch.setattr(module, "checksum_of", forbidden)
    producer.offer("t", FROM)
    consumer.load(producer.source, "t", INTO)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, FROM, consumer, INTO)


def of_before(transport: Transport) -> Transport:
    """Without a key its records have no tags."""
    if isinstance(transport, TcpTransport):
        transport._address = msgspec.structs.replace(transport._address, sums=False)
    return transport


@each_seal
@pytest.mark.parametrize("change", ["codec", "producer of before", "consumer of before"])
def test_what_has_no_tags_or_is_coded_is_copied(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    change: str,
) -> None:
    copied = change == "codec" or not key
    if copied:
        monkeypatch.setattr(receive_pipeline.ChunkPages, "memory", forbidden)
    settings = SEALED | {"key": key} | ({"codec": "int8"} if change == "codec" else {})
    sides = []
    for number, side in enumerate(("producer", "consumer")):
        wrap = {"wrap": of_before} if change == f"{side} of before" else {}
        roles = {"produces": side == "producer", "consumes": side == "consumer"}
        sides.append(ranks(settings, seed=number, **wrap, **roles, **WIDE))
    producer, consumer = sides
    producer.offer("t", FROM)
    consumer.load(producer.source, "t", INTO)
    assert consumer.loaded("t").cause is None


def test_a_page_that_is_not_of_the_cache_costs_its_load_and_nothing_else(
    ranks: Ranks,  # noqa: F811
) -> None:
    producer, consumer = ranks.pair(SEALED, **WIDE)
    producer.offer("t", FROM)
    consumer.load(producer.source, "t", [*INTO[:-1], 1000])
    assert consumer.loaded("t").cause is Cause.INTERNAL
    consumer.count("session_errors")
    consumer.counts.clear()
    producer.offer("next", FROM)
    consumer.load(producer.source, "next", INTO)
    assert consumer.loaded("next").cause is None


def test_an_error_while_a_chunk_arrives_costs_its_connection_and_nothing_else(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a transport asks of the agent may fail as well as the transport itself."""
    producer, consumer = ranks.pair(SEALED, **WIDE)
    other = ranks(SEALED, consumes=False, seed=2, **WIDE)
    consumer.load(other.source, "other", INTO, wait=True)
    until(lambda: other.gauge("outgoing_transfers"), "the other transfer to be opened")

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyError("a defect")

    monkeypatch.setattr(receive_pipeline.ReceivePipeline, "destination", fail)
    producer.offer("t", FROM)
    consumer.load(producer.source, "t", range(20))
    assert consumer.loaded("t").cause is Cause.TRANSPORT
    other.offer("other", FROM)
    assert consumer.loaded("other").cause is None
    assert consumer.count("agent_failures") == 0
    producer.offer("next", FROM)
    consumer.load(producer.source, "next", INTO)
    assert consumer.loaded("next").cause is None


def arriving(consumer: Rank) -> bool:
    """Whether a chunk is on its way into pages."""
    transport = next(t for t in consumer.transports if isinstance(t, TcpTransport))
    links = [peer._connection for peer in transport._producers.values()]
    return any(link and link._receiving._destination for link in links)


@pytest.mark.parametrize("guarded", [True, False])
def test_pages_of_a_load_that_was_dropped_are_not_written_any_more(
    ranks: Ranks,  # noqa: F811
    dammed: Any,
    monkeypatch: pytest.MonkeyPatch,
    guarded: bool,
) -> None:
    """Without the guard the engine's next request finds another's KV in its pages."""
    if not guarded:

        @contextlib.contextmanager
        def memory(
            self: receive_pipeline.ChunkPages, start: int, stop: int
        ) -> Iterator[Sequence[memoryview]]:
            yield list(self._pieces.buffers(start, stop))
            self._filled += stop - start

        monkeypatch.setattr(receive_pipeline.ChunkPages, "memory", memory)
    producer = ranks(SEALED, consumes=False, wrap=dammed(1500), **WIDE)
    consumer = ranks(SEALED, seed=1, produces=False, **WIDE)
    producer.offer("t", FROM)
    consumer.load(producer.source, "t", INTO)
    until(lambda: arriving(consumer), "a chunk whose head has come")
    consumer.agent.submit(Drop("load of t", Cause.ABORTED))
    until(lambda: not consumer.gauge("incoming_transfers"), "the load is gone")
    for layer in consumer.layers.values():  # the engine's next request has the pages
        layer[list(INTO)] = 1.0
    dammed.dams[0].opened.set()
    until(lambda: consumer.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER), "the chunk")
    untouched = all((layer[list(INTO)] == 1.0).all() for layer in consumer.layers.values())
    assert untouched == guarded
    producer.offer("next", FROM)  # the connection goes on
    consumer.load(producer.source, "next", INTO)
    assert consumer.loaded("next").cause is None
    assert_pages(producer, FROM, consumer, INTO)


def complete(consumer: Rank) -> bool:
    """Whether the consumer has been told of the whole prompt of `t`."""
    side = consumer.loop.consumer_side
    incoming = side._consumer._transfers.get("t") if side else None
    return incoming is not None and all(stream.complete for stream in incoming.streams.values())


def test_a_prompt_that_is_computed_to_its_end_while_a_chunk_arrives(
    ranks: Ranks,  # noqa: F811
    dammed: Any,
) -> None:
    producer = ranks(SEALED, consumes=False, wrap=dammed(1500), **WIDE)
    consumer = ranks(SEALED, seed=1, produces=False, **WIDE)
    consumer.load(producer.source, "t", INTO, wait=True)
    producer.offer("t", FROM, computed=160)
    until(lambda: arriving(consumer), "a chunk whose head has come")
    assert not complete(consumer)
    producer.offer("t", FROM)
    until(lambda: complete(consumer), "the end of the prompt")
    dammed.dams[0].opened.set()
    assert consumer.loaded("t").cause is None
    assert_pages(producer, FROM, consumer, INTO)
