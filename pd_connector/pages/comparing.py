# SPDX-License-Identifier: Apache-2.0
"""Distance between a chunk's payload and this cache's pages. It is computed from numbers, so that different
layouts and codecs can be compared.

Nothing is written. Both sides become float32 `[head, token, dim]`: this cache's pages as they are read for
sending, the payload as it would be written. States are compared unit by unit.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pd_connector.codec import DTYPES, load_codec
from pd_connector.codec.elements import bits
from pd_connector.kv.coding import Elements, Part
from pd_connector.pages.cache_layers import CacheLayers
from pd_connector.pages.copiers import Copier, as_tensor
from pd_connector.pages.row_matrix import Words
from pd_connector.pages.spans import Index, common_tokens
from pd_connector.pages.state_copies import state_parts
from pd_connector.pages.tiles import untiled
from pd_connector.plan.chunks import Chunk, planes
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import parts
from pd_connector.protocol.consuming.audit import Distance, relative
from pd_connector.protocol.consuming.experts import MOST_MOVED, MOVED, Moved

Squares = npt.NDArray[np.float64]

_SEGMENT = 64
"""Dims compared as one segment. Segments show a wrong rotation even if only a part of K is rotated."""
_FLOOR = 1 / 16
"""Least mean square of a head, as a share of the layer's. Without it, rounding would look large in a head that
is almost zero."""
_LEAST_OF_A_UNIT = 64
"""Fewest elements of a state's unit that is judged by itself."""
_TOKEN_FLOOR = 1 / 4
"""Least square of a token, as a share of the median over its head's tokens. The median, because a prompt's first
token can be larger than all others together, and would hide them."""


def distances(
    layers: CacheLayers,
    copier: Copier,
    route: Route,
    chunk: Chunk,
    pages: Sequence[int],
    payload: Words,
) -> list[Distance]:
    """Compare a payload with the pages that hold the chunk's tokens.

    Args:
        pages: ids of `chunk.destination_pages(route)`; -1: no longer here, and not compared.
        payload: uint8 `[chunk.nbytes(route)]`, only read.

    Returns:
        One distance for K and one for V of each layer; none if all pages are gone.

    Raises:
        IndexError: a page is outside this cache.
    """
    if route.section is not None:
        return _state_distances(layers, route, chunk, pages, payload)
    numbers = np.asarray(chunk.destination_pages(route))
    here = np.asarray(pages) >= 0
    if not here.any():
        return []
    present = [max(page, 0) for page in pages]
    tokens = _tokens(route, chunk)
    page_of_token = tokens // route.destination_page_tokens - numbers[0]
    kept = here[page_of_token]
    tokens, page_of_token = tokens[kept], page_of_token[kept]
    begins = np.flatnonzero(np.diff(page_of_token, prepend=-1))
    pairs = (_verbatim if chunk.verbatim else _coded)(
        layers, copier, route, chunk, present, payload
    )
    results = []
    for layer, part, ours, theirs in pairs:
        apart, own = (squares[:, kept] for squares in _squares(ours, theirs))
        by_token = _by_token(apart, own)
        worst = [
            first + int(part_of.argmax())
            for first, part_of in zip(begins, np.split(by_token, begins[1:]), strict=True)
        ]
        results.append(
            Distance(
                layer,
                part,
                pages=numbers[here].tolist(),
                by_page=_by_page(apart, own, begins),
                tokens=tokens[worst].tolist(),
                by_token=by_token[worst].tolist(),
                apart=float(apart.sum()),
                own=float(own.sum()),
                span=range(int(tokens[0]), int(tokens[-1]) + 1),
                moved=_moved(tokens, by_token, apart),
            )
        )
    return results


