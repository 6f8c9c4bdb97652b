# SPDX-License-Identifier: Apache-2.0
"""Which chunks carry a token range along the routes of a pair: pure functions.

Both sides compute the plan from the same inputs; a chunk that arrives is checked against it. A
chunk's payload is in wire order, `[layer][K|V][kv head][token][dim]`, each `[layer][K|V]` a block
that its codec codes by itself (`blocks` says where each lies); or, `verbatim`, whole pages,
`[layer][page][kv head][bytes]`.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pd_connector.codec import CODECS, DTYPES, Elements, Part
from pd_connector.kv.geometry import Group, pages_for
from pd_connector.plan.route import Route

MIN_CHUNK_TOKENS = 128
"""Tokens of a chunk, unless there are fewer or a slot is too small for one layer of them."""
CHUNK_TOKENS = 512
"""Tokens of a chunk where there is room: several to a prefill step, so that they stream."""

STREAMED_ROWS = 8
"""Chunks that the layers of a running prefill are shared among, where there are so many."""
MIN_CHUNK_BYTES = 256 * 1024
READ_CHUNK_BYTES = 4 * 1024 * 1024
"""Of a chunk that the consumer reads where it lies: the few that are under way at a time stay in the
cache that the processors share."""
DIRECT_CHUNK_BYTES = 8 * 1024 * 1024
"""Of a chunk that the consumer reads in the producer's pages: nothing is gathered, and messages cost less."""
SPARE_BYTES = 256 * 1024
"""Of a last page that would pass with so many bytes that nobody wants, only the tokens pass."""
CHUNK_S = 0.03
"""Time that a chunk may take on the link, in seconds."""
EDGE_PIECES = 4
EDGE_CUTS = 2
"""The first chunk of a transfer and its last are cut into so many pieces, and the outermost of these
again: nothing hides what is done to the first before the link has work, and to the last when the link
has done its."""

_Bare = tuple[int, int, int, int, int, bool]
"""Of a chunk: first token, route, first and stop layer, stop token, verbatim."""


