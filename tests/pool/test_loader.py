# SPDX-License-Identifier: Apache-2.0
"""What a reader gets of a chunk in a real store: verified bytes of all parts that it needs, or a cause and nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.pool_records import FACTS, GEOMETRY, record, sealed
from support.pool_stores import patient, store

from pd_connector.errors import Miss, PoolError
from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.loader import Loader, ReadBuffer, ReadChunk
from pd_connector.pool.record import Record, encode
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.trust import writer_of

__all__ = ["patient", "store"]

FIRST = record()
SECOND = msgspec.structs.replace(
    FIRST, geometry=msgspec.structs.replace(GEOMETRY, shard=Shard(0, 3, 1, 2))
)
WHOLE = msgspec.structs.replace(GEOMETRY, shard=Shard(0, 3, 0, 1))
"""The cache of an engine of one rank, which needs both parts."""


def payload_of(part: Record) -> bytes:
    return random.Random(part.part).randbytes(part.payload_bytes)


def put(store: LocalStore, *parts: Record) -> None:
    """Write the parts of a chunk as their ranks do."""
    for part in parts:
        payload = payload_of(part)
        layers = sealed(part.form, part.geometry, memoryview(payload))
        file = encode(msgspec.structs.replace(part, layers=layers)) + payload
        writing = store.begin(
            part.key, parent=part.parent, part=part.part, parts=part.parts, nbytes=len(file)
        )
        assert not isinstance(writing, Refusal)
        with writing:
            writing.write(0, memoryview(file))
            assert writing.publish()


def chunk_of(part: Record) -> PromptChunk:
    return PromptChunk(*(getattr(part, name) for name in PromptChunk._fields))


def read(
    store: LocalStore,
    own: Geometry = WHOLE,
    part: Record = FIRST,
    *,
    facts: ModelFacts = FACTS,
    codecs: tuple[str, ...] = ("raw",),
    buffer: ReadBuffer | None = None,
) -> ReadChunk:
    return Loader(store, own, codecs).read(chunk_of(part), facts, buffer or ReadBuffer())


def cause(store: LocalStore, **asked: Any) -> Miss:
    with pytest.raises(PoolError) as error:
        read(store, **asked)
    return error.value.cause


def is_there(store: LocalStore) -> bool:
    return store.find([FIRST.key])[0] is not None


def file_of(store: LocalStore, part: Record) -> Path:
    root = Path(store.status().tiers[0].path)
    return next(root.rglob(f"data/{part.key.hex()}.{part.part}.*"))


def test_all_parts_that_a_rank_needs_are_read_each_into_memory_of_its_own(
    store: LocalStore,
) -> None:
    put(store, FIRST, SECOND)
    found = read(store)
    assert [bytes(part.data) for part in found.parts] == [payload_of(FIRST), payload_of(SECOND)]
    assert [part.geometry for part in found.parts] == [FIRST.geometry, SECOND.geometry]
    assert {part.writer for part in found.parts} == {writer_of(FIRST)}
    assert {part.engine_id for part in found.parts} == {"e1"}
    assert found.nbytes == FIRST.payload_bytes + SECOND.payload_bytes


def test_parts_of_heads_that_a_rank_does_not_hold_are_not_opened(store: LocalStore) -> None:
    put(store, FIRST, SECOND)
    file_of(store, SECOND).write_bytes(b"")
    (part,) = read(store, GEOMETRY).parts
    assert bytes(part.data) == payload_of(FIRST)


def test_only_the_layers_of_a_stage_are_read(store: LocalStore) -> None:
    put(store, FIRST, SECOND)
    stage = msgspec.structs.replace(
        WHOLE,
        shard=Shard(0, 1, 0, 1),
        groups=(msgspec.structs.replace(GEOMETRY.groups[0], layers=(0,)),),
    )
    found = read(store, stage)
    assert [[one.layer for one in part.need.places] for part in found.parts] == [[0], [0]]
    (place, *_) = found.parts[0].need.places
    assert bytes(found.parts[0].data) == payload_of(FIRST)[: place.nbytes]


def test_a_part_without_a_layer_that_is_needed_is_left_out(store: LocalStore) -> None:
    """A window had passed its pages before it was saved."""
    put(store, msgspec.structs.replace(FIRST, form=(), layers=(), parts=1))
    assert read(store, GEOMETRY).parts == []


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
@pytest.mark.parametrize("part", [FIRST, SECOND], ids=["first", "second"])
def test_a_flipped_byte_of_any_part_costs_the_chunk(
    store: LocalStore, part: Record, place: float
) -> None:
    put(store, FIRST, SECOND)
    file = file_of(store, part)
    data = bytearray(file.read_bytes())
    start = len(data) - part.payload_bytes
    data[start + int(place * (part.payload_bytes - 1))] ^= 1
    file.write_bytes(data)
    assert cause(store) is Miss.DAMAGED
    assert not is_there(store), "it is not asked for again"


def test_a_file_of_another_chunk_is_found(store: LocalStore) -> None:
    put(store, FIRST, SECOND)
    other = record(range(1, 129))
    payload = payload_of(other)
    layers = sealed(other.form, other.geometry, memoryview(payload))
    head = encode(msgspec.structs.replace(other, layers=layers))
    file_of(store, FIRST).write_bytes(head + payload)
    assert cause(store) is Miss.DAMAGED


@pytest.mark.parametrize(
    "asked",
    [
        {"part": msgspec.structs.replace(FIRST, tokens=FIRST.tokens[::-1])},
        {"part": msgspec.structs.replace(FIRST, salt=bytes(32))},
        {"facts": msgspec.structs.replace(FACTS, weights=b"g" * 16)},
    ],
    ids=["tokens", "salt", "weights"],
)
def test_what_was_stored_for_others_is_not_read_and_stays_theirs(
    store: LocalStore, asked: dict[str, Any]
) -> None:
    put(store, FIRST, SECOND)
    assert cause(store, **asked) is Miss.UNLIKE
    assert is_there(store)
    assert read(store).parts


def test_kv_of_a_codec_is_read_only_where_that_is_permitted(store: LocalStore) -> None:
    writer = msgspec.structs.replace(FIRST.writer, codec="int8")
    put(store, *(msgspec.structs.replace(part, writer=writer) for part in (FIRST, SECOND)))
    assert cause(store) is Miss.CODEC
    assert is_there(store)
    assert len(read(store, codecs=("int8", "raw")).parts) == 2


def test_a_chunk_that_is_gone_is_told_as_evicted(store: LocalStore) -> None:
    assert cause(store) is Miss.EVICTED


def test_a_read_does_not_wait_for_a_chunk_that_went_since_it_was_brought(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few threads read: a far store that does not answer would hold up all other chunks."""
    put(store, FIRST, SECOND)
    asked: list[bytes] = []
    monkeypatch.setattr(store, "brings_at_once", lambda key: False)
    monkeypatch.setattr(store, "bring", asked.append)
    assert cause(store) is Miss.EVICTED
    assert asked == []


