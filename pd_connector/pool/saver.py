# SPDX-License-Identifier: Apache-2.0
"""Writes a rank's part of a chunk into the store."""

import msgspec

from pd_connector.kv.geometry import Geometry
from pd_connector.kv.model import ModelFacts, spoken
from pd_connector.pool.chunk_layout import Form, places
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.part_names import draft_mark, part_draft
from pd_connector.pool.record import SUM_BYTES, LayerBytes, Record, Writer, encode, layer_sum
from pd_connector.pool.store.base import Refusal, Store, Why, Writing

SAVED = "saved"


class WantedPart:
    """A part that the store takes. It has room there until `write` or `cancel` has been called."""

    def __init__(self, record: Record, writing: Writing) -> None:
        self._record = record
        self._writing = writing

    def write(self, payload: memoryview) -> str:
        """Write the part. Returns `SAVED`, or the reason why the part was not kept.

        Raises:
            PoolError: the store takes no more bytes.
        """
        record, layers = self._record, []
        start = len(encode(record))
        with self._writing as writing:
            for place in record.layers:
                data = payload[place.offset : place.offset + place.nbytes]
                layers.append(msgspec.structs.replace(place, sum=layer_sum(data)))
                writing.write(start + place.offset, data)  # a CPU's cache still has it
            head = encode(msgspec.structs.replace(record, layers=tuple(layers)))
            writing.write(0, memoryview(head))
            return SAVED if writing.publish() else Why.UNWELL

    def cancel(self) -> None:
        """It could not be copied."""
        self._writing.cancel()


class Saver:
    """May be used by several threads. A chunk that lacks the writer's draft model is replaced: engines that draft do not
    read it, and the others read its successor as well.

    Args:
        geometry: geometry of the rank's cache.
        writer: the writer that every record names.
        parts: number of ranks of the engine; each writes a part of every chunk.
    """

    def __init__(self, store: Store, geometry: Geometry, writer: Writer, parts: int) -> None:
        self._store = store
        self._geometry = geometry
        self._writer = writer
        self._parts = parts

    def ask(
        self, chunk: PromptChunk, tenant: str, facts: ModelFacts, form: Form
    ) -> WantedPart | str:
        """Ask the store for room before the chunk is copied, because another engine has often saved it already. Returns
        the part, or the reason why the store does not take it.

        Args:
            facts: the model that computed it.
            form: what the payload will look like.

        Raises:
            PoolError: it cannot be described.
        """
        unsealed = tuple(
            LayerBytes(*place, bytes(SUM_BYTES)) for place in places(form, self._geometry)
        )
        record = Record(
            key=chunk.key,
            parent=chunk.parent,
            number=chunk.number,
            tokens=chunk.tokens,
            inputs=chunk.inputs,
            adapter=chunk.adapter,
            salt=chunk.salt,
            facts=spoken(facts),
            geometry=self._geometry,
            form=form,
            layers=unsealed,
            writer=self._writer,
            parts=self._parts,
        )
        writing = self._begin(record, tenant)
        if writing is Why.EXISTS and self._lacks_draft(record):
            self._store.remove([record.key])
            writing = self._begin(record, tenant)
        return writing if isinstance(writing, Why) else WantedPart(record, writing)

    def _begin(self, record: Record, tenant: str) -> Writing | Why:
        writing = self._store.begin(
            record.key,
            parent=record.parent,
            part=record.part,
            parts=self._parts,
            nbytes=len(encode(record)) + record.payload_bytes,
            tenant=tenant,
            writer=self._writer.engine_id,
        )
        return writing.why if isinstance(writing, Refusal) else writing

    def _lacks_draft(self, record: Record) -> bool:
        """Whether the stored chunk lacks KV of this record's draft model."""
        own = draft_mark(record.facts.draft)
        (stored,) = self._store.find([record.key]) if own else (None,)
        return stored is not None and any(part_draft(name) != own for name in stored.parts)
