# SPDX-License-Identifier: Apache-2.0
"""Ranks of made-up engines that write chunks of the pool and read them, without a store: a part is its file's bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from pd_connector.kv.model import ModelFacts
from pd_connector.pool.chunk_layout import Form
from pd_connector.pool.codecs import AtRest
from pd_connector.pool.copy_plan import plan_load, plan_save
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.read_plan import need, needed_parts
from pd_connector.pool.record import (
    Writer,
    decode,
    encode,
    payload_problem,
    read_header,
)
from pd_connector.pool.stored import describe, gather_piece, gathered_bytes, payloads
from support.caches import LAYOUTS, ON_THE_HOST, Rank
from support.filled import bits
from support.pool_records import FACTS, record, sealed

Files = dict[str, bytes]
"""The files of a chunk, by the name of the part."""


Dense = dict[tuple[int, bool], torch.Tensor]
"""Bits of all heads and tokens, `[head, token, dim]`, by layer and whether they are V's."""


def index(rank: Rank, layer: int, v: bool) -> torch.Tensor:
    """Where the elements of the prompt lie in the layer's storage: `[head, token, dim]`."""
    group, shape = rank.groups[layer], rank.shapes[layer]
    tokens = np.arange(len(rank.tables[group.table]) * group.page_size)
    page = np.asarray(rank.tables[group.table])[tokens // group.page_size]
    heads = np.arange(shape.heads)[:, None, None]
    dims = np.arange(shape.value_dim if v else shape.key_dim)
    where = page[:, None], heads, (tokens % group.page_size)[:, None], dims
    place: Any = (LAYOUTS | ON_THE_HOST)[group.layout].place
    return torch.from_numpy(place(shape, *np.broadcast_arrays(*where), v))


def seen(rank: Rank, layer: int, v: bool) -> torch.Tensor:
    """The bits of a rank's heads of a layer: `[head, token, dim]`."""
    return bits(rank.storage[layer])[index(rank, layer, v)]


def fill_all(ranks: Sequence[Rank], tokens: int, seed: int, *, spread: bool = False) -> Dense:
    """Give all ranks that hold an element the same one.

    Args:
        spread: ordinary numbers instead of any bits.
    """
    source = torch.Generator().manual_seed(seed)
    dense: Dense = {}
    for rank in ranks:
        for layer, group in rank.groups.items():
            for v in rank.parts(layer):
                storage, where = bits(rank.storage[layer]), index(rank, layer, v)
                shape = group.heads, tokens, where.shape[-1]
                if (layer, v) not in dense:
                    made = torch.randint(0, 256, (*shape, storage.element_size()), generator=source)
                    whole = made.to(torch.uint8).view(storage.dtype)[..., 0]
                    if spread:
                        numbers = torch.randn(shape, generator=source)
                        whole = bits(numbers.to(rank.storage[layer].dtype))
                    dense[layer, v] = whole
                heads = rank.geometry.heads(group)
                storage[where[:, :tokens]] = dense[layer, v][heads.start : heads.stop]
    return dense


def own_part(rank: Rank, dense: Dense, layer: int, v: bool) -> torch.Tensor:
    """What a rank must have of a layer."""
    heads = rank.geometry.heads(rank.groups[layer])
    return dense[layer, v][heads.start : heads.stop]


def write(
    ranks: Sequence[Any],
    number: int,
    tables: Sequence[Sequence[Sequence[int]]] | None = None,
    facts: ModelFacts = FACTS,
    codec: AtRest = "raw",
) -> Files:
    """What the ranks of an engine write of a chunk.

    Args:
        tables: of each rank; by default all pages are held.
        codec: in which the engine keeps chunks.
    """
    files: Files = {}
    for rank, held in zip(ranks, tables or [rank.tables for rank in ranks], strict=True):
        geometry = rank.geometry
        form: Form = describe(rank.cache, codec)
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
            facts=facts,
            writer=Writer("vllm 0.32.0", "e1", codec),
        )
        made = msgspec.structs.replace(made, layers=sealed(plan.form, geometry, payload))
        assert made.part not in files
        files[made.part] = encode(made) + payload
    return files


def read(
    rank: Any,
    files: Mapping[str, bytes],
    number: int,
    span: tuple[int, int],
    tables: Sequence[Sequence[int]] | None = None,
) -> int:
    """Load tokens [span) of a chunk into a rank's pages; returns the bytes that were read.

    Raises:
        PoolError: as `decode` and `plan_load`.
    """
    parts = []
    for name in needed_parts(files, rank.geometry):
        found = decode(files[name])
        needed = need(found.form, found.geometry, rank.geometry)
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
    tables = rank.tables if tables is None else tables
    pieces = plan_load([part[:2] for part in parts], rank.geometry, tables, number, *span)
    room = memoryview(bytearray(gathered_bytes(pieces)))
    for piece, payload in zip(pieces, payloads(pieces, parts, room), strict=True):
        rank.cache.scatter(piece.route, piece.chunk, piece.pages, payload, rank.cache.fence())
    return sum(nbytes for _, needed, _ in parts for _, nbytes in needed.ranges)
