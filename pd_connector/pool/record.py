# SPDX-License-Identifier: Apache-2.0
"""The record of a part: what its payload is, who wrote it, and the sums of its bytes.

A part's file is its head and then its payload. The head is `HEADER`, the record in msgpack, and zeros up to a multiple of
`PAYLOAD_ALIGNMENT`. The header's sum covers the header and the record; the record has a sum of each layer's bytes.

Schema history. Records whose schema is one back are read, once there is a schema after the first (1).
"""

import struct
from collections.abc import Container, Iterable
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from pd_connector.errors import MalformedMessageError, Miss, PoolError
from pd_connector.kv.geometry import MAX_LAYERS, Geometry
from pd_connector.kv.model import ModelFacts, model_problem
from pd_connector.pool.chunk_layout import Form, Place, form_problem, places
from pd_connector.pool.codecs import AT_REST
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.keys import CHUNK_BYTES, KEY_BYTES, link, model_root
from pd_connector.pool.part_names import part_name
from pd_connector.protocol.wire.fields import Count, Name
from pd_connector.protocol.wire.fields import decode as decode_fields

SCHEMA = 1
OLDEST_SCHEMA = 1
MAGIC = b"pd-pool\n"
SUM_BYTES = 16
PAYLOAD_ALIGNMENT = 4096
HEADER = struct.Struct("<8sIIQQ16s")
"""Magic, schema, bytes of the record, offset of the payload, bytes of the payload, sum."""
MAX_RECORD_BYTES = 1 << 20

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Sum = Annotated[bytes, msgspec.Meta(min_length=SUM_BYTES, max_length=SUM_BYTES)]
Parts = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class LayerBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Bytes [offset, offset + nbytes) of the payload: one layer. `sum` is their `layer_sum`."""

    layer: Count
    offset: Count
    nbytes: Count
    sum: Sum


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rank that wrote a part.

    Attributes:
        engine: name and version of the engine, and its accelerator, such as `vllm 0.32.0 on cpu`: other hosts may have another.
        engine_id: engine id of this connector.
        codec: the coarsest codec in which the KV may have passed, including its codec at rest; `raw` if it was never
            coded.
    """

    engine: Name
    engine_id: Name
    codec: Name = "raw"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a part holds.

    Attributes:
        key: key of the chunk (`keys.link`).
        parent: key of the chunk before it, or the root.
        number: place of the chunk in its prompts, from 0.
        tokens: ids of its tokens (`keys.token_bytes`).
        inputs: `keys.inputs_digest`.
        adapter: fingerprint of the adapter's content; empty for none.
        salt: `keys.salt_digest`.
        facts: the writer's model.
        geometry: the writer's cache.
        form: what the payload looks like.
        layers: where each layer lies in the payload, in the order of `form`. None if other ranks hold the same heads and
            write all layers: a chunk has a part of every rank.
        parts: number of parts of the chunk. This part's name is `part`.
    """

    key: Key
    parent: Key
    number: Count
    tokens: Annotated[bytes, msgspec.Meta(min_length=CHUNK_BYTES, max_length=CHUNK_BYTES)]
    inputs: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    adapter: Name
    salt: Key
    facts: ModelFacts
    geometry: Geometry
    form: Form
    layers: Annotated[tuple[LayerBytes, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    writer: Writer
    parts: Parts = 1

    @property
    def part(self) -> str:
        """The name of this part."""
        return part_name(self.geometry.shard, self.writer.codec, self.facts.draft)

    @property
    def payload_bytes(self) -> int:
        return max((layer.offset + layer.nbytes for layer in self.layers), default=0)


class Header(NamedTuple):
    """What the first `HEADER.size` bytes of a file say."""

    schema: int
    record_bytes: int
    payload_offset: int
    payload_bytes: int
    sum: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def layer_sum(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of a layer's bytes. It finds accidents; it does not stop forgery."""
    return xxhash.xxh3_128_digest(data)


def payload_problem(
    record: Record, needed: Iterable[Place], buffer: memoryview, start: int = 0
) -> str:
    """What is wrong with the bytes of these layers; empty if they match the record's sums.

    Args:
        needed: some of `places(record.form, ...)`, such as `ReadPlan.places`.
        buffer: the payload from byte `start` on.
    """
    sums = {each.layer: each.sum for each in record.layers}
    for layer, offset, nbytes in needed:
        data = buffer[offset - start : offset - start + nbytes]
        if len(data) != nbytes or layer_sum(data) != sums[layer]:
            return f"bytes of layer {layer} of {record.part} of {record.key.hex()} differ from their sum"
    return ""


