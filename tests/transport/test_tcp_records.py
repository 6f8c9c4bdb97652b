# SPDX-License-Identifier: Apache-2.0
"""Records of the tcp transport: what is not the peer's next record, whole, does not open."""

import os
import socket
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from pd_connector.errors import TransportError
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.sealed import Sealed
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Landed
from pd_connector.transport.tcp.address import TcpAddress
from pd_connector.transport.tcp.cipher import Handshake, Opener, Sealer
from pd_connector.transport.tcp.frames import (
    ACK,
    CHUNK,
    DATA,
    GREET,
    PING,
    PREFIX_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    ChunkHead,
    DialFrame,
    FrameError,
    prefix,
    read_dial,
    token_body,
)
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.receiving import Arrived, Event, Receiving
from pd_connector.transport.tcp.sending import ChunkWrite, Sending

SLOT_BYTES = 2 * SEGMENT_BYTES
SHARED = b"a shared secret"


def address(name: bytes) -> TcpAddress:
    return TcpAddress("127.0.0.1", 1, name * 16, os.urandom(32), 1, 1, True)


DIALLER, LISTENER = address(b"d"), address(b"l")


def handshake(
    shared: bytes = SHARED, nonce: bytes = bytes(32), *, fast_aes: bool = True
) -> Handshake:
    dialler, listener = (
        msgspec.structs.replace(one, fast_aes=fast_aes) for one in (DIALLER, LISTENER)
    )
    dial = DialFrame(DIALLER.identity, LISTENER.identity, nonce)
    return Handshake(shared, dialler, listener, dial, bytes(32))


class Line:
    """A socket into which records are put, and the receiving half behind it."""

    def __init__(self, opener: Opener | None, *, chunks: bool = True) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)
        self.landing = Landing(Slab(2, SLOT_BYTES))
        self.receiving = Receiving(self.far, opener, self.landing if chunks else None)

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


def records(sealer: Sealer | None, chunks: list[ChunkWrite]) -> list[bytes]:
    """What a producer sends for these chunks, record by record."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    sending = Sending(near, sealer)
    for chunk in chunks:
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


@pytest.mark.parametrize("cipher", ["AES", "ChaCha20", ""])
@pytest.mark.parametrize("nbytes", [0, 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, SLOT_BYTES])
def test_chunks_arrive_however_the_bytes_are_cut(
    line: Callable[..., Line], cipher: str, nbytes: int
) -> None:
    one = handshake(fast_aes=cipher == "AES")
    sealer = one.listener_ciphers()[0] if cipher else None
    receiver = line(one.dialler_ciphers()[1] if cipher else None)
    payload = FIRST[:nbytes]
    sent = b"".join(records(sealer, [chunk(1, payload), chunk(2, SECOND)]))
    cuts = [*range(0, 200, 7), len(sent) // 2, len(sent)]
    events: list[tuple[ChunkHead, bytes]] = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        for event in receiver.take(sent[start:stop]):
            assert isinstance(event, Arrived)
            events.append((event.head, opened(event)))
    assert events == [
        (chunk(1, payload).head, payload),
        (chunk(2, SECOND).head, SECOND),
    ]


def opened(event: Arrived) -> bytes:
    """The chunk's bytes. Raises TransportError if they are not what the peer sealed."""
    return bytes(Landed(b"", 0, event.payload).opened())


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


@pytest.mark.parametrize("fast_aes", [True, False])
@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_tampered_with_does_not_open(
    line: Callable[..., Line], name: str, fast_aes: bool
) -> None:
    one = handshake(fast_aes=fast_aes)
    sent = records(one.listener_ciphers()[0], [chunk(1, FIRST), chunk(2, SECOND)])
    assert len(sent) == 5
    receiver = line(one.dialler_ciphers()[1])
    arrived: list[tuple[int, bytes]] = []

    def take_all() -> None:
        for record in (*TAMPERED[name](sent), sent[0]):
            for event in receiver.take(record):
                assert isinstance(event, Arrived)
                arrived.append((event.head.token, opened(event)))

    with pytest.raises((FrameError, TransportError)) as caught:
        take_all()
    if caught.type is TransportError:  # nothing that comes after it is taken
        with pytest.raises(FrameError, match="did not open"):
            receiver.take(sent[0])
    for token, payload in arrived:  # what came before
        assert payload == (FIRST, SECOND)[token - 1]


def test_without_a_key_a_changed_bit_is_delivered(line: Callable[..., Line]) -> None:
    """The harm with the guard off: this is what the checksum is for then."""
    sent = records(None, [chunk(1, FIRST)])
    (event,) = line(None).take(b"".join([sent[0], flipped(sent[1], 1000)]))
    assert isinstance(event, Arrived)
    assert opened(event) != FIRST


def test_records_of_another_connection_or_direction_do_not_open(line: Callable[..., Line]) -> None:
    sealed = {
        "another nonce": handshake(nonce=b"n" * 32).listener_ciphers()[0],
        "another key": handshake(b"another").listener_ciphers()[0],
        "our own": handshake().dialler_ciphers()[0],
    }
    for sealer in sealed.values():
        with pytest.raises(FrameError, match="does not open"):
            line(handshake().dialler_ciphers()[1]).take(records(sealer, [chunk(1, SECOND)])[0])


