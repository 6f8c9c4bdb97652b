# SPDX-License-Identifier: Apache-2.0
"""Connections of the tcp transport end under load, at any byte and in every manner: nothing wrong
arrives, nothing arrives twice, every write ends once, and nothing stays held."""

import contextlib
import os
import random
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_ends import End, drive, meet

from pd_connector.memory.destination import Destination
from pd_connector.memory.pieces import Pieces
from pd_connector.transport.base import LEAST_PIECE_BYTES
from pd_connector.transport.tcp import TcpTransport
from pd_connector.transport.tcp.address import LEAST_RECORD_BYTES, read_address
from pd_connector.transport.tcp.connection import Pace
from pd_connector.transport.tcp.landing import Landing

MakeEnd = Callable[..., End]
PACE = Pace(0.05, 1.0)
SLOTS = 4
PIECE_BYTES = 3 * LEAST_PIECE_BYTES
CHUNK_BYTES = 2 * LEAST_RECORD_BYTES // PIECE_BYTES * PIECE_BYTES
"""Almost two records of the smallest size, in whole pieces."""
SHARES = {"reset": 6, "end": 6, "half": 3, "silence": 1, "trickle": 2}
"""How often a connection ends so, of its random faults. A silent one costs a second."""


class Saboteur:
    """Forwards connections to `port`, each up to a random byte, where it fails in a random manner.

    `reset` is a reset, `end` an orderly end, `half` an orderly end of one direction; after `silence`
    nothing passes any more and the connection stands; with `trickle` it goes on in small pieces for a
    while, and is reset then.
    """

    def __init__(self, port: int, chance: random.Random) -> None:
        self._target = port
        self._chance = chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.failed: dict[str, int] = dict.fromkeys(SHARES, 0)
        self.peace = False  # connections made from now on do not fail
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            (fault,) = self._chance.choices(list(SHARES), list(SHARES.values()))
            limit = 1 << 60 if self.peace else self._chance.randrange(6 * CHUNK_BYTES)
            thread = threading.Thread(target=self._serve, args=(inner, fault, limit), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, inner: socket.socket, fault: str, limit: int) -> None:
        with inner, socket.create_connection(("127.0.0.1", self._target)) as outer:
            ends = {inner: outer, outer: inner}
            try:
                while limit > 0 and not self._stop.is_set():
                    for link in select.select(list(ends), [], [], 0.05)[0]:
                        data = link.recv(min(limit, 1 << 16))
                        if not data:
                            return
                        ends[link].sendall(data)
                        limit -= len(data)
                        if fault == "trickle" and limit < 1 << 16:
                            time.sleep(0.002)
                            limit -= 1 << 10
            except OSError:
                return
            self.failed[fault] += 1
            self._fail(fault, inner, outer)

    def _fail(self, fault: str, inner: socket.socket, outer: socket.socket) -> None:
        if fault in ("reset", "trickle"):
            for link in (inner, outer):
                link.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )  # on, 0 s: a reset
        elif fault == "half":
            inner.shutdown(socket.SHUT_WR)
            self._stop.wait(0.2)
        elif fault == "silence":
            self._stop.wait(2 * PACE.silence_s)


