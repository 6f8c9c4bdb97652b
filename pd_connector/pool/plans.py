# SPDX-License-Identifier: Apache-2.0
"""Which bytes pass between a rank's pages and the parts of a chunk at rest. Pure functions; `stored.py` moves them.

A page table lists a request's pages from its first token on; -1 stands for a page that is not held, or must not be
written.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pd_connector.errors import Miss, PoolError, UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES, RAW
from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Group, Shard, page_span
from pd_connector.plan.chunks import READ_CHUNK_BYTES, Chunk
from pd_connector.plan.route import Route, routes
from pd_connector.plan.rules import NEWEST_RULES
from pd_connector.plan.sizes import span_bytes
from pd_connector.pool.form import (
    RUN_ALIGNMENT,
    Place,
    Run,
    at_rest,
    group_of,
    kept_layers,
    part_shard,
    places,
)
from pd_connector.pool.keys import CHUNK_TOKENS

Tables = Sequence[Sequence[int]]
GATHER_BYTES = 8 << 20
"""Most bytes of a piece of a save, unless one layer has more. The agent's thread does other work between pieces."""


class SavePiece(NamedTuple):
    """Some layers of a run, which one `PagedCache.gather` writes to bytes [offset, offset + nbytes) of the payload."""

    route: Route
    chunk: Chunk
    pages: tuple[int, ...]
    offset: int
    nbytes: int


class SavePlan(NamedTuple):
    """How a rank writes its part of a chunk.

    Attributes:
        form: the runs that it holds; a run whose pages a window has passed is left out, or begins later.
        nbytes: of the payload.
        pieces: in the order of the payload.
    """

    form: tuple[Run, ...]
    nbytes: int
    pieces: tuple[SavePiece, ...]


def plan_save(
    form: Sequence[Run], geometry: Geometry, tables: Tables, number: int
) -> SavePlan | None:
    """How a rank writes a chunk that it has computed; None if it holds nothing of it.

    Args:
        form: from `stored.describe`, of whole chunks.
        geometry: of the rank's cache.
        tables: the request's pages, by table.
        number: of the chunk.
    """
    held = [(run, *_held(run, geometry, tables, number)) for run in form]
    kept = tuple(
        msgspec.structs.replace(run, first_token=first) for run, first, pages in held if pages
    )
    if not kept:
        return None
    offsets = {place.layer: place for place in places(kept, geometry)}
    pieces: list[SavePiece] = []
    for run, first, pages in held:
        if not pages:
            continue
        route, nbytes = _own_route(run, geometry), offsets[run.layers[0]].nbytes
        start = number * CHUNK_TOKENS
        for low, high in _rows(len(run.layers), nbytes, GATHER_BYTES):
            chunk = Chunk(0, 0, low, high, start + first, start + CHUNK_TOKENS, bool(run.planes))
            offset = offsets[run.layers[low]].offset
            pieces.append(SavePiece(route, chunk, pages, offset, (high - low) * nbytes))
    last = offsets[kept[-1].layers[-1]]
    return SavePlan(kept, last.offset + last.nbytes, tuple(pieces))


def _held(run: Run, geometry: Geometry, tables: Tables, number: int) -> tuple[int, tuple[int, ...]]:
    """The first token of the chunk from which on all pages of a run are held, and these pages; none if the chunk's
    last page is not held, or a page in wire order is not held as a whole."""
    group = group_of(geometry, run.layers[0])
    assert group is not None
    start = number * CHUNK_TOKENS
    span = page_span(start, start + CHUNK_TOKENS, group.page_size)
    pages = tuple(tables[group.table][span.start : span.stop])
    gone = max((place + 1 for place, page in enumerate(pages) if page < 0), default=0)
    if len(pages) < len(span) or gone == len(pages) or (gone and not run.planes):
        return 0, ()
    return gone * group.page_size, pages[gone:]


@functools.lru_cache(maxsize=256)
def _own_route(run: Run, geometry: Geometry) -> Route:
    """A run's layers, all heads of the rank, as they are."""
    group = group_of(geometry, run.layers[0])
    assert group is not None
    heads = geometry.heads(group)
    return Route(group, group, run.layers, heads, 0, 0, RAW.name, bool(run.planes), NEWEST_RULES)