def _state_distances(
    layers: CacheLayers, route: Route, chunk: Chunk, pages: Sequence[int], payload: Words
) -> list[Distance]:
    """Distances of each layer's part of a state: one for its worst unit, and one for all units in the chunk. Small
    units, such as a channel of a convolution, are too noisy alone, so they count together. Rows for speculation are not
    compared: a prefill does not write them."""
    section = route.section
    assert section is not None
    if section.dtype not in DTYPES or min(pages, default=-1) < 0:
        return []
    distances: list[Distance] = []
    where = route.destination, route.destination_head, route, chunk, pages
    for layer, held, part in state_parts(layers.states, *where):
        dtype = DTYPES[section.dtype]
        ours = held.to("cpu").contiguous().view(dtype).double()
        theirs = as_tensor(payload[part]).to("cpu").view(dtype).view(ours.shape).double()
        scratch = layers.states[layer].scratch_rows if section.name.startswith("conv") else 0
        written = slice(ours.shape[1] - scratch)
        ours, theirs = ours[:, written], theirs[:, written]
        apart = (theirs - ours).flatten(1).square().sum(1)
        own = ours.flatten(1).square().sum(1)
        whole = relative(float(apart.sum()), float(own.sum()))
        worst = whole
        if ours[0].numel() >= _LEAST_OF_A_UNIT:
            floored = own.clamp(min=_FLOOR * float(own.mean()))
            units = zip(apart.tolist(), floored.tolist(), strict=True)
            worst = max(relative(a, o) for a, o in units)
        distances.append(
            Distance(
                layer=layer,
                part=Part.KEY,
                pages=[0],
                by_page=[worst],
                tokens=[chunk.stop_token - 1],
                by_token=[whole],
                apart=float(apart.sum()),
                own=float(own.sum()),
                span=range(chunk.stop_token - 1, chunk.stop_token),
                section=section.name,
            )
        )
    return distances


def _tokens(route: Route, chunk: Chunk) -> Index:
    """The first token of each entry of the chunk that both sides hold."""
    if route.stripes is None:
        return np.arange(chunk.first_token, chunk.stop_token, route.source.state_tokens)
    shared = common_tokens(route.stripes, chunk.first_token, chunk.stop_token)
    return shared[:: route.source.state_tokens]


_Pair = tuple[int, Part, torch.Tensor, torch.Tensor]
"""Layer, K or V, and the tensors here and received: `[head, token, dim]`, in this cache's dtype."""


def _coded(
    layers: CacheLayers,
    copier: Copier,
    route: Route,
    chunk: Chunk,
    pages: Sequence[int],
    payload: Words,
) -> Iterator[_Pair]:
    """Planes coded by a codec, each decoded as if it were to be written."""
    heads = slice(route.destination_head, route.destination_head + len(route.heads))
    device = layers.device
    for plane in planes(route, chunk):
        key, value = route.source.scale(plane.layer)
        source = Elements(route.source.dtype, value if plane.part is Part.VALUE else key)
        key, value = route.destination.scale(plane.layer)
        target = Elements(route.destination.dtype, value if plane.part is Part.VALUE else key)
        coded = as_tensor(payload[plane.offset : plane.offset + plane.nbytes]).to(device)
        theirs = load_codec(route.codec).decode(plane.part, coded, plane.shape, source, target)
        view = layers.view(plane)[:, heads]
        ours = torch.empty(plane.shape, dtype=view.dtype, device=device)
        span = layers.destination_tokens(route, chunk, plane.layer, pages)
        copier.read(view, span, ours)
        yield plane.layer, plane.part, ours, theirs.view(view.dtype).view(plane.shape)


def _verbatim(
    layers: CacheLayers,
    copier: Copier,
    route: Route,
    chunk: Chunk,
    pages: Sequence[int],
    payload: Words,
) -> Iterator[_Pair]:
    """Whole pages as the cache stores them: the payload is viewed with the strides of the cache's own pages."""
    group = route.destination
    heads = slice(route.destination_head, route.destination_head + len(route.heads))
    # Places of the chunk's entries from the first page's first entry on.
    held = _tokens(route, chunk)
    if route.stripes is not None:
        _, size, interleave = route.stripes.destination
        held = held // (interleave * size) * interleave + held % interleave
    base = chunk.destination_pages(route).start * group.page_entries
    tokens = held // group.state_tokens - base
    first = 0
    for layer in chunk.layers(route):
        planes, index = layers.rows_of_pages(layer, group, heads, pages)
        came = []
        for rows in planes:
            nbytes = len(index) * rows.shape[1] * rows.shape[2]
            came.append(as_tensor(payload[first : first + nbytes]).to(layers.device))
            first += nbytes
        for part, _ in parts(group):
            view = layers.part(layer, part)[:, heads]
            place = -1 if part is Part.VALUE else 0  # K and V share a plane, or have one each
            seen = _as_pages(came[place], view, planes[place], len(index))
            ours = _taken(view, index)
            yield layer, part, _dense(ours)[:, tokens], _dense(seen)[:, tokens]


