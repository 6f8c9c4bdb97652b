# SPDX-License-Identifier: Apache-2.0
"""Plans the bytes of a chunk's parts that a reader's rank needs. Pure functions."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Group, Shard
from pd_connector.pool.chunk_layout import RUN_ALIGNMENT, Place, Run, group_of, kept_layers, places
from pd_connector.pool.part_names import part_shard


class ReadPlan(NamedTuple):
    """The bytes of one part that a reader's rank needs.

    Attributes:
        form: the part's runs with the layers that are needed.
        places: places of these layers, in the order of the payload.
        start: where the reader's buffer begins in the payload.
        nbytes: size of the buffer.
    """

    form: tuple[Run, ...]
    places: tuple[Place, ...]
    start: int
    nbytes: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Offset and size of each range of the payload that must be read. A range goes to `offset - start` in the
        buffer."""
        merged: list[tuple[int, int]] = []
        for _, offset, nbytes in self.places:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = merged[-1][0], merged[-1][1] + nbytes
            else:
                merged.append((offset, nbytes))
        return merged


def needed_parts(names: Iterable[str], own: Geometry) -> list[str]:
    """Those parts of a chunk that have layers or heads for a rank with this geometry."""
    needed = []
    for name in names:
        shard = part_shard(name)
        if shard is not None and any(_has_of(shard, own, group) for group in own.groups):
            needed.append(name)
    return needed


def _has_of(shard: Shard, own: Geometry, group: Group) -> bool:
    """Whether a rank with this shard writes something of a group of `own`."""
    stage = range(shard.first_layer, shard.stop_layer)
    kept = kept_layers(shard, group)
    return _meet(shard.heads(group.heads), own.heads(group)) and any(
        layer in stage or layer >= DRAFT_LAYERS for layer in kept
    )


def need(form: Sequence[Run], geometry: Geometry, own: Geometry) -> ReadPlan | None:
    """The bytes of a part that a rank with the geometry `own` needs; None if it needs nothing.

    Args:
        form, geometry: of the part's record.
        own: see `record.readable`.
    """
    own_groups = {layer: group for group in own.groups for layer in group.layers}
    kept: list[Run] = []
    for run in form:
        group = group_of(geometry, run.layers[0])
        assert group is not None
        heads = geometry.heads(group)
        layers = tuple(
            layer
            for layer in run.layers
            if layer in own_groups and _meet(heads, own.heads(own_groups[layer]))
        )
        if layers:
            kept.append(msgspec.structs.replace(run, layers=layers))
    here = {layer for run in kept for layer in run.layers}
    layer_places = tuple(place for place in places(form, geometry) if place.layer in here)
    if not layer_places:
        return None
    start = layer_places[0].offset // RUN_ALIGNMENT * RUN_ALIGNMENT
    return ReadPlan(
        tuple(kept), layer_places, start, layer_places[-1].offset + layer_places[-1].nbytes - start
    )


def _meet(heads: range, other: range) -> bool:
    return max(heads.start, other.start) < min(heads.stop, other.stop)
