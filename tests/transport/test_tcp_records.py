# SPDX-License-Identifier: Apache-2.0
"""Records of the tcp transport: what is not the peer's next record, whole, does not open."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from pd_connector.memory.destination import Destination
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import Slab
from pd_connector.transport.tcp.address import LEAST_RECORD_BYTES, TcpAddress
from pd_connector.transport.tcp.cipher import Handshake
from pd_connector.transport.tcp.events import Arrived, Event
from pd_connector.transport.tcp.frames import (
    ACK,
    BARE,
    CHUNK,
    DATA,
    GREET,
    PING,
    PREFIX_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    ChunkHead,
    DialFrame,
    FrameError,
    prefix,
    read_dial,
    token_body,
)
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.receiving import Receiving
from pd_connector.transport.tcp.sealing import Opener, Sealer
from pd_connector.transport.tcp.segments import Segments
from pd_connector.transport.tcp.sending import ChunkWrite, Sending

SLOT_BYTES = 2 * RECORD_BYTES
SHARED = b"a shared secret"


def address(name: bytes) -> TcpAddress:
    return TcpAddress("127.0.0.1", 1, name * 16, os.urandom(32), 1, 1, True, sums=True)


DIALLER, LISTENER = address(b"d"), address(b"l")


def handshake(
    shared: bytes = SHARED, nonce: bytes = bytes(32), *, fast_aes: bool = True
) -> Handshake:
    dialler, listener = (
        msgspec.structs.replace(one, fast_aes=fast_aes) for one in (DIALLER, LISTENER)
    )
    dial = DialFrame(DIALLER.identity, LISTENER.identity, nonce)
    return Handshake(shared, dialler, listener, dial, bytes(32))


SEALS: dict[str, dict[str, Any]] = {
    "AES": {},
    "ChaCha20": {"fast_aes": False},
    "sums": {"shared": b""},
}
"""What records are sealed by, and the `handshake` of which that comes."""
each_seal = pytest.mark.parametrize("seal", SEALS)
in_parts = pytest.mark.parametrize("seal", ["AES", "sums"])


class Line:
    """A socket into which records are put, and the receiving half behind it."""

    def __init__(self, opener: Opener | None, *, chunks: bool = True) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)
        self.landing = Landing(Slab(2, SLOT_BYTES))
        self.receiving = Receiving(self.far, opener, self.landing if chunks else None, Segments())

    def take(self, data: bytes) -> list[Event]:
        """What these bytes say. Raises FrameError."""
        found: list[Event] = []
        rest = memoryview(data)
        while rest:
            rest = rest[self.near.send(rest[: 1 << 16]) :]
            taken = 1
            while taken:
                taken, events = self.receiving.receive()
                found += events
        return found

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def line() -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(opener: Opener | None, **options: bool) -> Line:
        made.append(Line(opener, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def records(
    sealer: Sealer | None, chunks: list[ChunkWrite], record_bytes: int = RECORD_BYTES
) -> list[bytes]:
    """What a producer sends for these chunks, record by record."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    sending = Sending(near, sealer, Segments(), record_bytes)
    for chunk in chunks:
        if sealer is not None and sealer.in_clear:  # else its parts would have no tags
            _, pieces = in_pieces(bytes(chunk.payload), max(1, len(chunk.payload)))
            into = memoryview(bytearray(len(chunk.payload)))
            sending.queue(sending.seal(chunk.head, pieces, into))
        else:
            sending.queue(chunk)
    data = b""
    while sending.busy:
        sending.pump()
        while True:
            try:
                data += far.recv(1 << 20)
            except BlockingIOError:
                break
    near.close()
    far.close()
    found = []
    while data:
        nbytes = int.from_bytes(data[4:8], "little") + PREFIX_BYTES + (TAG_BYTES if sealer else 0)
        found.append(data[:nbytes])
        data = data[nbytes:]
    return found


def chunk(token: int, payload: bytes) -> ChunkWrite:
    return ChunkWrite(ChunkHead(token, len(payload), 0, b"header %d" % token), memoryview(payload))


FIRST, SECOND = os.urandom(SLOT_BYTES), os.urandom(1000)


