# SPDX-License-Identifier: Apache-2.0
"""What a rank's part of a chunk looks like at rest. Pure functions; `stored.py` moves the bytes.

A part's payload is a sequence of runs. A run has the bytes of layers with the same layout, layer after layer: the
writer's own pages of the chunk, `[plane][page][kv head][bytes]`, with K and V described as views of them. If the
writer's page size does not divide a chunk, or its pages are not dense, the run is one page of `CHUNK_TOKENS` tokens
instead, `[K|V][kv head][token][dim]`. A reader with another layout reads the run through the views. A reader with the
same layout takes the bytes as they are.

A coded run has, layer after layer, one plane `[kv head][token][dim]` of its codec for K and one for V, with all held
tokens (docs/codecs.md). Their sizes follow from their shapes.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES, RAW, Elements, coding
from pd_connector.kv.geometry import Count, Geometry, Group, Layers, Positive, Shard
from pd_connector.plan.sizes import parts, token_bytes
from pd_connector.pool.codecs import CODED_DTYPES, AtRest
from pd_connector.pool.keys import CHUNK_TOKENS

RUN_ALIGNMENT = 64
"""Runs begin at a multiple of this in a payload, so that elements of any size are aligned."""

Extents = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=3, max_length=5)]
Strides = Annotated[tuple[Count, ...], msgspec.Meta(min_length=4, max_length=6)]


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """K or V in the pages of one layer at rest.

    Attributes:
        plane: the plane in which it lies.
        shape: `(kv head, token, dim)`, or tiled `(kv head, token tile, token, dim tile, dim)`.
        strides: in elements, of a page and then of each axis of `shape`.
        offset: elements from the plane's beginning.
    """

    plane: Annotated[int, msgspec.Meta(ge=0, le=1)]
    shape: Extents
    strides: Strides
    offset: Count

    @property
    def tokens(self) -> int:
        """Tokens of a page of the view."""
        return self.shape[1] if len(self.shape) == 3 else self.shape[1] * self.shape[2]

    def stop(self, pages: int) -> int:
        """End of the last element, in elements from the plane's beginning."""
        reach = zip((pages, *self.shape), self.strides, strict=True)
        return self.offset + sum((extent - 1) * stride for extent, stride in reach) + 1