@pytest.mark.parametrize("writer", [b"", b"e" * 16, b"d" * 16])
def test_an_engine_that_drafts_reads_chunks_with_its_own_draft_model_only(
    store: LocalStore, writer: bytes
) -> None:
    facts = msgspec.structs.replace(FACTS, draft=b"d" * 16)
    written = msgspec.structs.replace(FACTS, draft=writer)
    put(store, *(msgspec.structs.replace(part, facts=written) for part in (FIRST, SECOND)))
    layers = (*GEOMETRY.groups[0].layers, DRAFT_LAYERS)
    groups = (msgspec.structs.replace(GEOMETRY.groups[0], layers=layers), GEOMETRY.groups[1])
    drafting = msgspec.structs.replace(WHOLE, groups=groups)
    if writer == facts.draft:
        assert len(read(store, drafting, facts=facts).parts) == 2
    else:
        with pytest.raises(PoolError, match="draft model") as caught:
            read(store, drafting, facts=facts)
        assert caught.value.cause is Miss.DRAFT
        assert is_there(store), "others use it"
    assert len(read(store, WHOLE).parts) == 2, "an engine without a draft reads all of them"


def test_memory_of_a_chunk_grows_to_the_largest_one(store: LocalStore) -> None:
    put(store, FIRST, SECOND)
    buffer = ReadBuffer()
    stage = msgspec.structs.replace(
        WHOLE,
        shard=Shard(0, 1, 0, 1),
        groups=(msgspec.structs.replace(GEOMETRY.groups[0], layers=(0,)),),
    )
    read(store, stage, buffer=buffer)
    found = read(store, buffer=buffer)
    assert [bytes(part.data) for part in found.parts] == [payload_of(FIRST), payload_of(SECOND)]
