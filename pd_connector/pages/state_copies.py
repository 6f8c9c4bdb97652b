# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters states: copies some units of one section, in some layers, between the page of a request and a
payload.

Views have the strides of the engine's order; a payload is dense, `[layer][unit][row][dim]`. So a producer that keeps a
convolution as `[dim, row]` and a consumer that keeps it as `[row, dim]` need nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from pd_connector.codec.elements import bits
from pd_connector.kv.geometry import Group
from pd_connector.pages.copiers import as_tensor
from pd_connector.pages.layer import StatePages
from pd_connector.pages.row_matrix import Words
from pd_connector.plan.chunks import Chunk, unit_ranges
from pd_connector.plan.route import Route

States = Mapping[int, StatePages]


def gather_states(
    states: States, route: Route, chunk: Chunk, pages: Sequence[int], payload: Words
) -> None:
    """Fill a payload, uint8 `[chunk.nbytes(route)]`. On a GPU copies may still run when the call returns.

    Args:
        states: states of the source, by layer.
        pages: the one page of the request.

    Raises:
        IndexError: the page is outside this cache.
    """
    for _, state, part in state_parts(states, route.source, route.source_head, route, chunk, pages):
        room = torch.from_numpy(payload[part]).view(state.dtype)
        _copy(room.view(state.shape), state)


def scatter_states(
    states: States, route: Route, chunk: Chunk, pages: Sequence[int], payload: Words
) -> None:
    """Write a payload into the page; see `gather_states`. The payload is only read."""
    where = route.destination, route.destination_head, route, chunk, pages
    for _, state, part in state_parts(states, *where):
        _copy(state, as_tensor(payload[part]).view(state.dtype).view(state.shape))


def state_parts(
    states: States,
    group: Group,
    first_unit: int,
    route: Route,
    chunk: Chunk,
    pages: Sequence[int],
) -> Iterator[tuple[int, torch.Tensor, slice]]:
    """Each part of a chunk: its layer, where it lies in the page, `[unit, row, dim]` as integers, and in the payload.

    Args:
        group: the route's source or destination, whichever is this cache's.
        first_unit: place of the route's first unit in this cache.
        pages: the one page of the request.

    Raises:
        IndexError: the page is outside this cache.
    """
    assert route.section is not None
    (page,) = pages
    names = [section.name for section in group.sections]
    place = names.index(route.section.name)
    for layer, units, offset, nbytes in unit_ranges(route, chunk):
        view = states[layer].sections[place]
        if not 0 <= page < len(view):
            raise IndexError(f"page {page} of a cache of {len(view)} states")
        part = view[page, first_unit + units.start : first_unit + units.stop]
        yield layer, bits(part), slice(offset, offset + nbytes)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy equal shapes; on the host by numpy, whose loops over unlike strides are faster than torch's."""
    if target.device.type == source.device.type == "cpu":
        target.numpy()[...] = source.numpy()
    else:
        target.copy_(source, non_blocking=True)
