# SPDX-License-Identifier: Apache-2.0
"""Which chunks carry a token range along the routes of a pair: pure functions.

Both sides compute the plan from the same inputs, by the rules of the schema that they have agreed on
(`rules.py`); a chunk that arrives is checked against it. A chunk's payload is in wire order, `[layer][K|V][kv head][token][dim]`, each `[layer][K|V]` a plane
that its codec codes by itself (`planes` says where each lies); or, `verbatim`, whole pages,
`[layer][page][kv head][bytes]`. A chunk of a state is `[layer][unit][row][dim]`, of one section.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pd_connector.kv.coding import ELEMENT_BYTES, Elements, Part, coding
from pd_connector.kv.geometry import page_span
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import (
    layer_bytes,
    page_part_bytes,
    parts,
    span_bytes,
    state_bytes,
)

Cut = tuple[int, int, int, int, int, bool]
"""A chunk that has no number yet: its first token, route, first layer, stop layer, stop token, and
whether it is verbatim. See `Chunk` for a state's. Cuts sort in sending order. Bare tuples, because thousands are made."""


def cut_route(
    number: int, route: Route, first_token: int, stop_token: int, chunk_bytes: int, streamed: bool
) -> list[Cut]:
    """The chunks of one route of KV. What passes verbatim comes first, then the rest of the last page. They begin and
    end at whole entries."""
    stop_token -= stop_token % route.source.state_tokens
    first = route.first_token(first_token, stop_token)
    if first >= stop_token:
        return []
    verbatim = route.verbatim and first % route.source_page_tokens == 0
    if not verbatim and route.source.dtype not in ELEMENT_BYTES:
        raise ValueError(
            f"token {first} is inside a page of {route.source_page_tokens}: pages of "
            f"{route.source.dtype} pass as a whole only"
        )
    whole = _whole_until(route, stop_token) if verbatim else stop_token
    cuts: list[Cut] = []
    if first < whole:
        shape = _shape(route, verbatim, whole - first, chunk_bytes, streamed)
        cuts += _cut_span(number, route, first, whole, verbatim, shape)
    if whole < stop_token:
        shape = _shape(route, False, stop_token - whole, chunk_bytes, False)
        cuts += _cut_span(number, route, whole, stop_token, False, shape)
    if route.stripes is not None:
        return [cut for cut in cuts if route.entries(cut[0], cut[4])]
    return cuts


