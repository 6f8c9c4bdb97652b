# SPDX-License-Identifier: Apache-2.0
"""Reads the parts of a chunk that a rank needs, and verifies them before a byte is used."""

import mmap
import time
from collections.abc import Sequence
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.kv.geometry import Geometry, has_drafts
from pd_connector.kv.model import ModelFacts, drafts_alike
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.read_plan import ReadPlan, need, needed_parts
from pd_connector.pool.record import (
    HEADER,
    Header,
    Record,
    decode,
    payload_problem,
    read_header,
    record_problem,
)
from pd_connector.pool.store.base import Reading, Store
from pd_connector.pool.trust import writer_of


class ReadPart(NamedTuple):
    """A part whose bytes are verified.

    Attributes:
        geometry: geometry of its writer.
        need: the part of it that was read.
        data: `need.nbytes` bytes.
        engine_id: engine id of its writer.
        writer: from `trust.writer_of`.
        codec: the coarsest codec in which its KV may have passed.
    """

    geometry: Geometry
    need: ReadPlan
    data: memoryview
    engine_id: str
    writer: bytes
    codec: str


class ReadChunk(NamedTuple):
    """All that a rank needs of a chunk.

    Attributes:
        own: the rank's cache.
        nbytes: read.
    """

    parts: list[ReadPart]
    own: Geometry
    nbytes: int


class ReadBuffer:
    """Memory of one chunk on its way. It grows to the largest chunk. It begins at pages of memory, so that a disk can read
    straight into it."""

    def __init__(self) -> None:
        self._regions: dict[int, mmap.mmap] = {}

    def room(self, place: int, nbytes: int) -> memoryview:
        """Memory for a part. `place` is the part's number in its chunk; -1 for the payloads that are made from the
        parts."""
        if nbytes and len(self._regions.get(place, b"")) < nbytes:
            self._regions[place] = mmap.mmap(-1, nbytes)
        return memoryview(self._regions[place] if nbytes else b"")[:nbytes]


class Loader:
    """Any thread may use it.

    Args:
        geometry: geometry of the rank's cache.
        codecs: this engine uses only KV that has passed in these codecs.
    """

    def __init__(self, store: Store, geometry: Geometry, codecs: tuple[str, ...]) -> None:
        self._store = store
        self._geometry = geometry
        self._drafts = has_drafts(geometry)
        self._codecs = codecs

    def comes_from_afar(self, chunk: PromptChunk) -> bool:
        """Whether `bring` waits for a far store."""
        return not self._store.brings_at_once(chunk.key)

    def prefetch(self, chunks: Sequence[PromptChunk]) -> None:
        """Have chunks of a far store brought to this host in one row, before `bring` waits for each."""
        self._store.prefetch([chunk.key for chunk in chunks])

    def bring(self, chunk: PromptChunk) -> None:
        """Bring a chunk to this host before it is read, so that no buffer is held during the wait for a far store.
        Raises PoolError."""
        self._store.bring(chunk.key)

    @property
    def far_moved_s(self) -> float:
        """When a chunk last came from a far store, on the steady clock."""
        return self._store.far_moved_s

    def read(self, chunk: PromptChunk, facts: ModelFacts, buffer: ReadBuffer) -> ReadChunk:
        """Read and verify a chunk that is on this host. A chunk of a far store must be brought first (`bring`).

        Args:
            facts: the model that will use it.
            buffer: takes the bytes.

        Raises:
            PoolError: the chunk is not there, is not the expected chunk, or is damaged. A damaged chunk is removed from
                the store.
        """
        try:
            return self._read(chunk, facts, buffer)
        except PoolError as error:
            if error.cause is Miss.DAMAGED:
                self._store.remove([chunk.key])
            raise

    def _read(self, chunk: PromptChunk, facts: ModelFacts, buffer: ReadBuffer) -> ReadChunk:
        # A reading thread must not wait for the far store: what was evicted since it was brought is gone.
        stored = self._store.bring(chunk.key) if self._store.brings_at_once(chunk.key) else None
        if stored is None:
            raise PoolError(Miss.EVICTED, f"chunk {chunk.number} is no longer there")
        parts: list[ReadPart] = []
        own = self._geometry
        for name in needed_parts(stored.parts, self._geometry):
            with self._store.read(chunk.key, name) as reading:
                header, record = read_head(reading)
                if problem := record_problem(record, chunk, facts, self._codecs):
                    raise PoolError(*problem)
                if self._drafts and not drafts_alike(record.facts, facts):
                    detail = f"chunk {chunk.number} has no KV of this engine's draft model"
                    raise PoolError(Miss.DRAFT, detail)
                needed = need(record.form, record.geometry, own)
                if needed is None:
                    continue
                data = buffer.room(len(parts), needed.nbytes)
                _fill(data, reading, record, needed, header.payload_offset)
                origin = record.writer.engine_id, writer_of(record), record.writer.codec
                parts.append(ReadPart(record.geometry, needed, data, *origin))
        return ReadChunk(parts, own, sum(part.need.nbytes for part in parts))


def seconds_to_read(store: Store, key: bytes) -> float | None:
    """Read all parts of a chunk and drop them, to measure the store. None if it cannot be read."""
    began_s = time.monotonic()
    try:
        if (stored := store.bring(key)) is None:
            return None
        for part in stored.parts:
            with store.read(key, part) as reading:
                reading.into(memoryview(bytearray(reading.nbytes)), 0)
    except PoolError:
        return None
    return time.monotonic() - began_s


def read_head(reading: Reading) -> tuple[Header, Record]:
    """Header and record of a part, verified.

    Raises:
        PoolError: as `Reading.into` and `record.decode`.
    """
    header = read_header(reading.take(0, HEADER.size))
    return header, decode(reading.take(0, HEADER.size + header.record_bytes))


def _fill(
    data: memoryview, reading: Reading, record: Record, needed: ReadPlan, payload_offset: int
) -> None:
    """Read what is needed of a part, and verify each layer."""
    for offset, nbytes in needed.ranges:
        start = offset - needed.start
        reading.into(data[start : start + nbytes], payload_offset + offset)
    if problem := payload_problem(record, needed.places, data, needed.start):
        raise PoolError(Miss.DAMAGED, f"chunk {record.number}: {problem}")