@pytest.mark.parametrize("seal", [*SEALS, ""])
@pytest.mark.parametrize("nbytes", [0, 1, RECORD_BYTES, RECORD_BYTES + 1, SLOT_BYTES])
def test_chunks_arrive_however_the_bytes_are_cut(
    line: Callable[..., Line], seal: str, nbytes: int
) -> None:
    one = handshake(**SEALS.get(seal, {}))
    sealer = one.listener_seals()[0] if seal else None
    receiver = line(one.dialler_seals()[1] if seal else None)
    payload = FIRST[:nbytes]
    sent = b"".join(records(sealer, [chunk(1, payload), chunk(2, SECOND)]))
    cuts = [*range(0, 200, 7), len(sent) // 2, len(sent)]
    events: list[tuple[ChunkHead, bytes]] = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        for event in receiver.take(sent[start:stop]):
            assert isinstance(event, Arrived)
            assert isinstance(event.payload, memoryview)
            events.append((event.head, bytes(event.payload)))
    assert events == [
        (chunk(1, payload).head, payload),
        (chunk(2, SECOND).head, SECOND),
    ]


def flipped(record: bytes, at: int) -> bytes:
    changed = bytearray(record)
    changed[at] ^= 1
    return bytes(changed)


TAMPERED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit of a payload": lambda r: [r[0], flipped(r[1], 1000), *r[2:]],
    "a bit of a tag": lambda r: [r[0], flipped(r[1], -1), *r[2:]],
    "a bit of a head": lambda r: [flipped(r[0], 30), *r[1:]],
    "a record's length": lambda r: [flipped(r[0], 4), *r[1:]],
    "a record's kind": lambda r: [flipped(r[0], 0), *r[1:]],
    "a record twice": lambda r: [r[0], r[1], r[1], *r[2:]],
    "a chunk twice": lambda r: [*r[:3], *r[:3], *r[3:]],
    "two records exchanged": lambda r: [r[0], r[2], r[1], *r[3:]],
    "two chunks exchanged": lambda r: [*r[3:], *r[:3]],
    "the first record left out": lambda r: r[1:],
    "a segment left out": lambda r: [r[0], *r[2:]],
    "a chunk left out": lambda r: r[3:],
}


@each_seal
@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_tampered_with_does_not_open(
    line: Callable[..., Line], name: str, seal: str
) -> None:
    one = handshake(**SEALS[seal])
    sent = records(one.listener_seals()[0], [chunk(1, FIRST), chunk(2, SECOND)])
    assert len(sent) == 5
    receiver = line(one.dialler_seals()[1])
    arrived: list[tuple[int, bytes]] = []

    def take_all() -> None:
        for record in (*TAMPERED[name](sent), sent[0]):
            for event in receiver.take(record):
                assert isinstance(event, Arrived)
                assert isinstance(event.payload, memoryview)
                arrived.append((event.head.token, bytes(event.payload)))

    with pytest.raises(FrameError):
        take_all()
    for token, payload in arrived:  # what came before
        assert payload == (FIRST, SECOND)[token - 1]


def test_without_tags_a_changed_bit_is_delivered(line: Callable[..., Line]) -> None:
    """The harm with the guard off: this is what the checksum is for then."""
    sent = records(None, [chunk(1, FIRST)])
    (event,) = line(None).take(b"".join([sent[0], flipped(sent[1], 1000)]))
    assert isinstance(event, Arrived)
    assert isinstance(event.payload, memoryview)
    assert bytes(event.payload) != FIRST


def bare(head: ChunkHead, payload: bytes, sealer: Sealer) -> bytes:
    """A chunk as it passes without tags."""
    return sealer.record(CHUNK, head.encode()) + prefix(BARE, len(payload)) + payload


def test_where_tags_are_sums_a_gathered_chunk_passes_as_it_is_and_is_not_verified(
    line: Callable[..., Line],
) -> None:
    """It has a checksum of its own, and is copied nowhere."""
    one = handshake(**SEALS["sums"])
    receiver, sealer = line(one.dialler_seals()[1]), one.listener_seals()[0]
    sending = Sending(receiver.near, sealer, Segments(), RECORD_BYTES)
    near = chunk(1, SECOND)
    sending.queue(near)
    sending.pump()
    _, pieces = in_pieces(SECOND, len(SECOND))
    sending.queue(sending.seal(chunk(2, SECOND).head, pieces, memoryview(bytearray(len(SECOND)))))
    sending.queue(chunk(3, FIRST))
    found: list[tuple[int, bytes, bool]] = []
    while len(found) < 3:
        sending.pump()
        _, events = receiver.receiving.receive()
        for event in events:
            assert isinstance(event, Arrived)
            assert isinstance(event.payload, memoryview)
            found.append((event.head.token, bytes(event.payload), event.verified))
            receiver.landing.recycle()
    assert found == [(1, SECOND, False), (2, SECOND, True), (3, FIRST, False)]


