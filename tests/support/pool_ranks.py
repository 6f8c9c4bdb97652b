# SPDX-License-Identifier: Apache-2.0
"""Ranks of made-up engines that write chunks of the pool and read them, without a store: a part is its file's bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pd_connector.kv.model import ModelFacts
from pd_connector.pool.form import Form
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.plans import need, needed_parts, plan_load, plan_save
from pd_connector.pool.record import decode, encode, payload_problem, read_header, readable, sealed
from pd_connector.pool.stored import ChunkLoader, describe, gather_piece
from support.caches import Rank
from support.pool_records import FACTS, record

Files = dict[str, bytes]
"""The files of a chunk, by the name of the part."""


def write(
    ranks: Sequence[Rank], number: int, tables: Sequence[Sequence[Sequence[int]]] | None = None
) -> Files:
    """What the ranks of an engine write of a chunk.

    Args:
        tables: of each rank; by default all pages are held.
    """
    files: Files = {}
    for rank, held in zip(ranks, tables or [rank.tables for rank in ranks], strict=True):
        geometry = rank.geometry
        form: Form = describe(rank.cache)
        plan = plan_save(form, geometry, held, number)
        if plan is None:
            continue
        payload = memoryview(bytearray(plan.nbytes))
        for piece in plan.pieces:
            gather_piece(rank.cache, piece, payload, rank.cache.fence())
        start = number * CHUNK_TOKENS
        made: Any = record(
            range(start, start + CHUNK_TOKENS),
            number=number,
            form=plan.form,
            geometry=geometry,
            parts=len(ranks),
        )
        made = msgspec.structs.replace(made, layers=sealed(plan.form, geometry, payload))
        assert made.part not in files
        files[made.part] = encode(made) + payload
    return files


def read(
    rank: Rank,
    files: Mapping[str, bytes],
    number: int,
    span: tuple[int, int],
    tables: Sequence[Sequence[int]] | None = None,
    facts: ModelFacts = FACTS,
) -> int:
    """Load tokens [span) of a chunk into a rank's pages; returns the bytes that were read.

    Raises:
        PoolError: as `decode` and `plan_load`.
    """
    parts = []
    for name in needed_parts(files, rank.geometry):
        found = decode(files[name])
        needed = need(found.form, found.geometry, readable(found, rank.geometry, facts))
        if needed is None:
            continue
        payload = memoryview(files[name])[read_header(files[name]).payload_offset :]
        buffer = memoryview(bytearray(b"\xee" * needed.nbytes))
        for offset, nbytes in needed.ranges:
            place = offset - needed.start
            buffer[place : place + nbytes] = payload[offset : offset + nbytes]
        problem = payload_problem(found, needed.places, buffer, needed.start)
        assert not problem, problem
        parts.append((found.geometry, needed, buffer))
    own = rank.geometry
    pieces = plan_load(
        [part[:2] for part in parts], own, rank.tables if tables is None else tables, number, *span
    )
    ChunkLoader(rank.cache).scatter(pieces, parts, rank.cache.fence())
    return sum(nbytes for _, needed, _ in parts for _, nbytes in needed.ranges)