def cut_state(number: int, route: Route, state_token: int, chunk_bytes: int) -> list[Cut]:
    """The chunks of one route of a state, which stands after `state_token` tokens.

    Raises:
        ValueError: one unit exceeds `chunk_bytes`.
    """
    assert route.section is not None
    each = route.section.unit_bytes
    if each > chunk_bytes:
        raise ValueError(
            f"chunk of {chunk_bytes} bytes: a unit of {route.section.name} has {each}; raise slot_mib (config)"
        )
    count = len(route.layers) * len(route.heads)
    pieces = _divided_up(count, chunk_bytes // each)
    edges = [count * piece // pieces for piece in range(pieces + 1)]
    return [
        (state_token, number, first, stop, state_token, False)
        for first, stop in itertools.pairwise(edges)
    ]


def cut_edges(routes: Sequence[Route], cuts: Sequence[Cut]) -> list[Cut]:
    """The same, with the first and the last cut smaller."""
    cut = list(cuts)
    for _ in range(routes[0].rules.edge_cuts if cut else 0):
        cut[-1:] = _pieces(routes, cut[-1])
        cut[:1] = _pieces(routes, cut[0])
    return cut


def _whole_until(route: Route, stop_token: int) -> int:
    """The token up to which whole pages pass. A last page that would bring `spare_bytes` which
    nobody wants passes as its tokens; but not of a window, which begins at any token: only whole
    pages may ignore where."""
    size = route.source_page_tokens
    if route.destination.window or route.source.dtype not in ELEMENT_BYTES:
        return stop_token
    filled, spare = stop_token % size, -stop_token % size
    token_bytes = len(route.layers) * page_part_bytes(route) // size
    return stop_token - filled if spare * token_bytes >= route.rules.spare_bytes else stop_token


def _cut_span(
    number: int, route: Route, first: int, stop: int, verbatim: bool, shape: tuple[int, int]
) -> list[Cut]:
    """Chunks of `shape` (layers, tokens) that carry tokens [first, stop), by token, then layer."""
    layers, tokens = shape
    count = len(route.layers)
    edges = [first, *range((first // tokens + 1) * tokens, stop, tokens), stop]
    rows = [(layer, min(layer + layers, count)) for layer in range(0, count, layers)]
    return [
        (start, number, first_layer, stop_layer, end, verbatim)
        for start, end in itertools.pairwise(edges)
        for first_layer, stop_layer in rows
    ]


def _pieces(routes: Sequence[Route], whole: Cut) -> list[Cut]:
    """A chunk in `edge_pieces` pieces, by layer or, if it has one layer, by token. Fewer, where
    pieces would be smaller than `min_chunk_bytes`."""
    first_token, number, first_layer, stop_layer, stop_token, verbatim = whole
    route = routes[number]
    rules = route.rules
    layers, tokens = stop_layer - first_layer, stop_token - first_token
    nbytes = layers * span_bytes(route, verbatim, tokens)
    pieces = min(rules.edge_pieces, nbytes // rules.min_chunk_bytes)
    if pieces < 2:
        return [whole]
    if layers > 1:
        each = _divided_up(layers, pieces)
        edges = [*range(first_layer, stop_layer, each), stop_layer]
        return [
            (first_token, number, first, stop, stop_token, verbatim)
            for first, stop in itertools.pairwise(edges)
        ]
    step = max(rules.min_chunk_tokens, route.token_step)
    if rules.whole_pieces:
        step = _divided_up(step, route.token_step) * route.token_step
    step = _divided_up(step, route.source.state_tokens) * route.source.state_tokens
    each = _divided_up(_divided_up(tokens, pieces), step) * step
    edges = [first_token, *range(first_token // each * each + each, stop_token, each), stop_token]
    return [
        (first, number, first_layer, stop_layer, stop, verbatim)
        for first, stop in itertools.pairwise(edges)
    ]


@lru_cache(maxsize=4096)
def _shape(
    route: Route, verbatim: bool, tokens: int, chunk_bytes: int, streamed: bool
) -> tuple[int, int]:
    """Layers and tokens of a chunk: `chunk_tokens`, more where all layers of them leave room
    for more, fewer where not even one layer of them has room."""

    def size(count: int) -> int:
        return span_bytes(route, verbatim, min(count, tokens))

    rules, step, entry = route.rules, route.token_step, route.source.state_tokens
    count = _divided_up(min(tokens, rules.chunk_tokens), step) * step
    while size(count) > chunk_bytes:
        if count <= step and (verbatim or count <= entry):
            raise ValueError(
                f"chunk of {chunk_bytes} bytes: {count} tokens of one layer have {size(count)}; "
                "raise slot_mib (config)"
            )
        count = (
            max(step, count // 2 // step * step)
            if count > step
            else max(entry, count // 2 // entry * entry)
        )
    layers = len(route.layers)
    if streamed:
        return min(_divided_up(layers, rules.streamed_rows), chunk_bytes // size(count)), count
    while count < tokens and size(2 * count) * layers <= chunk_bytes:
        count *= 2
    rows = _divided_up(layers, chunk_bytes // size(count))
    # Scales may make a row more than the bare elements would: rather a few tokens fewer.
    fewer = count - max(step, count // 16 // step * step)
    if rows > 1 and fewer >= rules.min_chunk_tokens:
        wide = _divided_up(layers, rows - 1)
        if size(fewer) * wide <= chunk_bytes:
            rows, count = rows - 1, fewer
    return _divided_up(layers, rows), count


def _divided_up(amount: int, parts: int) -> int:
    """`amount / parts`, rounded up."""
    return -(-amount // parts)


READ_CHUNK_BYTES = 4 * 1024 * 1024
"""Limit of a chunk that the consumer reads from a send slot. The few that are under way at a time
then stay in the cache that the processors share."""
DIRECT_CHUNK_BYTES = 8 * 1024 * 1024
"""Limit of a chunk that the consumer reads from the producer's pages. Nothing is gathered for it,
so that fewer and larger chunks cost less."""
CHUNK_S = 0.03
"""Time that a chunk may take on the link, in seconds."""


class Chunk(NamedTuple):
    """Tokens [first_token, stop_token) of the prompt in some layers of one route: those that both sides hold.

    A chunk of a state has it as it stands after tokens [0, first_token), and `stop_token` is the same. Its layers and
    units are one list, layer by layer, and `first_layer` and `stop_layer` are places in it: a layer's state can be
    larger than a slot.
    """

    sequence: int
    route: int  # place in the pair's routes
    first_layer: int  # places in the route's layers
    stop_layer: int
    first_token: int
    stop_token: int
    verbatim: bool

    @property
    def tokens(self) -> int:
        return self.stop_token - self.first_token

    def layers(self, route: Route) -> tuple[int, ...]:
        """In model numbering."""
        if route.section is None:
            return route.layers[self.first_layer : self.stop_layer]
        units = len(route.heads)
        return route.layers[self.first_layer // units : -(-self.stop_layer // units)]

    def pages(self, page_tokens: int) -> range:
        """Pages of the prompt, of `page_tokens` tokens each, that hold the chunk's tokens."""
        return page_span(self.first_token, self.stop_token, page_tokens)

    def source_pages(self, route: Route) -> range:
        """Places in the source's page table of the pages that hold the chunk: one for a state."""
        return self.pages(route.source_page_tokens) if route.section is None else range(1)

    def destination_pages(self, route: Route) -> range:
        """The same in the destination's page table."""
        return self.pages(route.destination_page_tokens) if route.section is None else range(1)

    def entries(self, route: Route) -> int:
        """Entries (one K and V, one latent) of each layer and head."""
        if route.plain:
            return self.stop_token - self.first_token
        return route.entries(self.first_token, self.stop_token)

    def nbytes(self, route: Route) -> int:
        """Bytes of the payload."""
        layers = self.stop_layer - self.first_layer
        if self.verbatim:
            return layers * len(self.source_pages(route)) * page_part_bytes(route)
        if route.section is not None:
            return layers * route.section.unit_bytes
        return layers * layer_bytes(route, self.entries(route))


class Plane(NamedTuple):
    """Bytes [offset, offset + nbytes) of a payload: K or V of one layer."""

    layer: int  # in model numbering
    part: Part
    shape: tuple[int, int, int]  # head, entry, dim
    offset: int
    nbytes: int


class UnitRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a payload: some units of one layer's section."""

    layer: int  # in model numbering
    units: slice  # places in the route's heads
    offset: int
    nbytes: int


def unit_ranges(route: Route, chunk: Chunk) -> Iterator[UnitRange]:
    """Where each layer's units lie in the payload of a chunk of a state: `[unit][row][dim]` each."""
    assert route.section is not None
    count, each, offset = len(route.heads), route.section.unit_bytes, 0
    place = chunk.first_layer
    while place < chunk.stop_layer:
        layer, first = divmod(place, count)
        stop = min(count, first + chunk.stop_layer - place)
        nbytes = (stop - first) * each
        yield UnitRange(route.layers[layer], slice(first, stop), offset, nbytes)
        offset += nbytes
        place += stop - first


def planes(route: Route, chunk: Chunk) -> Iterator[Plane]:
    """Where each layer's K and V lie in the payload of a chunk that is not verbatim.

    >>> import msgspec
    >>> from pd_connector.kv.geometry import Geometry, Group, Shard
    >>> from pd_connector.plan.route import routes
    >>> group = Group(kind="attention", layers=(0, 1), heads=2, key_dim=64, value_dim=64,
    ...               page_size=16, window=0, dtype="bfloat16", layout="NHD", heads_apart=False)
    >>> cache = Geometry(Shard(first_layer=0, stop_layer=2, tp_rank=0, tp_size=1), (group,))
    >>> other = Geometry(cache.shard, (msgspec.structs.replace(group, page_size=32),))
    >>> [route] = routes(cache, other, offered=["raw"], accepted=["raw"])
    >>> [chunk] = plan([route], 0, 40, chunk_bytes=1 << 20)
    >>> for plane in planes(route, chunk):
    ...     print(plane.layer, plane.part, plane.shape, plane.offset, plane.nbytes)
    0 key (2, 40, 64) 0 10240
    0 value (2, 40, 64) 10240 10240
    1 key (2, 40, 64) 20480 10240
    1 value (2, 40, 64) 30720 10240
    """
    coded_bytes, elements = coding(route.codec).coded_bytes, Elements(route.source.dtype)
    offset, entries = 0, chunk.entries(route)
    for layer in chunk.layers(route):
        for part, dim in parts(route.source):
            shape = len(route.heads), entries, dim
            nbytes = coded_bytes(part, shape, elements)
            yield Plane(layer, part, shape, offset, nbytes)
            offset += nbytes


def plan(
    routes: Sequence[Route],
    first_token: int,
    stop_token: int,
    chunk_bytes: int,
    *,
    streamed: bool = False,
    state_token: int = 0,
) -> tuple[Chunk, ...]:
    """Chunks that carry tokens [first_token, stop_token), in sending order: by token, then layer. States come last.

    Args:
        chunk_bytes: bytes of a payload, at most.
        state_token: states pass as they stand after this number of tokens; 0: none passes.
        streamed: the layers are computed meanwhile: a chunk takes few of them, so that it need
            not wait for the others.

    Raises:
        ValueError: one page (of a verbatim route), one entry of one layer or one unit of a state exceeds
            `chunk_bytes`; or the range begins within a page that can only pass as a whole.

    >>> from pd_connector.kv.geometry import Geometry, Group, Shard
    >>> from pd_connector.plan.route import routes
    >>> group = Group(kind="attention", layers=(0, 1), heads=2, key_dim=64, value_dim=64,
    ...               page_size=16, window=0, dtype="bfloat16", layout="NHD", heads_apart=False)
    >>> cache = Geometry(Shard(first_layer=0, stop_layer=2, tp_rank=0, tp_size=1), (group,))
    >>> pair = routes(cache, cache, offered=["raw"], accepted=["raw"])
    >>> for chunk in plan(pair, 0, 1000, chunk_bytes=256 * 1024):
    ...     print(chunk.sequence, chunk.first_layer, chunk.stop_layer, chunk.first_token,
    ...           chunk.stop_token, chunk.nbytes(pair[0]), chunk.verbatim)
    0 0 1 0 512 262144 True
    1 1 2 0 512 262144 True
    2 0 1 512 1000 253952 True
    3 1 2 512 1000 253952 True
    """
    cuts: list[Cut] = []
    states: list[Cut] = []
    for number, route in enumerate(routes):
        if route.section is None:
            cuts += cut_route(number, route, first_token, stop_token, chunk_bytes, streamed)
        elif state_token:
            states += cut_state(number, route, state_token, chunk_bytes)
    if len(routes) > 1:
        cuts.sort()
    return tuple(
        Chunk(sequence, route, first_layer, stop_layer, first_token, stop_token, verbatim)
        for sequence, (
            first_token,
            route,
            first_layer,
            stop_layer,
            stop_token,
            verbatim,
        ) in enumerate([*cut_edges(routes, cuts), *states])
    )


def chunk_limit(
    routes: Sequence[Route],
    tokens: int,
    slot_bytes: int,
    bytes_per_s: float | None,
    *,
    read: bool = False,
    direct: bool = False,
) -> int:
    """How many bytes a chunk of a transfer of `tokens` tokens should have at most.

    | bound | why |
    |---|---|
    | at most what the link moves in `CHUNK_S`, and a quarter of the transfer | gathering, moving and scattering run side by side |
    | at most `READ_CHUNK_BYTES` or `DIRECT_CHUNK_BYTES` where it is read | what was gathered is still in the processor's cache |
    | at least `min_chunk_tokens` tokens of one layer | headers and messages cost little |
    | at most one slot | always |

    Args:
        slot_bytes: bytes of a slot, the smaller one of both sides.
        bytes_per_s: what the link was measured to move; None where it was not.
        read: the consumer reads chunks, they are not written to it.
        direct: it reads them in pages, where they are `verbatim`.

    >>> from pd_connector.kv.geometry import Geometry, Group, Shard
    >>> from pd_connector.plan.route import routes
    >>> group = Group(kind="attention", layers=(0, 1), heads=2, key_dim=64, value_dim=64,
    ...               page_size=16, window=0, dtype="bfloat16", layout="NHD", heads_apart=False)
    >>> cache = Geometry(Shard(first_layer=0, stop_layer=2, tp_rank=0, tp_size=1), (group,))
    >>> pair = routes(cache, cache, offered=["raw"], accepted=["raw"])
    >>> chunk_limit(pair, tokens=8192, slot_bytes=4 << 20, bytes_per_s=None)
    2097152
    >>> chunk_limit(pair, tokens=8192, slot_bytes=4 << 20, bytes_per_s=30e6)
    900000
    """
    kv = [route for route in routes if route.section is None]
    few = [(r, min(tokens, r.rules.min_chunk_tokens)) for r in kv]
    least = max((span_bytes(r, r.verbatim, count) for r, count in few), default=1)
    total = sum(len(r.layers) * span_bytes(r, False, tokens) for r in kv)
    if len(kv) < len(routes):
        least = max(least, *(r.section.unit_bytes for r in routes if r.section is not None))
        total += sum(map(state_bytes, routes))
    wished = min(total // 4, slot_bytes if bytes_per_s is None else int(bytes_per_s * CHUNK_S))
    if read:
        in_pages = direct and all(route.verbatim for route in kv)
        wished = min(wished, DIRECT_CHUNK_BYTES if in_pages else READ_CHUNK_BYTES)
    return max(least_chunk_limit(routes, slot_bytes), min(slot_bytes, max(least, wished)))


def least_chunk_limit(routes: Sequence[Route], slot_bytes: int) -> int:
    """The least that a consumer may ask for as the limit of a chunk, in bytes."""
    return min(slot_bytes, routes[0].rules.min_chunk_bytes if routes else 1)
