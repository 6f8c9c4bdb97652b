# SPDX-License-Identifier: Apache-2.0
"""The messages between a consumer and a producer.

Schema history. A peer whose schema is one back is accepted:
    1  the first that was released, and so the first that is kept
    2  states by section, context parallelism, several tokens an entry (`Geometry.needs_schema`). All that schema 1
       can say has the same bytes, and the same plan if page sizes divide 128 (`PlanRules.whole_pieces`)

Within a schema a struct can gain fields at its end, with defaults. Any other change is a new schema. The schema also covers
what both sides compute separately and must compute alike: the routes of a pair, its plan, and the bytes of a payload.
`Hello` and `Reject` keep their fields in every schema, so that a peer of any schema can read them and is refused with both
versions in the message. Messages are msgpack maps tagged with their type. Unknown fields are ignored.
"""

from typing import Annotated

import msgspec

from pd_connector.config_rules import MAX_SLOTS
from pd_connector.kv.geometry import Geometry, Group, Positive, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire.fields import Count, Fingerprint, Name, Text, decode
from pd_connector.protocol.wire.final_token import FinalToken

SCHEMA = 2
OLDEST_SCHEMA = 1
MAX_PIECES = 1 << 14
"""Most pieces of a chunk that is read from pages."""

Slot = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Slots = Annotated[list[Slot], msgspec.Meta(max_length=MAX_SLOTS)]
Codecs = Annotated[list[Name], msgspec.Meta(max_length=16)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Header = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]  # an encoded `header.ChunkHeader`
Transfers = Annotated[list[Name], msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Consumer, first message of a session: its identity, and what it can receive.

    `codecs` are the codecs that it permits. `readable` are the transports over which it can read. `needs` names the
    data that must come with the end of each transfer (`final_token`). `extended` is the geometry if it needs schema 2.
    `geometry` then only serves a peer of schema 1, which must be able to read it.
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
    extended: Geometry | msgspec.UnsetType = msgspec.UNSET

    @property
    def cache(self) -> Geometry:
        """The geometry of the consumer's rank."""
        return self.geometry if self.extended is msgspec.UNSET else self.extended


class Welcome(Message, frozen=True):
    """Producer: the session has begun. `transport_address` is the address of its transport.

    With `read` it leaves chunks for the consumer to read, and writes none. With `direct` it leaves them in leased pages.
    With `plain` it obeys `Open.coded`. A lease ends after `lease_ms` milliseconds without a heartbeat; 0: unknown. The
    producer obeys `Heartbeat.next_ms`.
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
    """Consumer: send `Ready` when the prefill of this transfer has begun.

    With `keep` the lease of its pages is not evicted: they are needed for an audit, which takes a while. `keep` holds for
    one transfer of a session, the last one named.
    """

    transfer: Name
    keep: bool = False


class Ready(Message, frozen=True):
    """Producer: the prefill of a watched transfer has begun. Its KV will come soon."""

    transfer: Name


class Open(Message, frozen=True):
    """Consumer: send tokens [first_token, stop_token) of the prompt whose fingerprint is `identity`.

    With `wait` the prefill may not have begun. `slots` are granted at once. A chunk has at most `chunk_bytes` bytes.
    `readers` ranks of the consumer open the transfer at this rank, which keeps the pages until all have ended.
    `bytes_per_s` is the measured rate of the link; 0: not measured. With `direct` the consumer can read the producer's
    pages. With `provisional` it can wait as `Accept.provisional` asks. If it is not `coded`, all chunks come in `raw`; the
    producer must have said that it can do this (`Welcome.plain`). With `state_token` states are sent as they stand after that
    number of tokens; without it none are. With `compares` the KV is compared with what the consumer computes, so a producer
    that has approximated it refuses.
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
    state_token: Positive | msgspec.UnsetType = msgspec.UNSET
    compares: bool | msgspec.UnsetType = msgspec.UNSET


class Accept(Message, frozen=True):
    """Producer: there is KV to send, in `chunks` chunks.

    Sent when the first KV is computed, and again with `complete` when the prefill has ended.
    Then it has the prompt's `final_token`, if there is one (`words` on the wire). A transfer that is `provisional`
    may still be refused, so the consumer uses nothing of it before it is complete.
    """

    transfer: Name
    chunks: Count
    complete: bool
    final_token: FinalToken | None = msgspec.field(default=None, name="words")
    provisional: bool = False


class Refuse(Message, frozen=True):
    """Producer, at any time: the transfer has ended. No further write begins."""

    transfer: Name
    cause: Name
    detail: Text


class Credit(Message, frozen=True):
    """Consumer: more slots for this transfer."""

    transfer: Name
    slots: Slots


class LeftInSlot(Message, frozen=True, tag="Offered"):
    """Producer, in a session with `read`: a chunk is left in send slot `send_slot`, to be read into the granted landing slot
    `slot`. `number` counts the chunks that are left in this session.

    On the wire it is `Offered`, and the number is `offer`."""

    transfer: Name
    number: Count = msgspec.field(name="offer")
    send_slot: Slot
    slot: Slot
    nbytes: Count
    header: Header


class LeftInPages(Message, frozen=True, tag="OfferedPages"):
    """Producer, to an `Open` with `direct`: a chunk is left in leased pages, to be read there. It takes the granted landing
    slot `slot`, although the slot stays empty.

    `addresses` are the addresses of its pieces of `piece_bytes` bytes each, in the order of the payload, as
    little-endian words of 64 bits. Their checksum is XXH3.
    """

    transfer: Name
    number: Count = msgspec.field(name="offer")
    slot: Slot
    piece_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    addresses: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PIECES)]
    header: Header