class PagePlane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plane of a layer's pages: bytes `[page, heads, nbytes]`, where `heads` is 1 if heads do not lie apart."""

    heads: Positive
    nbytes: Positive


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers of one group that have the same layout at rest.

    Attributes:
        layers: in model numbering, ascending.
        page_size: tokens of a page at rest.
        first_token: the first held token of the chunk. A sliding window has passed the pages before it.
        planes: of each layer; none for a page in wire order, and for a coded run.
        key: K, or the latent; None for a coded run.
        value: V; None for a latent, for pages whose dtype is not known, and for a coded run.
        codec: codec of the bytes.
    """

    layers: Layers
    page_size: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_TOKENS)]
    first_token: Annotated[int, msgspec.Meta(ge=0, lt=CHUNK_TOKENS)]
    planes: Annotated[tuple[PagePlane, ...], msgspec.Meta(max_length=2)]
    key: View | None = None
    value: View | None = None
    codec: AtRest = "raw"

    @property
    def coded(self) -> bool:
        return self.codec != RAW.name

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return CHUNK_TOKENS - self.first_token

    @property
    def view_pages(self) -> int:
        """Pages of the views that are held; several of them can be one page."""
        assert self.key is not None
        return self.tokens // self.page_size * (self.page_size // self.key.tokens)


Form = Annotated[tuple[Run, ...], msgspec.Meta(max_length=4096)]


class Place(NamedTuple):
    """Bytes [offset, offset + nbytes) of a payload: one layer of a run."""

    layer: int
    offset: int
    nbytes: int


def group_of(geometry: Geometry, layer: int) -> Group | None:
    """The group that has this layer."""
    return next((group for group in geometry.groups if layer in group.layers), None)


def kept_layers(shard: Shard, group: Group) -> tuple[int, ...]:
    """The layers of a group that this rank writes. If several ranks hold the same heads, each writes a share."""
    replicas, replica = shard.replicas(group.heads), shard.replica(group.heads)
    return tuple(layer for layer in group.layers if layer % replicas == replica)


def bytes_by_plane(run: Run, group: Group, heads: int) -> tuple[int, ...]:
    """Bytes of one layer of a run, by plane.

    Args:
        heads: KV heads that the writer holds.
    """
    if run.coded:
        coded_bytes, elements = coding(run.codec).coded_bytes, Elements(group.dtype)
        shapes = ((part, (heads, run.tokens, dim)) for part, dim in parts(group))
        return (sum(coded_bytes(*shape, elements) for shape in shapes),)
    if not run.planes:
        return (heads * CHUNK_TOKENS * token_bytes(group),)
    return tuple(run.view_pages * plane.heads * plane.nbytes for plane in run.planes)


def places(form: Sequence[Run], geometry: Geometry) -> list[Place]:
    """Where each layer lies in the payload.

    Args:
        geometry: geometry of the writer.
    """
    layer_places: list[Place] = []
    offset = 0
    for run in form:
        group = group_of(geometry, run.layers[0])
        assert group is not None
        nbytes = sum(bytes_by_plane(run, group, len(geometry.heads(group))))
        offset = -(-offset // RUN_ALIGNMENT) * RUN_ALIGNMENT
        for layer in run.layers:
            layer_places.append(Place(layer, offset, nbytes))
            offset += nbytes
    return layer_places


def wire_view(heads: int, dim: int, offset: int) -> View:
    """K or V of a run in wire order.

    Args:
        offset: elements before it.
    """
    strides = (heads * CHUNK_TOKENS * dim, CHUNK_TOKENS * dim, dim, 1)
    return View(0, (heads, CHUNK_TOKENS, dim), strides, offset)


def coded_run(layers: tuple[int, ...], codec: AtRest) -> Run:
    """A coded run of whole chunks."""
    return Run(layers, CHUNK_TOKENS, 0, (), codec=codec)


def wire_run(layers: tuple[int, ...], group: Group, heads: int) -> Run:
    """A run in wire order.

    Raises:
        UnsupportedGeometryError: pages of this dtype cannot be split.
    """
    if group.dtype not in ELEMENT_BYTES:
        raise UnsupportedGeometryError(
            f"layers {layers[0]}-{layers[-1]}: pages of {group.dtype} with {group.page_size} tokens cannot be "
            f"taken apart: the pool keeps them only if their size divides {CHUNK_TOKENS} (--block-size)"
        )
    views, offset = [], 0
    for _, dim in parts(group):
        views.append(wire_view(heads, dim, offset))
        offset += heads * CHUNK_TOKENS * dim
    key, value = views[0], views[1] if len(views) > 1 else None
    return Run(layers, CHUNK_TOKENS, 0, (), key, value)


def form_problem(form: Sequence[Run], geometry: Geometry) -> str:
    """Why a form cannot be that of a rank with this geometry; empty if it can. What passes lies within its bytes."""
    shard = geometry.shard
    if shard.tp_rank >= shard.tp_size or any(
        group.heads % shard.tp_size and shard.tp_size % group.heads for group in geometry.groups
    ):
        return f"rank {shard.tp_rank} of {shard.tp_size} does not hold whole heads"
    if any(len(group.scales) not in (0, len(group.layers)) for group in geometry.groups):
        return "its scales are not those of its layers"
    seen: set[int] = set()
    for run in form:
        group = group_of(geometry, run.layers[0])
        where = f"layers {run.layers[0]}-{run.layers[-1]}"
        if group is None or not set(run.layers) <= set(group.layers):
            return f"{where} are not of one group"
        if seen.intersection(run.layers) or list(run.layers) != sorted(set(run.layers)):
            return f"{where} are there twice, or not in order"
        seen.update(run.layers)
        if problem := _run_problem(run, group, len(geometry.heads(group))):
            return f"{where}: {problem}"
    return ""


def _run_problem(run: Run, group: Group, heads: int) -> str:
    if run.coded:
        if run != msgspec.structs.replace(
            coded_run(run.layers, run.codec), first_token=run.first_token
        ):
            return f"{run.codec} of pages of {run.page_size} tokens, or of views"
        if group.dtype not in CODED_DTYPES:
            return f"{run.codec} of a cache of {group.dtype}"
        return ""
    if run.key is None:
        return "pages without a view"
    whole = group.page_size if run.planes else CHUNK_TOKENS
    if run.page_size != whole or CHUNK_TOKENS % whole or run.first_token % whole:
        return f"pages of {run.page_size} tokens from token {run.first_token} on, of {whole} in the cache"
    views = [run.key] if run.value is None else [run.key, run.value]
    room = bytes_by_plane(run, group, heads)
    for view in views:
        if len(view.strides) != len(view.shape) + 1 or len(view.shape) == 4:
            return f"a view of {len(view.shape)} axes with {len(view.strides)} strides"
        if view.tokens != run.key.tokens or run.page_size % view.tokens or view.shape[0] != heads:
            return f"a view of shape {view.shape} in pages of {run.page_size} tokens with {heads} heads"
        size = ELEMENT_BYTES.get(group.dtype, 1)
        if view.plane >= len(room) or view.stop(run.view_pages) * size > room[view.plane]:
            return f"a view that ends at element {view.stop(run.view_pages)} of {room}"
    dims = [dim for _, dim in parts(group)]
    if group.dtype in ELEMENT_BYTES:
        view_dims = [math.prod(view.shape) // (heads * view.tokens) for view in views]
        if view_dims != dims:
            return f"views of {view_dims} dims, of {dims} in the cache"
    apart = sum(plane.nbytes * plane.heads for plane in run.planes)
    if any(plane.nbytes % ELEMENT_BYTES.get(group.dtype, 1) for plane in run.planes):
        return f"planes of {run.planes[0].nbytes} bytes a page, of {group.dtype}"
    if run.planes and apart != heads * run.key.tokens * token_bytes(group):
        return f"planes of {apart} bytes a page, of {heads * run.key.tokens * token_bytes(group)} in the cache"
    return ""


def at_rest(run: Run, geometry: Geometry) -> Geometry:
    """A run as the cache of one rank.

    Each head is stored once, so the ranks that hold the same heads count as one. No window is left: a run holds all
    tokens from its first one on.

    Args:
        geometry: geometry of the writer.
    """
    group = group_of(geometry, run.layers[0])
    assert group is not None
    shard, replicas = geometry.shard, geometry.shard.replicas(group.heads)
    shard = msgspec.structs.replace(
        shard, tp_rank=shard.tp_rank // replicas, tp_size=shard.tp_size // replicas
    )
    scales = tuple(group.scale(layer) for layer in run.layers) if group.scales else ()
    kept = msgspec.structs.replace(group, layers=run.layers, scales=scales, window=0, table=0)
    if not run.planes:
        kept = msgspec.structs.replace(kept, page_size=CHUNK_TOKENS, layout="", heads_apart=False)
    return Geometry(shard, (kept,))