def _as_pages(
    came: torch.Tensor, view: torch.Tensor, rows: torch.Tensor, pages: int
) -> torch.Tensor:
    """A plane's bytes, `[page, kv head or 1, bytes]`, with the axes of this view of the plane."""
    size = view.element_size()
    row = rows.shape[2] // size
    first = (view.data_ptr() - rows.data_ptr()) // size
    by_head = view.stride(1) if rows.shape[1] == 1 else row
    strides = (rows.shape[1] * row, by_head, *view.stride()[2:])
    return came.view(view.dtype).as_strided((pages, *view.shape[1:]), strides, first)


def _taken(view: torch.Tensor, index: Index) -> torch.Tensor:
    """Pages of a view, copied."""
    which = torch.from_numpy(index).to(view.device)
    return bits(view).index_select(0, which).view(view.dtype)


def _dense(pages: torch.Tensor) -> torch.Tensor:
    """Pages `[page, head, token, dim]`, or tiled, as `[head, token, dim]`."""
    return untiled(pages).permute(1, 0, 2, 3).flatten(1, 2)


def _squares(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[Squares, Squares]:
    """Sums of squares of the differences, and of this cache's values: float64 `[head, token, segment]`."""
    a, b = ours.float(), theirs.float()
    apart, own = _summed(b - a), _summed(a)
    if not (np.isfinite(own).all() and np.isfinite(apart).all()):  # rare
        lost = ~torch.isfinite(a)  # no comparison is possible there
        a, b = a.masked_fill(lost, 0), b.masked_fill(lost, 0)
        apart = np.nan_to_num(_summed(b - a), nan=np.inf, posinf=np.inf)
        own = _summed(a)
    return apart, own


def _summed(x: torch.Tensor) -> Squares:
    """Sums of squares of `[head, token, dim]`: float64 `[head, token, segment]`."""
    dims = x.shape[-1]
    segment = _SEGMENT if dims % _SEGMENT == 0 else dims
    summed = x.square().unflatten(-1, (-1, segment)).sum(-1)
    result: Squares = summed.cpu().numpy().astype(np.float64)
    return result


def _by_page(apart: Squares, own: Squares, begins: Index) -> list[float]:
    """Distance of each page: that of its worst head and segment.

    Args:
        begins: places of the pages' first tokens.
    """
    tokens = np.diff(begins, append=own.shape[1])
    apart, own = (np.add.reduceat(squares, begins, axis=1) for squares in (apart, own))
    a_token = own.sum(1, keepdims=True) / tokens.sum()
    least = np.maximum(a_token, a_token.mean() * _FLOOR)
    worst: list[float] = _worst(apart, np.maximum(own, least * tokens[:, None])).tolist()
    return worst


def _by_token(apart: Squares, own: Squares) -> Squares:
    """Distance of each token, in its worst head and segment: float64 `[token]`."""
    usual = np.median(own, axis=1, keepdims=True)
    least = np.maximum(_TOKEN_FLOOR * usual, _FLOOR * usual.mean())
    return _worst(apart, np.maximum(own, least))


def _moved(tokens: Index, by_token: Squares, apart: Squares) -> list[Moved]:
    """The tokens that differ by more than rounding, largest distance first."""
    order = np.argsort(-by_token, kind="stable")[:MOST_MOVED]
    order = order[by_token[order] > MOVED]
    sums = apart.sum(axis=(0, 2))
    rows = zip(*(each[order].tolist() for each in (tokens, by_token, sums)), strict=True)
    return [Moved(*row) for row in rows]


def _worst(apart: Squares, whole: Squares) -> Squares:
    """The largest distance over heads and segments."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(apart > 0, apart / whole, 0.0)
    largest: Squares = np.sqrt(ratio.max(axis=(0, 2)))
    return largest
