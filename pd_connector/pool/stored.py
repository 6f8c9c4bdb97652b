# SPDX-License-Identifier: Apache-2.0
"""Moves chunks between a rank's cache and their bytes at rest; `copy_plan.py` says what moves where. Only the agent's thread
touches the rank's cache."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from pd_connector.codec import DTYPES
from pd_connector.errors import Miss, PoolError, UnsupportedGeometryError
from pd_connector.kv.coding import RAW
from pd_connector.kv.geometry import Geometry, Group
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.pool.chunk_layout import (
    Form,
    PagePlane,
    Run,
    View,
    at_rest,
    bytes_by_plane,
    coded_run,
    form_problem,
    kept_layers,
    wire_run,
)
from pd_connector.pool.codecs import CODED_DTYPES, AtRest
from pd_connector.pool.coded import cut_out
from pd_connector.pool.copy_plan import LoadPiece, SavePiece
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.read_plan import ReadPlan

Buffer = memoryview


def describe(cache: PagedCache, codec: AtRest = "raw") -> Form:
    """What this rank's part of a whole chunk looks like at rest. Empty if ranks with the same heads write all layers.

    Args:
        codec: the codec of all layers that it makes smaller. Other layers stay raw.

    Raises:
        UnsupportedGeometryError: the pool cannot keep chunks of this cache.
    """
    geometry = cache.geometry
    form: list[Run] = []
    if geometry.shard.cp_size > 1:
        raise UnsupportedGeometryError(
            f"{geometry.shard.cp_size} context-parallel ranks share the tokens of a chunk: the pool cannot keep it; "
            "serve this model without `pool`"
        )
    for group in geometry.groups:
        where = f"layers {group.layers[0]}-{group.layers[-1]}"
        if group.kind == "state":
            raise UnsupportedGeometryError(
                f"{where} have recurrent state, which has no chunks: "
                "the pool cannot keep it; serve this model without `pool`"
            )
        if group.state_tokens > 1:
            raise UnsupportedGeometryError(
                f"{where} keep one entry for {group.state_tokens} tokens: the pool cannot keep it; serve this model "
                "without `pool`"
            )
        kept = kept_layers(geometry.shard, group)
        if kept and codec != RAW.name and group.dtype in CODED_DTYPES:
            form.append(coded_run(kept, codec))
            continue
        alike: dict[Run | None, list[int]] = {}
        for layer in kept:
            run = _pages_run(cache.layer(layer), group, geometry)
            alike.setdefault(run, []).append(layer)
        for run, layers in alike.items():
            if run is None:
                form.append(wire_run(tuple(layers), group, len(geometry.heads(group))))
            else:
                form.append(msgspec.structs.replace(run, layers=tuple(layers)))
    return tuple(form)


def _pages_run(pages: LayerPages, group: Group, geometry: Geometry) -> Run | None:
    """One layer's pages as they are; None if they are not dense, or a chunk is not a whole number of them."""
    if not pages.planes or CHUNK_TOKENS % group.page_size:
        return None
    key = _view(pages.key, pages.planes, 0)
    value = None if pages.value is None else _view(pages.value, pages.planes, len(pages.planes) - 1)
    if key is None or (pages.value is not None and value is None):
        return None
    planes = tuple(PagePlane(plane.shape[1], plane.shape[2]) for plane in pages.planes)
    run = Run(group.layers[:1], group.page_size, 0, planes, key, value)
    return None if form_problem((run,), geometry) else run


