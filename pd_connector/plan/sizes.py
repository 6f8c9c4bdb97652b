# SPDX-License-Identifier: Apache-2.0
"""How many bytes tokens, pages and layers take in a chunk's payload. Pure functions."""

import functools
from collections.abc import Sequence

from pd_connector.kv.coding import ELEMENT_BYTES, Elements, Part, coding
from pd_connector.kv.geometry import Group, pages_for
from pd_connector.plan.route import Route

_USUAL_TOKENS = 512
"""Tokens over which the bytes of scales are shared out. Each side estimates for itself."""


def parts(group: Group) -> tuple[tuple[Part, int], ...]:
    """K and V, or K alone, of a layer, each with its elements per token and head."""
    if group.value_dim:
        return (Part.KEY, group.key_dim), (Part.VALUE, group.value_dim)
    return ((Part.KEY, group.key_dim),)


def token_bytes(group: Group) -> int:
    """Bytes of one entry of one head in one layer as the cache stores it, K and V together. Where
    the dtype is not known, the group's dims count bytes."""
    return (group.key_dim + group.value_dim) * ELEMENT_BYTES.get(group.dtype, 1)


@functools.lru_cache(maxsize=4096)
def page_part_bytes(route: Route) -> int:
    """Bytes of the route's heads in one page of one layer, in the source's cache."""
    return len(route.heads) * route.source.page_entries * token_bytes(route.source)


@functools.lru_cache(maxsize=4096)
def layer_bytes(route: Route, entries: int) -> int:
    """Bytes of `entries` entries (K and V, or latents) of one layer, coded by the route's codec. Not of a state."""
    if route.source.dtype not in ELEMENT_BYTES:
        return len(route.heads) * entries * token_bytes(route.source)
    coded_bytes, elements = coding(route.codec).coded_bytes, Elements(route.source.dtype)
    return sum(
        coded_bytes(part, (len(route.heads), entries, dim), elements)
        for part, dim in parts(route.source)
    )


def span_bytes(route: Route, verbatim: bool, tokens: int) -> int:
    """Bytes of `tokens` tokens of one layer, from the start of a page on, at most: as whole pages if `verbatim`,
    else coded."""
    if verbatim:
        return pages_for(tokens, route.source_page_tokens) * page_part_bytes(route)
    return layer_bytes(route, route.most_entries(tokens))


def state_bytes(route: Route) -> int:
    """Bytes of a route of a state: of its section's units in all its layers. 0 for a route of KV."""
    if route.section is None:
        return 0
    return len(route.layers) * len(route.heads) * route.section.unit_bytes


def bytes_per_token(routes: Sequence[Route]) -> float:
    """Bytes on the wire of a token in all layers, in chunks of a usual length. States are not counted."""
    kv = [route for route in routes if route.section is None]
    return sum(len(r.layers) * span_bytes(r, False, _USUAL_TOKENS) for r in kv) / _USUAL_TOKENS
