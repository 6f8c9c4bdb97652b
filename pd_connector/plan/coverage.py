# SPDX-License-Identifier: Apache-2.0
"""Checks that a consumer gets every layer and head that its cache holds.

`lacking` compares two geometries before anything is sent. `uncovered` compares the routes from all ranks.
"""

import functools
from collections.abc import Sequence

from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Stripe
from pd_connector.plan.route import Route, meet


def lacking(source: Geometry, destination: Geometry) -> str:
    """A layer that the destination needs from the source's pipeline stage and that the source lacks, such as `layer 3`;
    empty if there is none."""
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
def uncovered(by_rank: tuple[tuple[Route, ...], ...], destination: Geometry) -> str:
    """A part of the destination that no route brings; empty if there is none.

    It is named `layer 3 head 1`, or `layer 3 conv.q unit 0` for a state.

    Args:
        by_rank: the routes from each rank of the producer.
    """
    brought: dict[tuple[int, str], list[Route]] = {}
    for route in (route for pair in by_rank for route in pair):
        for layer in route.layers:
            brought.setdefault((layer, route.section.name if route.section else ""), []).append(
                route
            )
    for group in destination.groups:
        stripe = destination.stripe(group)
        parts = [
            (f"{section.name} unit", section.name, section.units) for section in group.sections
        ]
        for name, key, total in parts or [("head", "", group.heads)]:
            needed = destination.shard.heads(total)
            for layer in group.layers:
                missing = _missing(needed, brought.get((layer, key), ()), stripe)
                if missing is not None:
                    return f"layer {layer} {name} {missing}"
    return ""


def _missing(needed: range, routes: Sequence[Route], stripe: Stripe) -> int | None:
    """The first needed head or unit whose tokens these routes do not all bring; None if there is none.

    Routes from several ranks bring different heads, or different tokens of the same heads.
    """
    at = needed.start
    while at < needed.stop:
        here = [route for route in routes if at in route.heads]
        if not here or not _whole(here, stripe):
            return at
        at = min(route.heads.stop for route in here)
    return None


def _whole(routes: Sequence[Route], stripe: Stripe) -> bool:
    """Whether these routes together bring all tokens of a stripe."""
    patterns = {route.stripes for route in routes}
    if None in patterns:
        return True
    parts = [stripes for stripes in patterns if stripes is not None]
    shapes = {(part.source.size, part.source.interleave) for part in parts}
    by_rank = {part.source.rank: part for part in parts}
    brought = sum(part.tokens for part in by_rank.values())
    return len(shapes) == 1 and brought * stripe.size == parts[0].period
