# SPDX-License-Identifier: Apache-2.0
"""The header that travels with the bytes of one chunk."""

import msgspec

from pd_connector.kv.coding import RAW
from pd_connector.plan.chunks import Chunk
from pd_connector.protocol.wire.fields import Count, Fingerprint, Name, decode


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """A producer's description of a chunk. The consumer compares every field with the value by its own plan, before it uses
    the bytes.

    Attributes:
        transfer: the chunk's transfer.
        epoch: epoch of the producer's process.
        sequence: number of the chunk in the plan. The plan has its route, layers and tokens.
        identity: fingerprint of the tokens whose KV this is.
        codec: name of the route's codec.
        nbytes: bytes of the payload.
        checksum: checksum of the payload; empty only if the transport verifies every byte.
        passed: the coarsest codec that any KV behind this KV has passed through: KV is computed from earlier KV, which
            may have been coded.
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
    passed: Name = RAW.name


def header_of(
    chunk: Chunk,
    *,
    transfer: str,
    epoch: int,
    identity: bytes,
    codec: str,
    nbytes: int,
    checksum: bytes,
    passed: str,
) -> ChunkHeader:
    """The header of the plan's `chunk`. The producer sends it, and the consumer makes it to compare."""
    return ChunkHeader(
        transfer=transfer,
        epoch=epoch,
        sequence=chunk.sequence,
        identity=identity,
        route=chunk.route,
        first_layer=chunk.first_layer,
        stop_layer=chunk.stop_layer,
        first_token=chunk.first_token,
        stop_token=chunk.stop_token,
        codec=codec,
        nbytes=nbytes,
        checksum=checksum,
        passed=passed,
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader)


def encode_header(header: ChunkHeader) -> bytes:
    """A msgpack array, at most 64 KiB."""
    return _encoder.encode(header)


def decode_header(data: bytes) -> ChunkHeader:
    """Decode a header. Raises MalformedMessageError."""
    return decode(_decoder, data)