class Need(NamedTuple):
    """What a reader's rank needs of one part.

    Attributes:
        form: the part's runs with the layers that are needed.
        places: of these layers, in the order of the payload.
        start: where the reader's buffer begins in the payload.
        nbytes: of the buffer.
    """

    form: tuple[Run, ...]
    places: tuple[Place, ...]
    start: int
    nbytes: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Offset and bytes of each range of the payload that must be read. It belongs at `offset - start` in the
        buffer."""
        found: list[tuple[int, int]] = []
        for _, offset, nbytes in self.places:
            if found and sum(found[-1]) == offset:
                found[-1] = found[-1][0], found[-1][1] + nbytes
            else:
                found.append((offset, nbytes))
        return found


def needed_parts(names: Iterable[str], own: Geometry) -> list[str]:
    """The parts that have something for a rank with this geometry, of all parts of a chunk.

    >>> group = Group(kind="attention", layers=(0, 1), heads=8, key_dim=64, value_dim=64, page_size=16,
    ...               window=0, dtype="bfloat16", layout="NHD", heads_apart=True)
    >>> own = Geometry(Shard(first_layer=0, stop_layer=2, tp_rank=1, tp_size=2), (group,))
    >>> needed_parts(["0-2.0of4", "0-2.1of4", "0-2.2of4", "0-2.3of4"], own)
    ['0-2.2of4', '0-2.3of4']
    """
    found = []
    for name in names:
        shard = part_shard(name)
        if shard is not None and any(_has_of(shard, own, group) for group in own.groups):
            found.append(name)
    return found


def _has_of(shard: Shard, own: Geometry, group: Group) -> bool:
    """Whether a rank with this shard writes something of a group of `own`."""
    stage = range(shard.first_layer, shard.stop_layer)
    kept = kept_layers(shard, group)
    return _meet(shard.heads(group.heads), own.heads(group)) and any(
        layer in stage or layer >= DRAFT_LAYERS for layer in kept
    )


def need(form: Sequence[Run], geometry: Geometry, own: Geometry) -> Need | None:
    """What a rank with the geometry `own` needs of a part; None if that is nothing.

    Args:
        form, geometry: of the part's record.
        own: see `record.readable`.
    """
    wanted = {layer: group for group in own.groups for layer in group.layers}
    kept: list[Run] = []
    for run in form:
        group = group_of(geometry, run.layers[0])
        assert group is not None
        layers = tuple(
            layer
            for layer in run.layers
            if layer in wanted and _meet(geometry.heads(group), own.heads(wanted[layer]))
        )
        if layers:
            kept.append(msgspec.structs.replace(run, layers=layers))
    layers = tuple(layer for run in kept for layer in run.layers)
    found = tuple(place for place in places(form, geometry) if place.layer in layers)
    if not found:
        return None
    start = found[0].offset // RUN_ALIGNMENT * RUN_ALIGNMENT
    return Need(tuple(kept), found, start, found[-1].offset + found[-1].nbytes - start)


class LoadPiece(NamedTuple):
    """Some layers of a run, which one `PagedCache.scatter` writes into own pages.

    Attributes:
        part: place of the part among those that are read.
        run: of the part's `Need.form`.
        route: from the run, as a cache, to the reader's cache.
        chunk: its tokens count from the prompt's beginning.
        pages: own pages of the chunk; all of them can be written.
        offset: where the payload lies in the part's buffer as it is; None if it must be gathered.
    """

    part: int
    run: Run
    route: Route
    chunk: Chunk
    pages: tuple[int, ...]
    offset: int | None


def plan_load(
    parts: Sequence[tuple[Geometry, Need]],
    own: Geometry,
    tables: Tables,
    number: int,
    first_token: int,
    stop_token: int,
) -> list[LoadPiece]:
    """How a rank takes a chunk out of its parts into own pages.

    Args:
        parts: the writer's geometry, and what is needed of it, for each of `needed_parts`.
        own: as for `need`.
        tables: own pages of the request, by table; -1: must not be written.
        number: of the chunk.
        first_token, stop_token: the tokens of the prompt that are loaded, of this chunk and of others. A window ends at
            `stop_token`.

    Raises:
        PoolError: KV cannot pass between the two caches, or the parts lack a token that is wanted. `cause` is `UNLIKE`.
    """
    pieces: list[LoadPiece] = []
    covered: dict[tuple[int, int], int] = {}
    span = _Span(number, first_token, stop_token)
    for place, (geometry, needed) in enumerate(parts):
        offsets = {one.layer: one.offset - needed.start for one in needed.places}
        for run in needed.form:
            first = span.start + run.first_token
            for route in _routes(run, geometry, own):
                for layer in route.layers:
                    for head in route.heads:
                        covered[layer, head] = min(first, covered.get((layer, head), first))
                for low, high, pages in span.intervals(route, tables, first):
                    pieces += _load_pieces(place, run, route, (low, high), pages, offsets)
    _check_covered(covered, own, tables, span)
    return pieces


class _Span(NamedTuple):
    """The tokens of a chunk that are loaded."""

    number: int
    first_token: int
    stop_token: int

    @property
    def start(self) -> int:
        """The chunk's first token."""
        return self.number * CHUNK_TOKENS

    @property
    def stop(self) -> int:
        return min(self.stop_token, self.start + CHUNK_TOKENS)

    def intervals(
        self, route: Route, tables: Tables, first: int
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Tokens [low, high) that lie in consecutive pages which can be written, with these pages.

        Args:
            first: the first token that the run holds.
        """
        group = route.destination
        opaque = group.dtype not in ELEMENT_BYTES
        low = max(first, self.first_token)
        low = max(first, low - low % group.page_size) if opaque else low
        for begin, stop, pages in _runs_of_pages(
            tables[group.table], group.page_size, low, self.stop
        ):
            yield max(low, begin), min(self.stop, stop), pages

    def first_wanted(self, group: Group, tables: Tables) -> int | None:
        """The first token that the next one to be computed attends to, in a page that can be written."""
        window = max(0, self.stop_token - group.window + 1) if group.window else 0
        low = max(self.start, self.first_token, window)
        found = _runs_of_pages(tables[group.table], group.page_size, low, self.stop)
        return next((max(low, begin) for begin, _, _ in found), None)


def _runs_of_pages(
    table: Sequence[int], page_size: int, low: int, high: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Runs of consecutive pages of a request that can be written and hold some of tokens [low, high): their first and
    stop token, and their ids."""
    run: list[int] = []
    span = page_span(low, high, page_size) if low < high else range(0)
    for place in span:
        page = table[place] if place < len(table) else -1
        if page >= 0:
            run.append(page)
        elif run:
            yield (place - len(run)) * page_size, place * page_size, tuple(run)
            run = []
    if run:
        yield (span.stop - len(run)) * page_size, span.stop * page_size, tuple(run)


def _load_pieces(
    part: int,
    run: Run,
    route: Route,
    tokens: tuple[int, int],
    pages: tuple[int, ...],
    offsets: dict[int, int],
) -> Iterator[LoadPiece]:
    """One run's tokens [low, high) in own pages."""
    low, high = tokens
    size = route.source.page_size
    verbatim = route.verbatim and not (low % size and route.source.dtype in ELEMENT_BYTES)
    start = low // CHUNK_TOKENS * CHUNK_TOKENS
    whole = low - start == run.first_token and high - start == CHUNK_TOKENS
    at_once = (
        whole
        and verbatim == bool(run.planes)
        and route.codec == RAW.name
        and len(route.heads) == run.key.shape[0]
    )
    nbytes = span_bytes(route, verbatim, high - low)
    for first, stop in _rows(len(route.layers), nbytes, READ_CHUNK_BYTES):
        chunk = Chunk(0, 0, first, stop, low, high, verbatim)
        layers = chunk.layers(route)
        offset = offsets[layers[0]] if at_once else None
        if at_once and offsets[layers[-1]] != offsets[layers[0]] + (len(layers) - 1) * nbytes:
            offset = None  # between them lies a layer that is not needed
        yield LoadPiece(part, run, route, chunk, pages, offset)


def _check_covered(
    covered: dict[tuple[int, int], int], own: Geometry, tables: Tables, span: _Span
) -> None:
    """Raises PoolError if a token that is wanted is in no part. Layers of a draft model can do without."""
    for group in own.groups:
        wanted = span.first_wanted(group, tables)
        if wanted is None:
            continue
        for layer in group.layers:
            for head in own.heads(group) if layer < DRAFT_LAYERS else ():
                if covered.get((layer, head), span.stop) > wanted:
                    raise PoolError(
                        Miss.UNLIKE,
                        f"chunk {span.number} was stored without token {wanted} of layer {layer} head {head}",
                    )


@functools.lru_cache(maxsize=512)
def _routes(run: Run, geometry: Geometry, own: Geometry) -> tuple[Route, ...]:
    """From a run at rest to a reader's cache.

    Raises:
        PoolError: KV cannot pass between the two.
    """
    groups = tuple(msgspec.structs.replace(group, window=0) for group in own.groups)
    whole = msgspec.structs.replace(own, groups=groups)
    try:
        return routes(at_rest(run, geometry), whole, (RAW.name,), (RAW.name,))
    except UnsupportedGeometryError as error:
        raise PoolError(Miss.UNLIKE, str(error)) from None


def _rows(layers: int, nbytes: int, most: int) -> list[tuple[int, int]]:
    """Ranges of layers, each of at most `most` bytes if one layer has `nbytes`, and of one layer at least."""
    step = max(1, most // nbytes)
    return [(low, min(low + step, layers)) for low in range(0, layers, step)]


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
