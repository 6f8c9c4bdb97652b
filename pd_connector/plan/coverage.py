# SPDX-License-Identifier: Apache-2.0
"""Whether a consumer gets every layer and head that it holds: found out before anything is sent, or once all routes
are known."""

import functools
from collections.abc import Sequence

from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Stripe
from pd_connector.plan.route import Route, meet


def lacking(source: Geometry, destination: Geometry) -> str:
    """A layer that the destination wants of the source's part of the model, and the source does not
    have, such as `layer 3`; empty if there is none. Found out before anything is sent."""
    held = {layer for group in source.groups for layer in group.layers}
    stage = range(source.shard.first_layer, source.shard.stop_layer)
    for group in destination.groups:
        if not meet(source.shard, destination.shard, group.shares):
            continue
        for layer in group.layers:
            if layer in stage and layer < DRAFT_LAYERS and layer not in held:
                return f"layer {layer}"
    return ""


@functools.lru_cache(maxsize=256)
def uncovered(known: tuple[tuple[Route, ...], ...], destination: Geometry) -> str:
    """A part of the destination that no route brings, such as `layer 3 head 1`, or `layer 3 conv.q unit 0` of a state; empty
    if there is none.

    Args:
        known: the routes from each rank of the producer.
    """
    brought: dict[tuple[int, str], list[Route]] = {}
    for route in (route for pair in known for route in pair):
        for layer in route.layers:
            brought.setdefault((layer, route.section.name if route.section else ""), []).append(
                route
            )
    for group in destination.groups:
        stripe = destination.stripe(group)
        parts = [(f"{one.name} unit", one.name, one.units) for one in group.sections]
        for name, key, total in parts or [("head", "", group.heads)]:
            wanted = destination.shard.heads(total)
            for layer in group.layers:
                missing = _missing(wanted, brought.get((layer, key), ()), stripe)
                if missing is not None:
                    return f"layer {layer} {name} {missing}"
    return ""


def _missing(wanted: range, routes: Sequence[Route], stripe: Stripe) -> int | None:
    """The first head or unit of `wanted` of which these routes do not bring all tokens; None if there is none.

    Routes from several ranks bring unlike heads, or unlike tokens of them.
    """
    at = wanted.start
    while at < wanted.stop:
        here = [route for route in routes if at in route.heads]
        if not here or not _whole(here, stripe):
            return at
        at = min(route.heads.stop for route in here)
    return None


def _whole(routes: Sequence[Route], stripe: Stripe) -> bool:
    """Whether these routes together bring all tokens of a stripe."""
    stripes = {route.stripes for route in routes}
    if None in stripes:
        return True
    known = [one for one in stripes if one is not None]
    shapes = {(one.source.size, one.source.interleave) for one in known}
    by_rank = {one.source.rank: one for one in known}
    brought = sum(one.tokens for one in by_rank.values())
    return len(shapes) == 1 and brought * stripe.size == known[0].period
