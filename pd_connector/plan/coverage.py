# SPDX-License-Identifier: Apache-2.0
"""Whether a consumer gets every layer and head that it holds: found out before anything is sent, or once all routes
are known."""

import functools

from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry
from pd_connector.plan.route import Route, served


def lacking(source: Geometry, destination: Geometry) -> str:
    """A layer that the destination wants of the source's part of the model, and the source does not
    have, such as `layer 3`; empty if there is none. Found out before anything is sent."""
    held = {layer for group in source.groups for layer in group.layers}
    stage = range(source.shard.first_layer, source.shard.stop_layer)
    for group in destination.groups:
        if not served(source.shard, destination.shard, group.heads):
            continue
        for layer in group.layers:
            if layer in stage and layer < DRAFT_LAYERS and layer not in held:
                return f"layer {layer}"
    return ""


@functools.lru_cache(maxsize=256)
def uncovered(known: tuple[tuple[Route, ...], ...], destination: Geometry) -> str:
    """A part of the destination that no route brings, such as `layer 3 head 1`; empty if there is
    none.

    Args:
        known: the routes from each rank of the producer.
    """
    brought = {
        (layer, head)
        for pair in known
        for route in pair
        for layer in route.layers
        for head in route.heads
    }
    for group in destination.groups:
        for layer in group.layers:
            for head in destination.heads(group):
                if (layer, head) not in brought:
                    return f"layer {layer} head {head}"
    return ""