def _view(view: torch.Tensor, planes: Sequence[torch.Tensor], plane: int) -> View | None:
    """A view of pages that lie one after another as rows of the plane; None if it is not of the plane's pages."""
    rows, size = planes[plane], view.element_size()
    _, heads, row = rows.shape
    offset = view.data_ptr() - rows.data_ptr()
    by_head = view.stride(1)
    if view.stride(0) * size != rows.stride(0) or offset % size or offset < 0 or row % size:
        return None
    if heads > 1:
        if by_head * size != rows.stride(1):
            return None
        by_head = row // size
    strides = (heads * row // size, by_head, *view.stride()[2:])
    return View(plane, tuple(view.shape[1:]), strides, offset // size)


def gather_piece(
    cache: PagedCache, piece: SavePiece, payload: Buffer, fence: torch.cuda.Event | None
) -> None:
    """Write a piece of a `SavePlan` into the payload; see `PagedCache.gather`.

    Args:
        payload: `SavePlan.nbytes` bytes in host memory.
    """
    room = payload[piece.offset : piece.offset + piece.nbytes]
    cache.gather(piece.route, piece.chunk, piece.pages, room, fence)


def gathered_bytes(pieces: Sequence[LoadPiece]) -> int:
    """Bytes of the pieces of `plan_load` that do not lie in a part's buffer as they are."""
    return sum(piece.chunk.nbytes(piece.route) for piece in pieces if piece.offset is None)


def payloads(
    pieces: Sequence[LoadPiece], parts: Sequence[tuple[Geometry, ReadPlan, Buffer]], room: Buffer
) -> list[Buffer]:
    """The payload of each piece of `plan_load`, for `PagedCache.scatter` or `compare`. Any thread may call it.

    Args:
        parts: as for `plan_load`, each with its `ReadPlan.nbytes` bytes in host memory, which are verified.
        room: `gathered_bytes(pieces)` bytes. The payloads lie in it and in the parts' buffers.

    Raises:
        PoolError: the views of a run do not fit its geometry. `cause` is `UNLIKE`.
    """
    caches: dict[tuple[int, Run], PagedCache] = {}
    views, used = [], 0
    for piece in pieces:
        geometry, needed, buffer = parts[piece.part]
        nbytes = piece.chunk.nbytes(piece.route)
        if piece.offset is not None:
            payload = buffer[piece.offset : piece.offset + nbytes]
        else:
            payload, used = room[used : used + nbytes], used + nbytes
            key = piece.part, piece.run
            if piece.run.coded:
                _cut_out(piece, geometry, needed, buffer, payload)
            else:
                if key not in caches:
                    caches[key] = open_run(piece.run, geometry, needed, buffer)
                _gather(caches[key], piece, payload)
        views.append(payload.toreadonly())
    return views


def _gather(stored: PagedCache, piece: LoadPiece, room: Buffer) -> None:
    """Write the piece's payload, out of a run at rest."""
    size = piece.route.source.page_size
    pages = piece.chunk.pages(size)
    start = pages.start * size // CHUNK_TOKENS * CHUNK_TOKENS + piece.run.first_token
    stored.gather(piece.route, piece.chunk, [page - start // size for page in pages], room)


def _cut_out(
    piece: LoadPiece, geometry: Geometry, needed: ReadPlan, buffer: Buffer, room: Buffer
) -> None:
    """Write the piece's payload, out of a coded run."""
    (group,) = at_rest(piece.run, geometry).groups
    starts = {place.layer: place.offset - needed.start for place in needed.places}
    data, payload = np.frombuffer(buffer, np.uint8), np.frombuffer(room, np.uint8)
    heads = len(geometry.heads(group))
    cut_out(piece.run, piece.route, piece.chunk, heads, starts, data, payload)


def open_run(run: Run, geometry: Geometry, needed: ReadPlan, buffer: Buffer) -> PagedCache:
    """A run at rest as a cache, on the host.

    Args:
        run: run of `needed.form`.
        geometry: geometry of the writer.
        buffer: `needed.nbytes` bytes; not copied.

    Raises:
        PoolError: the views do not fit the geometry. `cause` is `UNLIKE`.
    """
    stored = at_rest(run, geometry)
    (group,) = stored.groups
    offsets = {place.layer: place.offset - needed.start for place in needed.places}
    room = bytes_by_plane(run, group, len(stored.heads(group)))
    data = torch.from_numpy(np.frombuffer(buffer, np.uint8))
    assert run.key is not None
    layers = {}
    for layer in run.layers:
        planes, start = [], offsets[layer]
        for nbytes in room:
            planes.append(data[start : start + nbytes])
            start += nbytes
        key = _seen(run.key, planes, group, run.view_pages)
        value = None if run.value is None else _seen(run.value, planes, group, run.view_pages)
        rows = zip(run.planes, planes, strict=False)
        dense = tuple(
            part.view(run.view_pages, described.heads, described.nbytes) for described, part in rows
        )
        layers[layer] = LayerPages(key, value, dense)
    try:
        return PagedCache(layers, stored)
    except UnsupportedGeometryError as error:
        raise PoolError(Miss.UNLIKE, f"pages at rest: {error}") from None


def _seen(view: View, planes: Sequence[torch.Tensor], group: Group, pages: int) -> torch.Tensor:
    """`[page, kv head, token, dim]`, or tiled."""
    plane = planes[view.plane]
    elements = plane.view(DTYPES.get(group.dtype, torch.uint8))
    first = elements.storage_offset() + view.offset
    return elements.as_strided((pages, *view.shape), view.strides, first)
