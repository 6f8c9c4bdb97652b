# SPDX-License-Identifier: Apache-2.0
"""Which bytes pass between a rank's pages and the parts of a chunk at rest. Pure functions; `stored.py` moves them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pd_connector.errors import Miss, PoolError, UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES, RAW
from pd_connector.kv.geometry import Geometry, Group, page_span
from pd_connector.plan.chunks import READ_CHUNK_BYTES, Chunk
from pd_connector.plan.route import Route, routes
from pd_connector.plan.rules import NEWEST_RULES
from pd_connector.plan.sizes import span_bytes
from pd_connector.pool.chunk_layout import Run, at_rest, group_of, places
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.read_plan import ReadPlan

Tables = Sequence[Sequence[int]]


class LoadTokens(NamedTuple):
    """The tokens of a chunk that are loaded, and the load's own pages that they go to.

    A page table lists a request's pages from its first token on; -1 stands for a page that is not held, or must not be
    written.
    """

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

    def check_tables(self, own: Geometry, tables: Tables) -> None:
        """Raises IndexError if a table ends before the tokens that are loaded. Otherwise its missing pages would be
        treated like pages that must not be written."""
        for group in own.groups:
            held = len(tables[group.table]) * group.page_size
            if max(self.start, self.first_token) < self.stop and held < self.stop:
                raise IndexError(
                    f"page table {group.table} ends at token {held}: tokens up to {self.stop} are loaded"
                )

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
        """The first required token in a writable page: the earliest token that the next computed token attends to."""
        window = max(0, self.stop_token - group.window + 1) if group.window else 0
        low = max(self.start, self.first_token, window)
        runs = _runs_of_pages(tables[group.table], group.page_size, low, self.stop)
        return next((max(low, begin) for begin, _, _ in runs), None)


def _runs_of_pages(
    table: Sequence[int], page_size: int, low: int, high: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Runs of consecutive writable pages of a request that hold some of tokens [low, high). Yields each run's first
    token, stop token and page ids."""
    run: list[int] = []
    span = page_span(low, high, page_size) if low < high else range(0)
    for place in span:
        if table[place] >= 0:
            run.append(table[place])
        elif run:
            yield (place - len(run)) * page_size, place * page_size, tuple(run)
            run = []
    if run:
        yield (span.stop - len(run)) * page_size, span.stop * page_size, tuple(run)


def check_covered(
    covered: Mapping[tuple[int, int], int], own: Geometry, tables: Tables, span: LoadTokens
) -> None:
    """Raises PoolError if a token that is wanted is in no part.

    Args:
        covered: the first token of the chunk, from 0, that the parts have of each layer and head.
    """
    for group in own.groups:
        first = span.first_wanted(group, tables)
        if first is None:
            continue
        for layer in group.layers:
            for head in own.heads(group):
                if span.start + covered.get((layer, head), CHUNK_TOKENS) > first:
                    raise PoolError(
                        Miss.UNLIKE,
                        f"chunk {span.number} was stored without token {first} of layer {layer} head {head}",
                    )


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
        form: the runs that the part holds. A run is left out, or begins later, if a window has passed its pages.
        nbytes: size of the payload.
        pieces: in the order of the payload.
    """

    form: tuple[Run, ...]
    nbytes: int
    pieces: tuple[SavePiece, ...]


def plan_save(
    form: Sequence[Run], geometry: Geometry, tables: Tables, number: int
) -> SavePlan | None:
    """How a rank writes a chunk that it has computed; None if it holds no page of the chunk any more.

    Args:
        form: from `stored.describe`, of whole chunks.
        geometry: geometry of the rank's cache.
        tables: the request's pages, by table.
        number: number of the chunk.
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
    """The token from which on all pages of a run are held, and these pages. No pages if the chunk's last page is not
    held, or if a run in wire order is not held as a whole."""
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
        part: index of the part among the parts that are read.
        run: run of the part's `ReadPlan.form`.
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
        number: number of the chunk.
        first_token, stop_token: the tokens of the prompt that are loaded, of this chunk and of others. A window ends at
            `stop_token`.

    Raises:
        PoolError: KV cannot pass between the two caches, or the parts lack a required token. `cause` is `UNLIKE`.
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
            for route in _run_routes(run, geometry, own):
                _cover(covered, run, route)
                for low, high, pages in span.intervals(route, tables, first):
                    all_heads = len(route.heads) == heads
                    pieces += _load_pieces(
                        place, run, route, (low, high), pages, offsets, all_heads
                    )
    check_covered(covered, own, tables, span)
    return pieces


def first_covered(parts: Sequence[tuple[Geometry, ReadPlan]], own: Geometry, table: int) -> int:
    """The token of a chunk, from 0, from which on its parts have KV of all layers of a page table; `CHUNK_TOKENS` if they
    lack a layer or head.

    Args:
        parts, own: as for `plan_load`.
    """
    covered: dict[tuple[int, int], int] = {}
    for geometry, needed in parts:
        for run in needed.form:
            for route in _run_routes(run, geometry, own):
                _cover(covered, run, route)
    return max(
        covered.get((layer, head), CHUNK_TOKENS)
        for group in own.groups
        if group.table == table
        for layer in group.layers
        for head in own.heads(group)
    )


def _cover(covered: dict[tuple[int, int], int], run: Run, route: Route) -> None:
    """Adds a run to the first token of a chunk, from 0, that its parts have of each layer and head."""
    for layer in route.layers:
        for head in route.heads:
            covered[layer, head] = min(run.first_token, covered.get((layer, head), CHUNK_TOKENS))


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


def _run_routes(run: Run, geometry: Geometry, own: Geometry) -> tuple[Route, ...]:
    """As `_routes`, which do not depend on the first token."""
    return _routes(msgspec.structs.replace(run, first_token=0), geometry, own)


@functools.lru_cache(maxsize=512)
def _routes(run: Run, geometry: Geometry, own: Geometry) -> tuple[Route, ...]:
    """From a run at rest to a reader's cache. A coded run passes in its own codec, even if the reader would choose
    another codec in a handoff.

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