def test_one_part_without_a_tag_and_the_chunk_is_not_verified(line: Callable[..., Line]) -> None:
    one = handshake(**SEALS["sums"])
    sealed = records(one.listener_seals()[0], [chunk(1, FIRST)])
    part = FIRST[RECORD_BYTES:]
    receiver = line(one.dialler_seals()[1])
    assert receiver.take(b"".join(sealed[:2])) == []
    (event,) = receiver.take(prefix(BARE, len(part)) + part)
    assert isinstance(event, Arrived)
    assert isinstance(event.payload, memoryview)
    assert (bytes(event.payload), event.verified) == (FIRST, False)


def test_under_a_key_nothing_passes_without_a_tag(line: Callable[..., Line]) -> None:
    one = handshake()
    receiver = line(one.dialler_seals()[1])
    with pytest.raises(FrameError, match="a record of kind 6"):
        receiver.take(bare(chunk(1, SECOND).head, SECOND, one.listener_seals()[0]))


def test_what_has_neither_tag_nor_checksum_is_not_written_into_pages(
    line: Callable[..., Line],
) -> None:
    one = handshake(**SEALS["sums"])
    receiver = line(one.dialler_seals()[1])
    receiver.landing.destinations = lambda *_: Pages(SLOT_BYTES, 1 << 14)
    with pytest.raises(FrameError, match="without a tag"):
        receiver.take(bare(chunk(1, FIRST).head, FIRST, one.listener_seals()[0]))


def test_records_of_another_connection_or_direction_do_not_open(line: Callable[..., Line]) -> None:
    sealed = {
        "another nonce": handshake(nonce=b"n" * 32).listener_seals()[0],
        "another key": handshake(b"another").listener_seals()[0],
        "our own": handshake().dialler_seals()[0],
    }
    for sealer in sealed.values():
        with pytest.raises(FrameError, match="does not open"):
            line(handshake().dialler_seals()[1]).take(records(sealer, [chunk(1, SECOND)])[0])


def test_a_chunk_that_is_cut_off_is_not_delivered(line: Callable[..., Line]) -> None:
    one = handshake()
    sent = b"".join(records(one.listener_seals()[0], [chunk(1, FIRST)]))
    receiver = line(one.dialler_seals()[1])
    assert receiver.take(sent[:-1]) == []
    receiver.near.close()
    with pytest.raises(ConnectionResetError):
        receiver.receiving.receive()
    receiver.receiving.close()
    assert {receiver.landing.lend(), receiver.landing.lend()} == {0, 1}, "slots come home"