def encode(record: Record) -> bytes:
    """The head of a part's file. Its length is the offset of the payload. It depends on no value of `LayerBytes.sum`.

    Raises:
        PoolError: the record has more than `MAX_RECORD_BYTES`, a text that cannot be written, or KV that must not be kept.
    """
    if problem := _codec_problem(record):
        raise PoolError(Miss.REFUSED, problem)
    try:
        body = _encoder.encode(record)
    except UnicodeEncodeError as error:
        raise PoolError(Miss.REFUSED, f"record cannot be written: {error}") from None
    if len(body) > MAX_RECORD_BYTES:
        raise PoolError(Miss.REFUSED, f"record of {len(body)} bytes: at most {MAX_RECORD_BYTES}")
    offset = -(-(HEADER.size + len(body)) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    fields = MAGIC, SCHEMA, len(body), offset, record.payload_bytes
    summed = _head_sum(HEADER.pack(*fields, bytes(SUM_BYTES)), body)
    return (HEADER.pack(*fields, summed) + body).ljust(offset, b"\0")


def read_header(data: bytes | memoryview) -> Header:
    """What the header says; only `decode` verifies it.

    Args:
        data: the file's first bytes, `HEADER.size` or more.

    Raises:
        PoolError: the file is not of the pool, short, or of a schema that this version does not read.
    """
    if len(data) < HEADER.size:
        raise PoolError(Miss.DAMAGED, f"file of {len(data)} bytes: its header has {HEADER.size}")
    magic, *fields = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PoolError(Miss.DAMAGED, f"file begins with {magic!r}: not a file of the pool")
    header = Header(*fields)
    if not OLDEST_SCHEMA <= header.schema <= SCHEMA:
        raise PoolError(
            Miss.UNLIKE,
            f"record of schema {header.schema}: this version reads {OLDEST_SCHEMA} to {SCHEMA}",
        )
    if header.record_bytes > MAX_RECORD_BYTES:
        raise PoolError(
            Miss.DAMAGED, f"record of {header.record_bytes} bytes: at most {MAX_RECORD_BYTES}"
        )
    return header


def decode(data: bytes | memoryview) -> Record:
    """The record of a part, verified.

    Args:
        data: the file's head, at least header and record.

    Raises:
        PoolError: it is foreign, short, altered or of another schema. `cause` is `DAMAGED` or `UNLIKE`.
    """
    header = read_header(data)
    body = bytes(data[HEADER.size : HEADER.size + header.record_bytes])
    if len(body) < header.record_bytes:
        raise PoolError(Miss.DAMAGED, f"record of {len(body)} bytes: {header.record_bytes} wanted")
    zeroed = header._replace(sum=bytes(SUM_BYTES))
    if _head_sum(HEADER.pack(MAGIC, *zeroed), body) != header.sum:
        raise PoolError(Miss.DAMAGED, "record differs from its sum")
    try:
        record = decode_fields(_decoder, body)
    except MalformedMessageError as error:
        raise PoolError(Miss.DAMAGED, f"record: {error}") from None
    if problem := _problem(record, header):
        raise PoolError(Miss.DAMAGED, f"record of {record.key.hex()}: {problem}")
    return record


def record_problem(
    record: Record, expected: PromptChunk, facts: ModelFacts, codecs: Container[str]
) -> tuple[Miss, str] | None:
    """Why this record is not the requested chunk's; None if it is.

    The key alone is not trusted: the values that it was hashed over are compared, as far as the record has them.

    Args:
        facts: the reader's model.
        codecs: the reader uses only KV that has passed in these codecs.
    """
    if record.key != expected.key:
        return Miss.DAMAGED, f"file of chunk {record.key.hex()} stands for {expected.key.hex()}"
    for name in ("parent", "number", "tokens", "inputs", "adapter", "salt"):
        if getattr(record, name) != getattr(expected, name):
            return (
                Miss.UNLIKE,
                f"chunk {expected.key.hex()} was stored for another prompt: its {name} differ",
            )
    if record.writer.codec not in codecs:
        codec = record.writer.codec
        return (
            Miss.CODEC,
            f"its KV may have passed in {codec}, which this engine permits neither in `codec` nor in `pool.codec`",
        )
    if problem := model_problem(record.facts, facts):
        return Miss.UNLIKE, problem
    root = model_root(facts)
    if root is None or model_root(record.facts) != root:
        return (
            Miss.UNLIKE,
            "the writer's weights are not known to be, byte by byte, those of this engine",
        )
    return None


def _problem(record: Record, header: Header) -> str:
    """What in a record contradicts itself."""
    if record.key != link(record.parent, record.tokens, record.inputs):
        return "its key is not that of its tokens"
    if problem := _codec_problem(record) or form_problem(record.form, record.geometry):
        return problem
    recorded = [(each.layer, each.offset, each.nbytes) for each in record.layers]
    if recorded != places(record.form, record.geometry):
        return "its layers do not lie as its form says"
    if record.payload_bytes != header.payload_bytes:
        return f"payload of {header.payload_bytes} bytes, {record.payload_bytes} by its layers"
    least = HEADER.size + header.record_bytes
    if header.payload_offset < least or header.payload_offset % PAYLOAD_ALIGNMENT:
        return f"payload at {header.payload_offset}: must be a multiple of {PAYLOAD_ALIGNMENT}, {least} or more"
    return ""


def _codec_problem(record: Record) -> str:
    codec = record.writer.codec
    if codec not in AT_REST:
        return f"its KV has passed in {codec}: {AT_REST} may be kept"
    for run in record.form:
        if run.coded and run.codec != codec:
            return f"layer {run.layers[0]} is kept in {run.codec}, and its writer names {codec}"
    return ""


def _head_sum(header: bytes, body: bytes) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(body)
    return digest.digest()
