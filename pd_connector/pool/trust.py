# SPDX-License-Identifier: Apache-2.0
"""Which writers' chunks an engine uses: those of writers that passed a comparison with a prompt that the engine
computed itself.

A writer is a kind of engine: its version, the layout and dtype of its cache, its codecs, its model, and the adapter.
All engines of a kind are one writer. Each rank keeps its own list of writers, for as long as its weights stay the same.
"""

import hashlib

import msgspec

from pd_connector.errors import Cause
from pd_connector.pool.keys import model_root
from pd_connector.pool.record import Record

WRITER_BYTES = 16
MOST_WRITERS = 4096
"""Kinds of writers that a book remembers. A kind that is forgotten is compared again."""


def writer_of(record: Record) -> bytes:
    """The writer of a part, as a hash. It is the same for the parts of all ranks of the writer."""
    groups = {
        msgspec.structs.replace(group, layers=(0,), scales=(), table=0)
        for group in record.geometry.groups
    }
    kind = (
        record.writer.engine,
        record.writer.codec,
        sorted({run.codec for run in record.form}),
        record.geometry.shard.tp_size,
        sorted(msgspec.json.encode(group).decode() for group in groups),
        (model_root(record.facts) or b"").hex(),
        record.adapter,
    )
    return hashlib.blake2b(msgspec.json.encode(kind), digest_size=WRITER_BYTES).digest()


class WriterTrust:
    """Used by the agent's thread. Outlives it.

    Args:
        own: id of this engine. Its own chunks are always used.
        audits: whether others must pass an audit.
    """

    def __init__(self, own: str, *, audits: bool) -> None:
        self._own = own
        self._audits = audits
        self._passed: dict[bytes, None] = {}
        self._distrusted: dict[bytes, str] = {}

    def problem(self, engine_id: str, writer: bytes) -> tuple[Cause, str] | None:
        """Why a part must not be used; None if it may be.

        Args:
            engine_id: engine id of the record.
            writer: from `writer_of`.
        """
        if why := self._distrusted.get(writer):
            return Cause.AUDIT, f"an earlier audit of this kind of writer found: {why}"
        if not self._audits or engine_id == self._own or writer in self._passed:
            return None
        return Cause.UNAUDITED, "no chunk of this kind of writer has been compared yet"

    def passed(self, writer: bytes) -> None:
        """The writer has passed: all compared KV equals what this engine computes."""
        self._passed[writer] = None
        while len(self._passed) > MOST_WRITERS:
            del self._passed[next(iter(self._passed))]

    def distrust(self, writer: bytes, why: str) -> None:
        """Something of this writer differs."""
        self._passed.pop(writer, None)
        self._distrusted[writer] = why
        while len(self._distrusted) > MOST_WRITERS:
            del self._distrusted[next(iter(self._distrusted))]

    def forget(self) -> None:
        """This engine serves other weights."""
        self._passed.clear()
        self._distrusted.clear()
