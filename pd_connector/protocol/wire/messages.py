# SPDX-License-Identifier: Apache-2.0
"""Every message between a consumer and a producer, and nothing else.

Schema history. A peer whose schema is one back is accepted, once there is a schema after the first:
    1  the first that was released, and so the first that is kept

Within a schema a struct may gain fields at its end, with defaults; anything else is a new schema. What both
sides compute by themselves and must compute alike is part of the schema, too: the routes of a pair, its plan,
and the bytes of a payload. `Hello` and `Reject` keep the fields that they have in every schema: a peer of any
schema must be able to read them, or it is not refused with both versions. Messages are msgpack maps tagged
with their type. Fields that a peer does not know are passed over.
"""

from typing import Annotated

import msgspec

from pd_connector.config_rules import MAX_SLOTS
from pd_connector.kv.geometry import Geometry, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire.fields import Count, Fingerprint, Name, Text, decode
from pd_connector.protocol.wire.final_token import FinalToken

SCHEMA = 1
OLDEST_SCHEMA = 1
MAX_PIECES = 1 << 14
"""Pieces of a chunk that is read from pages, at most."""

Slot = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Slots = Annotated[list[Slot], msgspec.Meta(max_length=MAX_SLOTS)]
Codecs = Annotated[list[Name], msgspec.Meta(max_length=16)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Header = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]  # an encoded `header.ChunkHeader`
Transfers = Annotated[list[Name], msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Consumer, first message of a session: its identity, and what it can take.

    `codecs` are those the consumer permits; `readable` the transports over which it can read;
    `needs` what it must be told with the end of each transfer (`final_token`).
    """

    newest: Count
    oldest: Count
    engine_id: Name
    expected_engine_id: Name
    facts: ModelFacts
    geometry: Geometry
    codecs: Codecs
    transports: Annotated[dict[Name, bytes], msgspec.Meta(max_length=16)]
    readable: Annotated[list[Name], msgspec.Meta(max_length=16)] = []
    needs: Annotated[list[Name], msgspec.Meta(max_length=16)] = []


class Welcome(Message, frozen=True):
    """Producer: the session stands. `transport_address` is where its transport is reached.

    With `read` it does not write chunks: it leaves them, and the consumer reads them. With `direct`
    it leaves them in leased pages. With `plain` it obeys `Open.coded`. Leases end after
    `lease_ms` milliseconds without a heartbeat; 0 means not told. It obeys `Heartbeat.next_ms`.
    """

    schema: Count
    engine_id: Name
    epoch: Count
    facts: ModelFacts
    geometry: Geometry
    codecs: Codecs
    transport: Name
    transport_address: bytes
    slot_bytes: Count  # of its send slots
    read: bool = False
    direct: bool = False
    plain: bool = False
    lease_ms: Count = 0


class Reject(Message, frozen=True):
    """Producer: no session. `newest` and `oldest` are its own schema versions."""

    cause: Name
    detail: Text
    newest: Count
    oldest: Count


class Watch(Message, frozen=True):
    """Consumer: tell me (`Ready`) when the prefill of this transfer has begun.

    With `keep` its pages stay leased, however much else is leased. They will be compared with what I compute,
    which takes a while. `keep` holds for one transfer of a session: the last that was named.
    """

    transfer: Name
    keep: bool = False


class Ready(Message, frozen=True):
    """Producer: the prefill of a watched transfer has begun: its KV will come soon."""

    transfer: Name


class Open(Message, frozen=True):
    """Consumer: send me these tokens.

    They are tokens [first_token, stop_token) of the prompt whose fingerprint is `identity`. With
    `wait` the prefill may not have started yet. `slots` are granted at once; a chunk has
    `chunk_bytes` at most. `readers` ranks of the consumer ask this rank for the transfer, and
    its pages are kept until all of them are done. `bytes_per_s` is what the link was measured to
    move, 0 if it was not measured. With `direct` the consumer can read the producer's pages.
    With `provisional` it can wait as `Accept.provisional` asks. If it is not `coded`, all of it
    comes in `raw`, which the producer must have said it can (`Welcome.plain`).
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
    provisional: bool = False
    coded: bool = True


class Accept(Message, frozen=True):
    """Producer: there is KV to send, and `chunks` chunks will follow.

    Sent when the first of it has been computed, and again, `complete`, when the prefill has ended.
    Then it has the engine's `words`, if there are any. A transfer that is `provisional` may still be
    refused, so the consumer uses nothing of it before all is complete.
    """

    transfer: Name
    chunks: Count
    complete: bool
    words: FinalToken | None = None
    provisional: bool = False


class Refuse(Message, frozen=True):
    """Producer, at any time: the transfer has ended, and no further write is started."""

    transfer: Name
    cause: Name
    detail: Text


class Credit(Message, frozen=True):
    """Consumer: more slots for this transfer."""

    transfer: Name
    slots: Slots


class LeftInSlot(Message, frozen=True, tag="Offered"):
    """Producer, in a session with `read`: a chunk lies in my send slot, to be read into the
    landing slot that was granted. `number` counts the chunks that are left in this session.

    On the wire it is `Offered`, and the number is `offer`."""

    transfer: Name
    number: Count = msgspec.field(name="offer")
    send_slot: Slot
    slot: Slot
    nbytes: Count
    header: Header


class LeftInPages(Message, frozen=True, tag="OfferedPages"):
    """Producer, to an `Open` with `direct`: a chunk lies in leased pages of mine, to be read there.
    It counts against the landing slot that was granted, although the slot is not used.

    `addresses` are those of its pieces, `piece_bytes` bytes each, in the order of the payload:
    little-endian words of 64 bits. Their checksum is XXH3.
    """

    transfer: Name
    number: Count = msgspec.field(name="offer")
    slot: Slot
    piece_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    addresses: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PIECES)]
    header: Header