def test_a_chunk_that_is_cut_off_is_not_delivered(line: Callable[..., Line]) -> None:
    one = handshake()
    sent = b"".join(records(one.listener_ciphers()[0], [chunk(1, FIRST)]))
    receiver = line(one.dialler_ciphers()[1])
    assert receiver.take(sent[:-1]) == []
    receiver.near.close()
    with pytest.raises(ConnectionResetError):
        receiver.receiving.receive()
    receiver.receiving.close()
    assert {receiver.landing.take(), receiver.landing.take()} == {0, 1}, "slots come home"


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


def test_random_bytes_never_land_under_a_key(line: Callable[..., Line]) -> None:
    for _ in range(200):
        receiver = line(handshake().dialler_ciphers()[1])
        try:
            assert receiver.take(os.urandom(500)) == []
        except FrameError:
            continue
        finally:
            receiver.close()


def test_a_chunk_counts_as_sent_when_its_last_byte_is() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    sending = Sending(near, handshake().listener_ciphers()[0])
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


@pytest.mark.parametrize(
    "nbytes", [PIECE, SEGMENT_BYTES // PIECE * PIECE, SLOT_BYTES // PIECE * PIECE]
)
def test_a_chunk_is_sealed_from_pieces_and_opened_into_others(
    line: Callable[..., Line], nbytes: int
) -> None:
    one = handshake()
    receiver = line(one.dialler_ciphers()[1])
    near, far = receiver.near, receiver.far
    sending = Sending(near, one.listener_ciphers()[0])
    payload, events = FIRST[:nbytes], list[Event]()
    kept = []  # its memory is read until it has been sent
    for token in (1, 2):
        memory, pieces = in_pieces(payload)
        slot = memoryview(bytearray(nbytes))
        head = ChunkHead(token, nbytes, 0, b"header")
        assert sending.can_seal
        sending.queue(sending.seal(head, pieces, slot))
        kept.append((memory, slot))
        memory[:] = 0
        assert bytes(slot) != payload
    sending.say(PING)
    assert not sending.can_seal, "its number would come before that of the ping"
    sending.queue(chunk(3, SECOND))
    while len(events) < 3:
        sending.pump()
        events += receiver.receiving.receive()[1]
        for event in events[2:]:
            assert isinstance(event, Arrived)
            assert opened(event) == SECOND
        if len(events) == 2:  # they lie in both slots: the third chunk finds none yet
            for event in events:
                assert isinstance(event, Arrived)
                assert isinstance(event.payload, Sealed)
            memory, pieces = in_pieces(bytes(nbytes), 8 << 10)
            events[0].payload.open_into(pieces)
            assert whole(memory, pieces) == payload
            assert opened(events[1]) == opened(events[1]) == payload
            receiver.landing.recycle()
    assert far.fileno() >= 0


def test_a_sealed_chunk_is_not_withdrawn_and_a_gap_ends_the_connection(
    line: Callable[..., Line],
) -> None:
    """The numbers of its records have been used."""
    one = handshake()
    receiver = line(one.dialler_ciphers()[1])
    sending = Sending(receiver.near, one.listener_ciphers()[0])
    _, pieces = in_pieces(FIRST[:PIECE])
    slot = memoryview(bytearray(PIECE))
    left_out = sending.seal(ChunkHead(1, PIECE, 0, b""), pieces, slot)
    sending.queue(sending.seal(ChunkHead(2, PIECE, 0, b""), pieces, slot))
    assert not sending.withdraw(2)
    sending.pump()
    assert left_out.frames
    with pytest.raises(FrameError, match="does not open"):
        receiver.receiving.receive()


def test_a_piece_that_was_changed_on_its_way_does_not_open_into_pages(
    line: Callable[..., Line],
) -> None:
    one = handshake()
    sent = records(one.listener_ciphers()[0], [chunk(1, FIRST)])
    (event,) = line(one.dialler_ciphers()[1]).take(
        b"".join([sent[0], flipped(sent[1], 9), *sent[2:]])
    )
    assert isinstance(event, Arrived)
    assert isinstance(event.payload, Sealed)
    _, pieces = in_pieces(bytes(SLOT_BYTES), 1 << 14)
    with pytest.raises(TransportError, match="does not open"):
        event.payload.open_into(pieces)


def test_a_dial_is_read_as_it_was_written() -> None:
    dial = DialFrame(b"d" * 16, b"l" * 16, os.urandom(32))
    assert read_dial(dial.encode() + b"c" * 32) == (dial, b"c" * 32)


def test_acknowledgements_pass(line: Callable[..., Line]) -> None:
    one = handshake()
    sealer = one.dialler_ciphers()[0]
    receiver = line(one.listener_ciphers()[1], chunks=False)
    said = b"".join(
        sealer.record(kind, body)
        for kind, body in ((GREET, b""), (ACK, token_body(7)), (PING, b""), (ACK, token_body(8)))
    )
    kinds = [type(event).__name__ for event in receiver.take(said)]
    assert kinds == ["Greeted", "Acked", "Acked"]