class Pages(Destination):
    """Memory that one chunk is opened into."""

    nbytes = CHUNK_BYTES

    def __init__(self) -> None:
        self.memory_ = np.zeros(CHUNK_BYTES, np.uint8)

    @contextlib.contextmanager
    def memory(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        yield [self.memory_.data[start:stop]]


class Load:
    """Chunks that are written as fast as they are acknowledged, and what became of each."""

    def __init__(self, producer: End, consumer: End, link: Any, chance: random.Random) -> None:
        self.producer, self.consumer, self.link = producer, consumer, link
        self._chance = chance
        self._sources = np.frombuffer(chance.randbytes(SLOTS * CHUNK_BYTES), np.uint8).copy()
        consumer.transport.destinations = self._destination
        self.under_way: dict[int, tuple[int, int]] = {}  # by token: number, and send slot
        self._free = list(range(SLOTS))
        self._slots: dict[int, int] = {}  # the source's number of a chunk
        self._sealed: set[int] = set()
        self.landed: dict[int, int] = {}
        self.acknowledged: set[int] = set()
        self.written = 0
        self.failed = 0

    def write(self) -> None:
        """Write into every slot that is free."""
        while self._free:
            slot, number = self._free.pop(), self.written
            self.written += 1
            self._slots[number] = slot
            payload = self._source(slot)
            into = self.producer.sending.slot(slot, CHUNK_BYTES)
            transport, header = self.producer.transport, b"%d" % number
            begin = None
            if self._chance.random() < 0.5:
                places = np.arange(CHUNK_BYTES // PIECE_BYTES, dtype=np.uint64)
                pieces = Pieces(payload.ctypes.data + places * np.uint64(PIECE_BYTES), PIECE_BYTES)
                begin = transport.prepare(self.link, header, pieces, slot, into)
            if begin is None:
                into[:] = payload.data
                token = transport.write(self.link, header, into, slot)
            else:
                self._sealed.add(number)
                token = begin()
            self.under_way[token] = number, slot

    def poll(self) -> None:
        written, _ = self.producer.transport.poll()
        for one in written:
            number, slot = self.under_way.pop(one.token)  # raises for what has ended already
            self._free.append(slot)
            self.failed += not one.ok
            if one.ok:
                self.acknowledged.add(number)
        for arrival in self.consumer.transport.poll()[1]:
            number = int(arrival.header)
            self.landed[number] = self.landed.get(number, 0) + 1
            wanted = self._source(self._slots[number])
            if isinstance(arrival.payload, Pages):
                assert arrival.payload.memory_.tobytes() == wanted.tobytes()
            else:
                assert bytes(arrival.payload) == wanted.tobytes()

    def _destination(self, header: bytes, slot: int, nbytes: int) -> Destination | None:
        """Half of the chunks with tags are opened into pages."""
        assert nbytes == CHUNK_BYTES
        tags = self.consumer.transport.verifies or int(header) in self._sealed
        return Pages() if tags and self._chance.random() < 0.5 else None

    def _source(self, slot: int) -> np.ndarray:
        return self._sources[slot * CHUNK_BYTES :][:CHUNK_BYTES]


@pytest.fixture(params=["tcp", "tcp+key"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sabotaged(make_end: MakeEnd) -> Iterator[Callable[[int], tuple[Load, Saboteur]]]:
    saboteurs: list[Saboteur] = []

    def make(seed: int) -> tuple[Load, Saboteur]:
        chance = random.Random(seed)
        options = {"slots": SLOTS, "slot_bytes": CHUNK_BYTES, "pace": PACE}
        producer, consumer = make_end(**options), make_end(**options)
        ours, theirs = (read_address(end.transport.address()) for end in (producer, consumer))
        saboteurs.append(Saboteur(ours.port, chance))
        ours = msgspec.structs.replace(ours, port=saboteurs[-1].port)
        theirs = msgspec.structs.replace(theirs, record_bytes=LEAST_RECORD_BYTES)
        link = producer.transport.connect(theirs.encode())
        consumer.transport.expect(ours.encode())
        return Load(producer, consumer, link, chance), saboteurs[-1]

    yield make
    for saboteur in saboteurs:
        saboteur.close()


def landing_of(end: End) -> Landing:
    assert isinstance(end.transport, TcpTransport)
    return end.transport._landing


@pytest.mark.parametrize("seed", range(2))
def test_connections_that_end_at_any_byte_cost_their_chunks_and_nothing_else(
    sabotaged: Callable[[int], tuple[Load, Saboteur]], seed: int
) -> None:
    load, saboteur = sabotaged(seed)
    enough = int(os.environ.get("PD_TEST_SABOTAGES", "12"))
    deadline = time.monotonic() + 600
    while sum(saboteur.failed.values()) < enough:
        assert time.monotonic() < deadline, saboteur.failed
        load.write()
        load.poll()
    saboteur.peace = True
    ended = load.written
    while load.under_way or load.written < ended + 4 * SLOTS:
        assert time.monotonic() < deadline, load.under_way
        if load.written < ended + 4 * SLOTS:
            load.write()
        load.poll()
    assert set(load.landed.values()) == {1}, "each once"
    assert load.acknowledged <= load.landed.keys()
    assert len(load.acknowledged) + load.failed == load.written, "each write ends once"
    assert load.failed > 0, "the negative control: connections did end under load"
    load.poll()
    landing = landing_of(load.consumer)
    landing.recycle()
    taken = {landing.lend() for _ in range(SLOTS)}
    assert taken == set(range(SLOTS)), "landing memory comes home"


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[bool], None]]:
    """Takes this process every free descriptor, or gives them back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def take(all_of_them: bool) -> None:
        if not all_of_them:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            while spare:
                spare.pop().close()
            return
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        with contextlib.suppress(OSError):
            while True:
                spare.append(socket.socket())

    spare: list[socket.socket] = []
    yield take
    take(False)


def test_a_process_without_descriptors_connects_when_it_has_some(
    make_end: MakeEnd, no_descriptors: Callable[[bool], None]
) -> None:
    """Neither a dial nor an accept that finds none costs more than a pause."""
    producer, consumer = make_end(pace=PACE), make_end(pace=PACE)
    port = msgspec.msgpack.decode(producer.transport.address())[1]
    with socket.socket() as stranger:
        no_descriptors(True)
        stranger.connect(("127.0.0.1", port))
        link, _ = meet(producer, consumer)
        producer.send(link, b"", b"payload", slot=0)
        until = time.monotonic() + 3 * PACE.heartbeat_s
        drive(producer, consumer, until=lambda: time.monotonic() > until)
        assert not consumer.landed
        no_descriptors(False)
        drive(producer, consumer, until=lambda: bool(producer.written))
        assert producer.written[0].ok


def test_a_consumer_that_reads_slowly_costs_the_producer_nothing_but_its_slots(
    make_end: MakeEnd,
) -> None:
    """It is polled once for every hundred times that its producer is."""
    options = {"slots": SLOTS, "slot_bytes": CHUNK_BYTES, "pace": PACE}
    producer, consumer = make_end(**options), make_end(**options)
    link, _ = meet(producer, consumer)
    load = Load(producer, consumer, link, random.Random(3))
    poll = consumer.transport.poll
    turns = 0

    def seldom() -> Any:
        nonlocal turns
        turns += 1
        return ([], []) if turns % 100 else poll()

    consumer.transport.poll = seldom  # type: ignore[method-assign]
    deadline = time.monotonic() + 120
    while len(load.acknowledged) < 6 * SLOTS:
        assert time.monotonic() < deadline, load.under_way
        load.write()
        load.poll()
        assert len(load.under_way) <= SLOTS
    assert load.failed == 0
    assert set(load.landed.values()) == {1}