class Taken(Message, frozen=True):
    """Consumer: the chunk with this number was read, or will not be read. On the wire the number is `offer`."""

    number: Count = msgspec.field(name="offer")


class Done(Message, frozen=True):
    """Consumer: all chunks are verified and in pages. The producer can free its pages."""

    transfer: Name


class Cancel(Message, frozen=True):
    """Consumer: the transfer is not needed any more. The producer answers `Cancelled`."""

    transfer: Name
    cause: Name
    readers: Readers = 1


class Cancelled(Message, frozen=True):
    """Producer: the transfer and its last write have ended. The slots can be used again."""

    transfer: Name


class Heartbeat(Message, frozen=True):
    """Consumer: alive, and needs these transfers. Extends their leases.

    The next heartbeat comes in `next_ms` milliseconds; 0: unknown, but before the session times out.
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
    """Any peer, also without a session: asks for the ranks of the engine."""


class RankAddress(msgspec.Struct, frozen=True):
    """The address of a rank's control channel, and the rank's shard."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    shard: Shard


class Ranks(Message, frozen=True):
    """Producer: answer to `AskRanks`, with all ranks of the engine, this one included."""

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
    """Decode a consumer's message. Raises MalformedMessageError."""
    return decode(_from_consumer, data)


def decode_producer_message(data: bytes) -> ProducerMessage:
    """Decode a producer's message. Raises MalformedMessageError."""
    return decode(_from_producer, data)


UNTOLD = Geometry(Shard(0, 1, 0, 1), (Group("latent", (0,), 1, 1, 0, 1, 0, "extended", "", False),))
"""What `Hello.geometry` is if schema 1 cannot say the true one."""


def oldest_schema(geometry: Geometry) -> int:
    """The oldest schema that a rank with this geometry can speak."""
    return max(OLDEST_SCHEMA, geometry.needs_schema)


def common_schema(newest: int, oldest: int, own_oldest: int | None = None) -> int | None:
    """The newest schema that this side and a peer with schemas `oldest` to `newest` both speak; None if there is none.

    Args:
        own_oldest: from `oldest_schema`; None: `OLDEST_SCHEMA`.
    """
    version = min(newest, SCHEMA)
    return version if version >= max(oldest, own_oldest or OLDEST_SCHEMA) else None