class Taken(Message, frozen=True):
    """Consumer: the chunk that was left under this number has been read, or will not be read. On the wire the number
    is `offer`."""

    number: Count = msgspec.field(name="offer")


class Done(Message, frozen=True):
    """Consumer: everything is verified and in place; the pages may be freed."""

    transfer: Name


class Cancel(Message, frozen=True):
    """Consumer: no longer wanted. The producer answers `Cancelled`."""

    transfer: Name
    cause: Name
    readers: Readers = 1


class Cancelled(Message, frozen=True):
    """Producer: the transfer has ended, and its last write, too: the slots can be used again."""

    transfer: Name


class Heartbeat(Message, frozen=True):
    """Consumer: still there, and wants these transfers. Extends their leases.

    The next one comes in `next_ms` milliseconds. 0 means not told: it comes before the session ends.
    """

    transfers: Transfers
    next_ms: Count = 0


class Pulse(Message, frozen=True):
    """Producer: answer to a heartbeat. `engine_age_ms` is how long ago its engine began its
    last step, in milliseconds. `weights` is for older versions: their sessions began before weights were known."""

    epoch: Count
    engine_age_ms: Count = 0
    weights: Fingerprint = b""


class AskRanks(Message, frozen=True):
    """Any peer, without a session: asks for the ranks of the engine."""


class RankAddress(msgspec.Struct, frozen=True):
    """Where a rank's control channel is, and what the rank holds."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    shard: Shard


class Ranks(Message, frozen=True):
    """Producer: the answer, all ranks of the engine, this one included."""

    engine_id: Name
    ranks: Annotated[list[RankAddress], msgspec.Meta(max_length=4096)]


ConsumerMessage = AskRanks | Hello | Watch | Open | Credit | Taken | Done | Cancel | Heartbeat
ProducerMessage = (
    Ranks
    | Welcome
    | Reject
    | Ready
    | Accept
    | LeftInSlot
    | LeftInPages
    | Refuse
    | Cancelled
    | Pulse
)

_encoder = msgspec.msgpack.Encoder()
_from_consumer: msgspec.msgpack.Decoder[ConsumerMessage] = msgspec.msgpack.Decoder(ConsumerMessage)
_from_producer: msgspec.msgpack.Decoder[ProducerMessage] = msgspec.msgpack.Decoder(ProducerMessage)


def encode(message: Message) -> bytes:
    """A msgpack map, tagged with the message's type."""
    return _encoder.encode(message)


def decode_consumer_message(data: bytes) -> ConsumerMessage:
    """Decode what a consumer sent. Raises MalformedMessageError."""
    return decode(_from_consumer, data)


def decode_producer_message(data: bytes) -> ProducerMessage:
    """Decode what a producer sent. Raises MalformedMessageError."""
    return decode(_from_producer, data)


def common_schema(newest: int, oldest: int) -> int | None:
    """The schema version to speak with a peer that offers these, or None."""
    version = min(newest, SCHEMA)
    return version if version >= max(oldest, OLDEST_SCHEMA) else None
