# SPDX-License-Identifier: Apache-2.0
"""Which bytes pass between a rank's pages and the parts of a chunk at rest. Pure functions; `stored.py` moves them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pd_connector.errors import Miss, PoolError, UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES, RAW
from pd_connector.kv.geometry import Geometry, page_span
from pd_connector.plan.chunks import READ_CHUNK_BYTES, Chunk
from pd_connector.plan.route import Route, routes
from pd_connector.plan.rules import NEWEST_RULES
from pd_connector.plan.sizes import span_bytes
from pd_connector.pool.chunk_layout import Run, at_rest, group_of, places
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.read_plan import ReadPlan
from pd_connector.pool.token_ranges import LoadTokens, Tables, check_covered

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
    """How a rank writes a chunk that it has computed; None if it holds nothing of it any more.

    Args:
        form: from `stored.describe`, of whole chunks.
        geometry: of the rank's cache.
        tables: the request's pages, by table.
        number: of the chunk.
    """
    if not form:
        return SavePlan((), 0, ())
    every = ((run, *_held(run, geometry, tables, number)) for run in form)
    held = [each for each in every if each[2]]
    if not held:
        return None
    kept = tuple(msgspec.structs.replace(run, first_token=first) for run, first, _ in held)
    start = number * CHUNK_TOKENS
    offsets = {place.layer: place for place in places(kept, geometry)}
    pieces: list[SavePiece] = []
    for run, first, pages in held:
        route, nbytes = _own_route(run, geometry), offsets[run.layers[0]].nbytes
        for low, high in _rows(len(run.layers), nbytes, GATHER_BYTES):
            chunk = Chunk(0, 0, low, high, start + first, start + CHUNK_TOKENS, bool(run.planes))
            offset = offsets[run.layers[low]].offset
            pieces.append(SavePiece(route, chunk, pages, offset, (high - low) * nbytes))
    last = offsets[kept[-1].layers[-1]]
    return SavePlan(kept, last.offset + last.nbytes, tuple(pieces))


def _held(run: Run, geometry: Geometry, tables: Tables, number: int) -> tuple[int, tuple[int, ...]]:
    """The first token of the chunk from which on all pages of a run are held, and these pages; none if the chunk's
    last page is not held, or bytes in wire order are not held as a whole."""
    group = group_of(geometry, run.layers[0])
    assert group is not None
    start = number * CHUNK_TOKENS
    span = page_span(start, start + CHUNK_TOKENS, group.page_size)
    pages = tuple(tables[group.table][span.start : span.stop])
    gone = max((place + 1 for place, page in enumerate(pages) if page < 0), default=0)
    whole = not (run.planes or run.coded)
    if len(pages) < len(span) or gone == len(pages) or (gone and whole):
        return 0, ()
    return max(0, (span.start + gone) * group.page_size - start), pages[gone:]


@functools.lru_cache(maxsize=256)
def _own_route(run: Run, geometry: Geometry) -> Route:
    """A run's layers, all heads of the rank, into its bytes."""
    group = group_of(geometry, run.layers[0])
    assert group is not None
    where = run.layers, geometry.heads(group), 0, 0
    return Route(group, group, *where, run.codec, bool(run.planes), NEWEST_RULES)


class LoadPiece(NamedTuple):
    """Some layers of a run, which one `PagedCache.scatter` writes into own pages.

    Attributes:
        part: place of the part among those that are read.
        run: of the part's `ReadPlan.form`.
        route: from the run, as a cache, to the reader's cache.
        chunk: its tokens count from the prompt's beginning.
        pages: own pages of the chunk; all of them can be written.
        offset: where the payload lies in the part's buffer as it is; None if it must be gathered, or cut out.
    """

    part: int
    run: Run
    route: Route
    chunk: Chunk
    pages: tuple[int, ...]
    offset: int | None


def plan_load(
    parts: Sequence[tuple[Geometry, ReadPlan]],
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
        IndexError: a table is too short.
    """
    pieces: list[LoadPiece] = []
    covered: dict[tuple[int, int], int] = {}
    span = LoadTokens(number, first_token, stop_token)
    span.check_tables(own, tables)
    for place, (geometry, needed) in enumerate(parts):
        offsets = {
            layer_place.layer: layer_place.offset - needed.start for layer_place in needed.places
        }
        for run in needed.form:
            first, heads = span.start + run.first_token, _heads(run, geometry)
            whole = msgspec.structs.replace(run, first_token=0)  # routes do not depend on it
            for route in _routes(whole, geometry, own):
                for layer in route.layers:
                    for head in route.heads:
                        covered[layer, head] = min(first, covered.get((layer, head), first))
                for low, high, pages in span.intervals(route, tables, first):
                    all_heads = len(route.heads) == heads
                    pieces += _load_pieces(
                        place, run, route, (low, high), pages, offsets, all_heads
                    )
    check_covered(covered, own, tables, span)
    return pieces


def _load_pieces(
    part: int,
    run: Run,
    route: Route,
    tokens: tuple[int, int],
    pages: tuple[int, ...],
    offsets: dict[int, int],
    all_heads: bool,
) -> Iterator[LoadPiece]:
    """One run's tokens [low, high) in own pages."""
    low, high = tokens
    size = route.source.page_size
    verbatim = route.verbatim and not (low % size and route.source.dtype in ELEMENT_BYTES)
    start = low // CHUNK_TOKENS * CHUNK_TOKENS
    whole = low - start == run.first_token and high - start == CHUNK_TOKENS
    at_once = whole and verbatim == bool(run.planes) and route.codec == run.codec and all_heads
    nbytes = span_bytes(route, verbatim, high - low)
    for first, stop in _rows(len(route.layers), nbytes, READ_CHUNK_BYTES):
        chunk = Chunk(0, 0, first, stop, low, high, verbatim)
        layers = chunk.layers(route)
        offset = offsets[layers[0]] if at_once else None
        if at_once and offsets[layers[-1]] != offsets[layers[0]] + (len(layers) - 1) * nbytes:
            offset = None  # between them lies a layer that is not needed
        yield LoadPiece(part, run, route, chunk, pages, offset)


@functools.lru_cache(maxsize=512)
def _routes(run: Run, geometry: Geometry, own: Geometry) -> tuple[Route, ...]:
    """From a run at rest to a reader's cache. A coded run passes in its own codec, whatever the reader would ask a
    producer for.

    Raises:
        PoolError: KV cannot pass between the two.
    """
    groups = tuple(msgspec.structs.replace(group, window=0) for group in own.groups)
    whole = msgspec.structs.replace(own, groups=groups)
    try:
        from_run = routes(at_rest(run, geometry), whole, (RAW.name,), (RAW.name,))
    except UnsupportedGeometryError as error:
        raise PoolError(Miss.UNLIKE, str(error)) from None
    return tuple(replace(route, codec=run.codec) for route in from_run) if run.coded else from_run


def _heads(run: Run, geometry: Geometry) -> int:
    """KV heads that the writer holds."""
    group = group_of(geometry, run.layers[0])
    assert group is not None
    return len(geometry.heads(group))


def _rows(layers: int, nbytes: int, most: int) -> list[tuple[int, int]]:
    """Ranges of layers, each of at most `most` bytes if one layer has `nbytes`, and of one layer at least."""
    step = max(1, most // nbytes)
    return [(low, min(low + step, layers)) for low in range(0, layers, step)]
