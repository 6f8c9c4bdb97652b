# SPDX-License-Identifier: Apache-2.0
"""Every frame of a connection, and nothing else.

A connection begins with two frames of fixed size, in clear: the dialler's `DialFrame` and the
listener's answer, each with a code that proves knowledge of the secrets. Then records follow, both
ways: a prefix of 8 bytes, a body and, where it is sealed, its tag (`sealing.py`). A sealed body is no
larger than what its receiver has said that it opens (`TcpAddress.record_bytes`).

    GREET  dialler   a session expects to be written to; the first proves that the dialler is live
    PING   both      nothing else was sent for a heartbeat
    CHUNK  listener  a chunk begins: token, bytes, slot, header
    DATA   listener  its payload, or the next part of it; nothing comes between
    BARE   listener  the same without a tag, where others have one that does not encrypt
    ACK    dialler   the chunk with this token has landed completely
"""

import struct
from typing import NamedTuple

from pd_connector.transport.tcp.address import IDENTITY_BYTES

MAGIC = b"pd-tcp2\0"
NONCE_BYTES = 32
MAC_BYTES = 32
TAG_BYTES = 16

DIAL_BYTES = len(MAGIC) + 2 * IDENTITY_BYTES + NONCE_BYTES + MAC_BYTES
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + MAC_BYTES

GREET, PING, CHUNK, DATA, ACK, BARE = range(1, 7)

RECORD_BYTES = 2 << 20
"""The largest sealed body that is sent and opened here. A record is opened when it is complete, while the
next one arrives; each costs Python's time, on both sides."""
MAX_HEADER_BYTES = 1 << 16

_PREFIX = struct.Struct("<BxxxI")
_CHUNK = struct.Struct("<QQI")
_TOKEN = struct.Struct("<Q")

PREFIX_BYTES = _PREFIX.size
MAX_CHUNK_BYTES = _CHUNK.size + MAX_HEADER_BYTES
"""The largest body of a `CHUNK` record."""

_BODY_LIMITS = {
    GREET: (0, 0),
    PING: (0, 0),
    CHUNK: (_CHUNK.size, MAX_CHUNK_BYTES),
    DATA: (1, (1 << 32) - 1),
    BARE: (1, (1 << 32) - 1),
    ACK: (_TOKEN.size, _TOKEN.size),
}


class FrameError(Exception):
    """Bytes that no peer of ours sends. Ends the connection."""


class DialFrame(NamedTuple):
    """The first frame, without its code."""

    dialler: bytes
    listener: bytes
    nonce: bytes

    def encode(self) -> bytes:
        return MAGIC + self.dialler + self.listener + self.nonce


class ChunkHead(NamedTuple):
    """What a `CHUNK` record says."""

    token: int
    nbytes: int  # of the payload
    slot: int
    header: bytes

    def encode(self) -> bytes:
        return _CHUNK.pack(self.token, self.nbytes, self.slot) + self.header


def read_dial(frame: bytes) -> tuple[DialFrame, bytes]:
    """A dial and its code. Raises FrameError."""
    if len(frame) != DIAL_BYTES or not frame.startswith(MAGIC):
        raise FrameError("no dial of this transport")
    at = len(MAGIC)
    dialler, listener = frame[at : at + IDENTITY_BYTES], frame[at + IDENTITY_BYTES :]
    listener, rest = listener[:IDENTITY_BYTES], listener[IDENTITY_BYTES:]
    return DialFrame(dialler, listener, rest[:NONCE_BYTES]), rest[NONCE_BYTES:]


def answer(nonce: bytes, code: bytes) -> bytes:
    """The listener's frame."""
    return MAGIC + nonce + code


def read_answer(frame: bytes) -> tuple[bytes, bytes]:
    """Nonce and code of an answer. Raises FrameError."""
    if len(frame) != ANSWER_BYTES or not frame.startswith(MAGIC):
        raise FrameError("no answer of this transport")
    return frame[len(MAGIC) : -MAC_BYTES], frame[-MAC_BYTES:]


def prefix(kind: int, body_bytes: int) -> bytes:
    """What a record begins with."""
    return _PREFIX.pack(kind, body_bytes)


def read_prefix(data: memoryview, kinds: frozenset[int]) -> tuple[int, int]:
    """Kind and body's length of a record that has one of these kinds. Raises FrameError."""
    kind, nbytes = _PREFIX.unpack_from(data)
    if kind not in kinds:
        raise FrameError(f"a record of kind {kind}")
    least, most = _BODY_LIMITS[kind]
    if not least <= nbytes <= most:
        raise FrameError(f"a record of kind {kind} and {nbytes} bytes")
    return kind, nbytes


def token_body(token: int) -> bytes:
    """The body of an `ACK`."""
    return _TOKEN.pack(token)


def read_token(body: bytes) -> int:
    return int(_TOKEN.unpack(body)[0])


def read_chunk(body: bytes) -> ChunkHead:
    """The body of a `CHUNK`; its length has been checked."""
    token, nbytes, slot = _CHUNK.unpack_from(body)
    return ChunkHead(token, nbytes, slot, body[_CHUNK.size :])


class Record(NamedTuple):
    """What a prefix says of the record that follows."""

    kind: int
    nbytes: int  # of its body
    tag_bytes: int

    @property
    def of_chunk(self) -> bool:
        """Whether its body is a part of a chunk, and goes to memory of its own."""
        return self.kind in (DATA, BARE)

    @property
    def buffered(self) -> int:
        """How much of it comes to lie behind its prefix in the buffer."""
        return self.tag_bytes + (0 if self.of_chunk else self.nbytes)
