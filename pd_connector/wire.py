# SPDX-License-Identifier: Apache-2.0
"""Every message between a consumer and a producer, and nothing else.

Schema history (a peer one version back is accepted, once there is a released one):
    1  whole pages between like caches; never released
    2  routes between unlike geometries, codecs, streaming, both directions

Within a version a struct may gain fields at its end, with defaults; anything else is a new
version. Messages are msgpack maps tagged with their type. Bytes from a socket are decoded here,
against these structs and with these limits, and nowhere else.
"""

from typing import Annotated, TypeVar

import msgspec

from pd_connector.config import MAX_SLOTS
from pd_connector.errors import MalformedMessageError
from pd_connector.geometry import Geometry
from pd_connector.plan import Chunk

SCHEMA = 2
OLDEST_SCHEMA = 2
MAX_MESSAGE_BYTES = 1 << 20
MAX_PIECES = 1 << 14
"""Of a chunk that is read from pages."""

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Fingerprint = Annotated[bytes, msgspec.Meta(max_length=64)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Slots = Annotated[list[Slot], msgspec.Meta(max_length=MAX_SLOTS)]
Codecs = Annotated[list[Name], msgspec.Meta(max_length=16)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Header = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]  # an encoded `ChunkHeader`
Transfers = Annotated[list[Name], msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Consumer, first message of a session: who I am and what I can take.

    `codecs` are those the consumer permits; `readable` the transports over which it can read.
    """

    newest: Count
    oldest: Count
    engine_id: Name
    expected_engine_id: Name
    model: Fingerprint
    geometry: Geometry
    codecs: Codecs
    transports: Annotated[dict[Name, bytes], msgspec.Meta(max_length=16)]
    readable: Annotated[list[Name], msgspec.Meta(max_length=16)] = []


class Welcome(Message, frozen=True):
    """Producer: the session stands. `transport_address` is where its transport is reached;
    with `read`, it offers chunks for the consumer to read instead of writing them, and with `direct`
    leased pages as they lie."""

    schema: Count
    engine_id: Name
    epoch: Count
    geometry: Geometry
    codecs: Codecs
    transport: Name
    transport_address: bytes
    slot_bytes: Count  # of its send slots
    read: bool = False
    direct: bool = False


class Reject(Message, frozen=True):
    """Producer: no session. `newest` and `oldest` are its own schema versions."""

    cause: Name
    detail: Text
    newest: Count
    oldest: Count


class Watch(Message, frozen=True):
    """Consumer: tell me (`Ready`) when the prefill of this transfer has begun."""

    transfer: Name


class Ready(Message, frozen=True):
    """Producer: the prefill of a watched transfer has begun: its KV will come soon."""

    transfer: Name


class Open(Message, frozen=True):
    """Consumer: send me these tokens.

    Tokens [first_token, stop_token) of the prompt whose fingerprint is `identity`; with `wait`,
    the prefill may not have started yet. `slots` are granted at once; a chunk has
    `chunk_bytes` at most. `readers` ranks of the consumer ask this rank for the transfer, and
    its pages are kept until all of them are done. `bytes_per_s` is what the link was measured to
    move, 0 where it was not. With `direct` the consumer can read the producer's pages, and with `lanes`
    form their checksum of lanes' sums.
    """

    transfer: Name
    identity: Fingerprint
    first_token: Count
    stop_token: Count
    wait: bool
    slots: Slots
    chunk_bytes: Count
    readers: Readers = 1
    bytes_per_s: Count = 0
    direct: bool = False
    lanes: bool = False


class Accept(Message, frozen=True):
    """Producer: there is KV to send, and `chunks` chunks will follow.

    Sent when the first of it has been computed, and again, `complete`, when the prefill has ended.
    """

    transfer: Name
    chunks: Count
    complete: bool


class Refuse(Message, frozen=True):
    """Producer, at any time: the transfer is over, and no further write is started."""

    transfer: Name
    cause: Name
    detail: Text


class Credit(Message, frozen=True):
    """Consumer: more slots for this transfer."""

    transfer: Name
    slots: Slots


class Offered(Message, frozen=True):
    """Producer, in a session with `read`: a chunk lies in my send slot, to be read into the
    landing slot that was granted. `offer` is the number of the offer in this session."""

    transfer: Name
    offer: Count
    send_slot: Slot
    slot: Slot
    nbytes: Count
    header: Header


class OfferedPages(Message, frozen=True):
    """Producer, to an `Open` with `direct`: a chunk lies in leased pages of mine, to be read from
    there, on account of the landing slot that was granted.

    `addresses` are those of its pieces, `piece_bytes` bytes each, in the order of the payload:
    little-endian words of 64 bits. With `lanes` their checksum is formed of lanes' sums, which the
    consumer has said it can.
    """

    transfer: Name
    offer: Count
    slot: Slot
    piece_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    addresses: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PIECES)]
    header: Header
    lanes: bool = False


class Taken(Message, frozen=True):
    """Consumer: what was offered under this number has been read, or will not be."""

    offer: Count


class Done(Message, frozen=True):
    """Consumer: everything is verified and in place; the pages may be freed."""

    transfer: Name


class Cancel(Message, frozen=True):
    """Consumer: no longer wanted. The producer answers `Cancelled`."""

    transfer: Name
    cause: Name
    readers: Readers = 1


class Cancelled(Message, frozen=True):
    """Producer: the transfer is over and its last write has ended: the slots are safe."""

    transfer: Name


class Heartbeat(Message, frozen=True):
    """Consumer: I live and still want these transfers. Extends their leases."""

    transfers: Transfers


class Pulse(Message, frozen=True):
    """Producer: answer to a heartbeat."""

    epoch: Count


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Travels with the bytes of one chunk; the consumer checks every field before it believes.

    `identity` is the fingerprint of the tokens whose KV this is, `epoch` the producer
    process's, `checksum` that of the `nbytes` coded bytes; it may be empty over a transport that
    authenticates every byte, and over no other. `route`, layers and tokens are those of
    the plan's chunk with this sequence number.
    """

    transfer: Name
    epoch: Count
    sequence: Count
    identity: Fingerprint
    route: Count
    first_layer: Count
    stop_layer: Count
    first_token: Count
    stop_token: Count
    codec: Name
    nbytes: Count
    checksum: Fingerprint


def chunk_header(
    transfer: str,
    epoch: int,
    identity: bytes,
    chunk: Chunk,
    codec: str,
    nbytes: int,
    checksum: bytes,
) -> ChunkHeader:
    """The header of the plan's `chunk`: what a producer says, and what a consumer wants to hear."""
    return ChunkHeader(
        transfer,
        epoch,
        chunk.sequence,
        identity,
        chunk.route,
        chunk.first_layer,
        chunk.stop_layer,
        chunk.first_token,
        chunk.stop_token,
        codec,
        nbytes,
        checksum,
    )


ConsumerMessage = Hello | Watch | Open | Credit | Taken | Done | Cancel | Heartbeat
ProducerMessage = (
    Welcome | Reject | Ready | Accept | Offered | OfferedPages | Refuse | Cancelled | Pulse
)

_encoder = msgspec.msgpack.Encoder()
_from_consumer: msgspec.msgpack.Decoder[ConsumerMessage] = msgspec.msgpack.Decoder(ConsumerMessage)
_from_producer: msgspec.msgpack.Decoder[ProducerMessage] = msgspec.msgpack.Decoder(ProducerMessage)
_header = msgspec.msgpack.Decoder(ChunkHeader)


def encode(message: Message | ChunkHeader) -> bytes:
    return _encoder.encode(message)


def decode_consumer_message(data: bytes) -> ConsumerMessage:
    """Decode what a consumer sent. Raises MalformedMessageError."""
    return _decode(_from_consumer, data)


def decode_producer_message(data: bytes) -> ProducerMessage:
    """Decode what a producer sent. Raises MalformedMessageError."""
    return _decode(_from_producer, data)


def decode_chunk_header(data: bytes) -> ChunkHeader:
    """Decode the header of a chunk. Raises MalformedMessageError."""
    return _decode(_header, data)


def common_schema(newest: int, oldest: int) -> int | None:
    """The schema version to speak with a peer that offers these, or None."""
    version = min(newest, SCHEMA)
    return version if version >= max(oldest, OLDEST_SCHEMA) else None


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"{len(data)} bytes that are no message: {error}") from None
