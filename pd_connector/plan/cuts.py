# SPDX-License-Identifier: Apache-2.0
"""Where a token range of a route is cut into chunks. Pure functions."""

import itertools
from collections.abc import Sequence
from functools import lru_cache

from pd_connector.kv.coding import ELEMENT_BYTES
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import page_part_bytes, span_bytes

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