class Chunk(NamedTuple):
    """Tokens [first_token, stop_token) of the prompt in some layers of one route."""

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
        return route.layers[self.first_layer : self.stop_layer]

    def pages(self, page_size: int) -> range:
        """Pages of the prompt, of `page_size` tokens each, that hold the chunk's tokens."""
        return range(self.first_token // page_size, pages_for(self.stop_token, page_size))

    def nbytes(self, route: Route) -> int:
        """Bytes of the payload."""
        layers = self.stop_layer - self.first_layer
        if self.verbatim:
            pages = len(self.pages(route.source.page_size))
            return layers * pages * page_part_bytes(route)
        return layers * _layer_bytes(route, self.tokens)


class Block(NamedTuple):
    """Bytes [offset, offset + nbytes) of a payload: K or V of one layer."""

    layer: int  # in model numbering
    part: Part
    shape: tuple[int, int, int]  # head, token, dim
    offset: int
    nbytes: int


def blocks(route: Route, chunk: Chunk) -> Iterator[Block]:
    """Where each layer's K and V lie in the payload of a chunk that is not verbatim."""
    codec = CODECS[route.codec]
    offset = 0
    for layer in chunk.layers(route):
        for part, dim in _parts(route.source):
            shape = len(route.heads), chunk.tokens, dim
            nbytes = codec.coded_bytes(part, shape, Elements(route.source.dtype))
            yield Block(layer, part, shape, offset, nbytes)
            offset += nbytes


@functools.lru_cache(maxsize=4096)
def page_part_bytes(route: Route) -> int:
    """Bytes of the route's heads in one page of one layer, in the source's cache."""
    return len(route.heads) * route.source.page_size * token_bytes(route.source)


def token_bytes(group: Group) -> int:
    """Bytes of one token of one head in one layer, K and V together."""
    return (group.key_dim + group.value_dim) * element_bytes(group.dtype)


def element_bytes(dtype: str) -> int:
    """Bytes of an element; of a dtype that is not known, whose dims count bytes, 1."""
    return DTYPES[dtype].itemsize if dtype in DTYPES else 1


def plan(
    routes: Sequence[Route],
    first_token: int,
    stop_token: int,
    chunk_bytes: int,
    *,
    streamed: bool = False,
) -> tuple[Chunk, ...]:
    """Chunks that carry tokens [first_token, stop_token), in sending order: by token, then layer.

    Args:
        streamed: the layers are computed meanwhile: a chunk takes few of them, so that it need
            not wait for the others.

    Raises:
        ValueError: one page (of a verbatim route) or one token of one layer exceeds
            `chunk_bytes`; or the range begins within a page that can only pass as a whole.
    """
    bare: list[_Bare] = []
    for number, route in enumerate(routes):
        first = route.first_token(first_token, stop_token)
        if first == stop_token:
            continue
        verbatim = route.verbatim and first % route.source.page_size == 0
        if not verbatim and route.source.dtype not in DTYPES:
            raise ValueError(
                f"token {first} lies within a page of {route.source.page_size}: pages of "
                f"{route.source.dtype} pass as a whole only"
            )
        whole = _whole_until(route, stop_token) if verbatim else stop_token
        if first < whole:
            shape = _shape(route, verbatim, whole - first, chunk_bytes, streamed)
            bare += _cut(number, route, first, whole, verbatim, shape)
        if whole < stop_token:
            shape = _shape(route, False, stop_token - whole, chunk_bytes, False)
            bare += _cut(number, route, whole, stop_token, False, shape)
    if len(routes) > 1:
        bare.sort()
    for _ in range(EDGE_CUTS if bare else 0):
        bare[-1:] = _pieces(routes, bare[-1])
        bare[:1] = _pieces(routes, bare[0])
    return tuple(
        Chunk(sequence, number, layer, last, start, stop, verbatim)
        for sequence, (start, number, layer, last, stop, verbatim) in enumerate(bare)
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

    What the link moves in `CHUNK_S`, and a quarter of the transfer at most, so that gathering,
    moving and scattering run side by side; room for `MIN_CHUNK_TOKENS` tokens of a layer at
    least, so that headers and messages cost nothing; never more than a slot.

    Args:
        bytes_per_s: what the link was measured to move; None where it was not.
        read: the consumer reads chunks, they are not written to it.
        direct: it reads them in pages, where they are `verbatim`.
    """
    few = min(tokens, MIN_CHUNK_TOKENS)
    least = max((_chunk_bytes(r, r.verbatim, few) for r in routes), default=1)
    total = sum(len(r.layers) * _layer_bytes(r, tokens) for r in routes)
    wished = min(total // 4, slot_bytes if bytes_per_s is None else int(bytes_per_s * CHUNK_S))
    if read:
        in_pages = direct and all(route.verbatim for route in routes)
        wished = min(wished, DIRECT_CHUNK_BYTES if in_pages else READ_CHUNK_BYTES)
    return min(slot_bytes, max(least, wished, MIN_CHUNK_BYTES))


def bytes_per_token(routes: Sequence[Route]) -> float:
    """Bytes on the wire of a token in all layers, in chunks of the usual length."""
    return sum(len(r.layers) * _layer_bytes(r, CHUNK_TOKENS) for r in routes) / CHUNK_TOKENS


def _parts(group: Group) -> tuple[tuple[Part, int], ...]:
    if group.value_dim:
        return (Part.KEY, group.key_dim), (Part.VALUE, group.value_dim)
    return ((Part.KEY, group.key_dim),)


@functools.lru_cache(maxsize=4096)
def _layer_bytes(route: Route, tokens: int) -> int:
    if route.source.dtype not in DTYPES:
        return len(route.heads) * tokens * token_bytes(route.source)
    codec, elements = CODECS[route.codec], Elements(route.source.dtype)
    return sum(
        codec.coded_bytes(part, (len(route.heads), tokens, dim), elements)
        for part, dim in _parts(route.source)
    )


def _chunk_bytes(route: Route, verbatim: bool, tokens: int) -> int:
    """Bytes of a chunk of so many tokens of one layer, from the start of a page on."""
    if verbatim:
        return pages_for(tokens, route.source.page_size) * page_part_bytes(route)
    return _layer_bytes(route, tokens)


def _whole_until(route: Route, stop_token: int) -> int:
    """Up to which token whole pages should pass: the last page, if it would bring much that nobody
    wants, passes as its tokens. (A window begins at any token, which only whole pages may ignore.)"""
    group = route.source
    if route.destination.window or group.dtype not in DTYPES:
        return stop_token
    filled, spare = stop_token % group.page_size, -stop_token % group.page_size
    token_bytes = len(route.layers) * page_part_bytes(route) // group.page_size
    return stop_token - filled if spare * token_bytes >= SPARE_BYTES else stop_token


def _cut(
    number: int, route: Route, first: int, stop: int, verbatim: bool, shape: tuple[int, int]
) -> Iterator[_Bare]:
    """Chunks of a route of so many layers and tokens each, by token."""
    layers, tokens = shape
    count = len(route.layers)
    for start in (first, *range((first // tokens + 1) * tokens, stop, tokens)):
        end = min(stop, (start // tokens + 1) * tokens)
        for layer in range(0, count, layers):
            yield start, number, layer, min(layer + layers, count), end, verbatim


def _pieces(routes: Sequence[Route], whole: _Bare) -> list[_Bare]:
    """A chunk in pieces, by layer or, of one layer, by token."""
    start, number, layer, last, stop, verbatim = whole
    route = routes[number]
    nbytes = (last - layer) * _chunk_bytes(route, verbatim, stop - start)
    pieces = min(EDGE_PIECES, nbytes // MIN_CHUNK_BYTES)
    if pieces < 2:
        return [whole]
    if last - layer > 1:
        each = pages_for(last - layer, pieces)
        cuts = range(layer, last, each)
        return [(start, number, cut, min(cut + each, last), stop, verbatim) for cut in cuts]
    step = max(MIN_CHUNK_TOKENS, route.token_step)
    each = pages_for(pages_for(stop - start, pieces), step) * step
    edges = [start, *range(start // each * each + each, stop, each), stop]
    return [(first, number, layer, last, end, verbatim) for first, end in itertools.pairwise(edges)]


@functools.lru_cache(maxsize=4096)
def _shape(
    route: Route, verbatim: bool, tokens: int, chunk_bytes: int, streamed: bool
) -> tuple[int, int]:
    """Layers and tokens of a chunk: `CHUNK_TOKENS`, more where all layers of them leave room
    for more, fewer where not even one layer of them has room."""

    def size(count: int) -> int:
        return _chunk_bytes(route, verbatim, min(count, tokens))

    step = route.token_step
    count = pages_for(min(tokens, CHUNK_TOKENS), step) * step
    while size(count) > chunk_bytes:
        if count <= step and (verbatim or count == 1):
            raise ValueError(
                f"chunk of {chunk_bytes} bytes: {count} tokens of one layer have {size(count)}; "
                "raise slot_mib (config)"
            )
        count = max(step, count // 2 // step * step) if count > step else count // 2
    layers = len(route.layers)
    if streamed:
        return min(pages_for(layers, STREAMED_ROWS), chunk_bytes // size(count)), count
    while count < tokens and size(2 * count) * layers <= chunk_bytes:
        count *= 2
    rows = pages_for(layers, chunk_bytes // size(count))
    # Scales may make a row more than the bare elements would: rather a few tokens fewer.
    fewer = count - max(step, count // 16 // step * step)
    if rows > 1 and fewer >= MIN_CHUNK_TOKENS:
        wide = pages_for(layers, rows - 1)
        if size(fewer) * wide <= chunk_bytes:
            rows, count = rows - 1, fewer
    return pages_for(layers, rows), count
