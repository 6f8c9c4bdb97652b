# SPDX-License-Identifier: Apache-2.0
"""Where a token range of a route is cut into chunks. Pure functions."""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pd_connector.kv.coding import ELEMENT_BYTES
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import page_part_bytes, span_bytes


class Cut(NamedTuple):
    """A chunk that has no number yet. Its fields are in sending order."""

    first_token: int
    route: int
    first_layer: int
    stop_layer: int
    stop_token: int
    verbatim: bool


def cut_route(
    number: int, route: Route, first_token: int, stop_token: int, chunk_bytes: int, streamed: bool
) -> Iterator[Cut]:
    """The chunks of one route. What passes verbatim comes first, then the rest of the last page."""
    first = route.first_token(first_token, stop_token)
    if first == stop_token:
        return
    verbatim = route.verbatim and first % route.source.page_size == 0
    if not verbatim and route.source.dtype not in ELEMENT_BYTES:
        raise ValueError(
            f"token {first} lies within a page of {route.source.page_size}: pages of "
            f"{route.source.dtype} pass as a whole only"
        )
    whole = _whole_until(route, stop_token) if verbatim else stop_token
    if first < whole:
        shape = _shape(route, verbatim, whole - first, chunk_bytes, streamed)
        yield from _cut_span(number, route, first, whole, verbatim, shape)
    if whole < stop_token:
        shape = _shape(route, False, stop_token - whole, chunk_bytes, False)
        yield from _cut_span(number, route, whole, stop_token, False, shape)


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
    group = route.source
    if route.destination.window or group.dtype not in ELEMENT_BYTES:
        return stop_token
    filled, spare = stop_token % group.page_size, -stop_token % group.page_size
    token_bytes = len(route.layers) * page_part_bytes(route) // group.page_size
    return stop_token - filled if spare * token_bytes >= route.rules.spare_bytes else stop_token


def _cut_span(
    number: int, route: Route, first: int, stop: int, verbatim: bool, shape: tuple[int, int]
) -> Iterator[Cut]:
    """Chunks of `shape` (layers, tokens) that carry tokens [first, stop), by token, then layer."""
    layers, tokens = shape
    count = len(route.layers)
    for start in (first, *range((first // tokens + 1) * tokens, stop, tokens)):
        end = min(stop, (start // tokens + 1) * tokens)
        for layer in range(0, count, layers):
            yield Cut(start, number, layer, min(layer + layers, count), end, verbatim)


def _pieces(routes: Sequence[Route], whole: Cut) -> list[Cut]:
    """A chunk in `edge_pieces` pieces, by layer or, if it has one layer, by token. Fewer, where
    pieces would be smaller than `min_chunk_bytes`."""
    route = routes[whole.route]
    rules = route.rules
    layers, tokens = whole.stop_layer - whole.first_layer, whole.stop_token - whole.first_token
    nbytes = layers * span_bytes(route, whole.verbatim, tokens)
    pieces = min(rules.edge_pieces, nbytes // rules.min_chunk_bytes)
    if pieces < 2:
        return [whole]
    if layers > 1:
        each = _divided_up(layers, pieces)
        edges = [*range(whole.first_layer, whole.stop_layer, each), whole.stop_layer]
        return [
            whole._replace(first_layer=first, stop_layer=stop)
            for first, stop in itertools.pairwise(edges)
        ]
    step = max(rules.min_chunk_tokens, route.token_step)
    each = _divided_up(_divided_up(tokens, pieces), step) * step
    inner = range(whole.first_token // each * each + each, whole.stop_token, each)
    edges = [whole.first_token, *inner, whole.stop_token]
    return [
        whole._replace(first_token=first, stop_token=stop)
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

    rules, step = route.rules, route.token_step
    count = _divided_up(min(tokens, rules.chunk_tokens), step) * step
    while size(count) > chunk_bytes:
        if count <= step and (verbatim or count == 1):
            raise ValueError(
                f"chunk of {chunk_bytes} bytes: {count} tokens of one layer have {size(count)}; "
                "raise slot_mib (config)"
            )
        count = max(step, count // 2 // step * step) if count > step else count // 2
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