WRONG: dict[str, tuple[bool, bytes]] = {
    "an unknown kind": (True, prefix(99, 0)),
    "a greeting to a consumer": (True, prefix(GREET, 0)),
    "a ping with a body": (True, prefix(PING, 5)),
    "data of no chunk": (True, prefix(DATA, 5)),
    "a chunk without a head": (True, prefix(CHUNK, 3)),
    "a header too long": (True, prefix(CHUNK, 1 << 20)),
    "a chunk too large": (True, prefix(CHUNK, 20) + ChunkHead(1, SLOT_BYTES + 1, 0, b"").encode()),
    "more data than announced": (
        True,
        prefix(CHUNK, 20) + ChunkHead(1, 10, 0, b"").encode() + prefix(DATA, 11),
    ),
    "a ping within a chunk": (
        True,
        prefix(CHUNK, 20) + ChunkHead(1, 10, 0, b"").encode() + prefix(PING, 0),
    ),
    "a chunk to a producer": (False, prefix(CHUNK, 20)),
    "an acknowledgement too long": (False, prefix(ACK, 1 << 30)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_peer_says_ends_the_connection(line: Callable[..., Line], name: str) -> None:
    chunks, data = WRONG[name]
    with pytest.raises(FrameError):
        line(None, chunks=chunks).take(data)


@each_seal
def test_random_bytes_never_land_where_records_have_tags(
    line: Callable[..., Line], seal: str
) -> None:
    for _ in range(200):
        receiver = line(handshake(**SEALS[seal]).dialler_seals()[1])
        try:
            assert receiver.take(os.urandom(500)) == []
        except FrameError:
            continue
        finally:
            receiver.close()


def test_a_chunk_counts_as_sent_when_its_last_byte_is() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    sending = Sending(near, handshake().listener_seals()[0], Segments(), RECORD_BYTES)
    sending.queue(chunk(1, FIRST))
    sending.queue(chunk(2, SECOND))
    sending.pump()
    assert not sending.sent(1)  # a socket pair does not take all of it at once
    assert not sending.sent(2)
    assert sending.withdraw(2)
    assert not sending.withdraw(1)
    while sending.busy:
        far.recv(1 << 20)
        sending.pump()
    assert sending.sent(1)
    near.close()
    far.close()


PIECE = 24 << 10


def in_pieces(payload: bytes, piece_bytes: int = PIECE) -> tuple[np.ndarray, Pieces]:
    """A payload in pieces that lie apart and in no order; the memory, and the pieces."""
    count = -(-len(payload) // piece_bytes)
    memory = np.zeros(2 * count * piece_bytes, np.uint8)
    places = np.random.default_rng(1).permutation(2 * count)[:count] * piece_bytes
    for number, place in enumerate(places):
        part = payload[number * piece_bytes :][:piece_bytes]
        memory[place : place + len(part)] = np.frombuffer(part, np.uint8)
    return memory, Pieces(memory.ctypes.data + places.astype(np.uint64), piece_bytes)


def whole(memory: np.ndarray, pieces: Pieces) -> bytes:
    at = (pieces.addresses - np.uint64(memory.ctypes.data)).astype(int)
    return b"".join(bytes(memory[place : place + pieces.piece_bytes]) for place in at)


class Pages(Destination):
    """Memory in pieces that a chunk is opened into, until it is taken back."""

    def __init__(self, nbytes: int, piece_bytes: int) -> None:
        self.nbytes = nbytes
        self.buffer, self.pieces = in_pieces(bytes(nbytes), piece_bytes)
        self.taken_back = False

    @contextlib.contextmanager
    def memory(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        yield () if self.taken_back else list(self.pieces.buffers(start, stop))


@in_parts
@pytest.mark.parametrize("pieces", [1, RECORD_BYTES // PIECE, SLOT_BYTES // PIECE])
def test_a_chunk_is_sealed_from_pieces_and_opened_into_others(
    line: Callable[..., Line], pieces: int, seal: str
) -> None:
    one, nbytes = handshake(**SEALS[seal]), pieces * PIECE
    receiver = line(one.dialler_seals()[1])
    untagged = seal == "sums"  # what is gathered has no tags then, and lands where it can be summed
    pages = {1: Pages(nbytes, 8 << 10), 2: None, 3: None if untagged else Pages(nbytes, PIECE)}
    receiver.landing.destinations = lambda header, slot, nbytes: pages[slot]
    sending = Sending(receiver.near, one.listener_seals()[0], Segments(), RECORD_BYTES)
    payload, events = FIRST[:nbytes], list[Event]()
    slots = []
    for token in (1, 2):
        memory, source = in_pieces(payload)
        slots.append(memoryview(bytearray(nbytes)))
        assert sending.can_seal
        head = ChunkHead(token, nbytes, token, b"header")
        sending.queue(sending.seal(head, source, slots[-1]))
        memory[:] = 0
        assert (bytes(slots[-1]) == payload) == (seal == "sums")
    sending.say(PING)
    assert not sending.can_seal, "its number would come before that of the ping"
    sending.queue(ChunkWrite(ChunkHead(3, nbytes, 3, b""), memoryview(payload)))
    while len(events) < 3:
        sending.pump()
        events += receiver.receiving.receive()[1]
    for token, event in enumerate(events, 1):
        assert isinstance(event, Arrived)
        assert event.head.token == token
        if isinstance(event.payload, Pages):
            assert event.payload is pages[token]
            assert whole(event.payload.buffer, event.payload.pieces) == payload
        else:
            assert isinstance(event.payload, memoryview)
            assert bytes(event.payload) == payload
    free = [receiver.landing.lend() for _ in range(2)]
    assert free.count(None) == (2 if untagged else 1), "other chunks do not lie in landing memory"


@in_parts
@pytest.mark.parametrize("tampered", [False, True])
def test_pages_that_are_taken_back_are_not_written_and_the_rest_is_still_verified(
    line: Callable[..., Line], tampered: bool, seal: str
) -> None:
    one = handshake(**SEALS[seal])
    receiver, pages = line(one.dialler_seals()[1]), Pages(SLOT_BYTES, 1 << 14)
    receiver.landing.destinations = lambda *_: pages
    sent = records(one.listener_seals()[0], [chunk(1, FIRST), chunk(2, SECOND)])
    assert receiver.take(b"".join(sent[:2])) == []
    pages.taken_back = True
    if tampered:
        with pytest.raises(FrameError, match="does not open"):
            receiver.take(flipped(sent[2], 9))
        return
    (event,) = receiver.take(sent[2])
    assert isinstance(event, Arrived)
    assert event.payload is pages
    got = whole(pages.buffer, pages.pieces)
    assert got == FIRST[:RECORD_BYTES] + bytes(SLOT_BYTES - RECORD_BYTES)


@in_parts
def test_a_sealed_chunk_is_not_withdrawn_and_a_gap_ends_the_connection(
    line: Callable[..., Line], seal: str
) -> None:
    """The numbers of its records have been used."""
    one = handshake(**SEALS[seal])
    receiver = line(one.dialler_seals()[1])
    sending = Sending(receiver.near, one.listener_seals()[0], Segments(), RECORD_BYTES)
    _, pieces = in_pieces(FIRST[:PIECE])
    slot = memoryview(bytearray(PIECE))
    left_out = sending.seal(ChunkHead(1, PIECE, 0, b""), pieces, slot)
    sending.queue(sending.seal(ChunkHead(2, PIECE, 0, b""), pieces, slot))
    assert not sending.withdraw(2)
    sending.pump()
    assert left_out.frames
    with pytest.raises(FrameError, match="does not open"):
        receiver.receiving.receive()


@in_parts
def test_a_record_that_was_changed_on_its_way_does_not_open_into_pages(
    line: Callable[..., Line], seal: str
) -> None:
    one = handshake(**SEALS[seal])
    receiver = line(one.dialler_seals()[1])
    receiver.landing.destinations = lambda *_: Pages(SLOT_BYTES, 1 << 14)
    sent = records(one.listener_seals()[0], [chunk(1, FIRST)])
    with pytest.raises(FrameError, match="does not open"):
        receiver.take(b"".join([sent[0], flipped(sent[1], 9), *sent[2:]]))


def test_a_dial_is_read_as_it_was_written() -> None:
    dial = DialFrame(b"d" * 16, b"l" * 16, os.urandom(32))
    assert read_dial(dial.encode() + b"c" * 32) == (dial, b"c" * 32)


@each_seal
def test_acknowledgements_pass(line: Callable[..., Line], seal: str) -> None:
    one = handshake(**SEALS[seal])
    sealer = one.dialler_seals()[0]
    receiver = line(one.listener_seals()[1], chunks=False)
    said = b"".join(
        sealer.record(kind, body)
        for kind, body in ((GREET, b""), (ACK, token_body(7)), (PING, b""), (ACK, token_body(8)))
    )
    kinds = [type(event).__name__ for event in receiver.take(said)]
    assert kinds == ["Greeted", "Acked", "Acked"]


@pytest.mark.parametrize("in_pieces_", [False, True], ids=["gathered", "in pieces"])
def test_records_are_as_large_as_the_peer_opens(in_pieces_: bool) -> None:
    """A peer that does not say opens 512 KiB, and ends the connection for more."""
    for limit in (LEAST_RECORD_BYTES, RECORD_BYTES):
        sealer = handshake().listener_seals()[0]
        if not in_pieces_:
            sizes = [
                len(r) - PREFIX_BYTES - TAG_BYTES for r in records(sealer, [chunk(1, FIRST)], limit)
            ]
        else:
            near, far = socket.socketpair()
            with near, far:
                sending = Sending(near, sealer, Segments(), limit)
                _, pieces = in_pieces(FIRST, 1 << 14)
                slot = memoryview(bytearray(SLOT_BYTES))
                frames = sending.seal(ChunkHead(1, SLOT_BYTES, 0, b""), pieces, slot).frames
                sizes = [0, *map(len, frames[1::2])]
        assert sizes[1:] == [limit] * (SLOT_BYTES // limit)


def test_a_segment_is_shared_by_connections_and_not_by_chunks_under_way(
    line: Callable[..., Line],
) -> None:
    one, two = handshake(), handshake(nonce=b"2" * 32)
    segments = Segments()
    receivers = []
    for each in (one, two):
        receivers.append(line(each.dialler_seals()[1]))
        receivers[-1].receiving._segments = segments
    sent = [records(each.listener_seals()[0], [chunk(1, FIRST)]) for each in (one, two)]
    for receiver, theirs in zip(receivers, sent, strict=True):  # both within their first record
        assert receiver.take(theirs[0] + theirs[1][:-9]) == []
    for receiver, theirs in zip(receivers, sent, strict=True):
        (event,) = receiver.take(theirs[1][-9:] + theirs[2])
        assert isinstance(event, Arrived)
        assert isinstance(event.payload, memoryview)
        assert bytes(event.payload) == FIRST
    segment = segments.take()
    segments.give_back(segment)
    assert segments.take() is segment
