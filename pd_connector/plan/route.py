# SPDX-License-Identifier: Apache-2.0
"""Which layers and heads pass from one rank to another, and in which codec. Pure functions of the two
ranks' geometries; both sides compute the same routes.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES, FP8_E4M3, RAW, Elements, negotiate
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.plan.rules import NEWEST_RULES, PlanRules


@dataclass(frozen=True, eq=False)
class Route:
    """Layers and heads of one group that pass from one rank to a group of another rank.

    `routes` makes each route once. Routes are compared by identity, so that they are fast keys of
    caches.
    """

    source: Group
    destination: Group
    layers: tuple[int, ...]  # in model numbering
    heads: range  # in model numbering
    source_head: int  # place of heads[0] in the source's cache
    destination_head: int
    codec: str
    verbatim: bool  # whole pages may pass as they are, without a codec
    rules: PlanRules  # by which its tokens are cut into chunks

    @property
    def error_of(self) -> str:
        """The codec whose error its KV has at the destination. An FP8 cache would store the same codes from `raw`."""
        return RAW.name if self.destination.dtype == FP8_E4M3.name else self.codec

    def first_token(self, first_token: int, stop_token: int) -> int:
        """The first token of [first_token, stop_token) that passes.

        It is the first one that the destination's window keeps. If whole pages can pass, it is the
        first token of that one's page.
        """
        if not self.destination.window:
            return first_token
        kept = max(0, stop_token - self.destination.window + 1)
        page_start = kept - kept % self.source.page_size
        if self.verbatim and page_start >= first_token:
            return page_start
        return max(first_token, kept)

    @property
    def token_step(self) -> int:
        """Tokens between places where pages begin on both sides, if one page size divides the other."""
        return max(self.source.page_size, self.destination.page_size)


def served(source: Shard, destination: Shard, heads: int) -> range:
    """The heads, of a layer with `heads` KV heads, that `source` sends to `destination`.

    If several ranks of the producer hold the same heads, the ranks of the consumer share them
    out: each asks one of them. See also `shared_layers`.

    >>> served(Shard(0, 2, tp_rank=0, tp_size=2), Shard(0, 2, tp_rank=1, tp_size=4), heads=8)
    range(2, 4)
    """
    here, there = source.heads(heads), destination.heads(heads)
    common = range(max(here.start, there.start), min(here.stop, there.stop))
    have, want = source.replicas(heads), destination.replicas(heads)
    if have <= want:
        chosen = destination.replica(heads) % have == source.replica(heads)
    else:
        chosen = source.replica(heads) % want == destination.replica(heads)
    return common if chosen and common else range(0)


def shared_layers(
    source: Shard, destination: Shard, heads: int, layers: tuple[int, ...]
) -> tuple[int, ...]:
    """The part of `layers` that `source` sends to `destination`.

    That is all of them, unless the producer has more ranks with the same heads than the consumer:
    then several of them serve `destination`, and each sends a run of the layers.
    """
    have, want = source.replicas(heads), destination.replicas(heads)
    if have <= want:
        return layers
    servers = len(range(destination.replica(heads), have, want))
    index = source.replica(heads) // want
    return layers[len(layers) * index // servers : len(layers) * (index + 1) // servers]


def meet(source: Shard, destination: Shard, heads: Iterable[int]) -> bool:
    """Whether anything passes from `source` to `destination`.

    Args:
        heads: numbers of KV heads that the model's layers have.
    """
    return max(source.first_layer, destination.first_layer) < min(
        source.stop_layer, destination.stop_layer
    ) and any(served(source, destination, total) for total in set(heads))


def routes(
    source: Geometry,
    destination: Geometry,
    offered: Sequence[str],
    accepted: Sequence[str],
    rules: PlanRules = NEWEST_RULES,
) -> tuple[Route, ...]:
    """Everything that passes from `source` to `destination`.

    Args:
        offered: codecs the producer permits.
        accepted: codecs the consumer permits.
        rules: of the schema that both speak; by default of the newest one.

    Raises:
        UnsupportedGeometryError: the two cannot be brought together; the message has both sides'
            values.

    >>> from pd_connector.kv.geometry import Geometry, Group, Shard
    >>> group = Group(kind="attention", layers=(0, 1), heads=8, key_dim=64, value_dim=64,
    ...               page_size=16, window=0, dtype="bfloat16", layout="NHD", heads_apart=True)
    >>> whole = Geometry(Shard(first_layer=0, stop_layer=2, tp_rank=0, tp_size=1), (group,))
    >>> half = Geometry(Shard(first_layer=0, stop_layer=2, tp_rank=1, tp_size=2), (group,))
    >>> [route] = routes(whole, half, offered=["int8", "raw"], accepted=["raw"])
    >>> route.layers, route.heads, route.source_head, route.destination_head
    ((0, 1), range(4, 8), 4, 0)
    >>> route.codec, route.verbatim
    ('raw', True)
    """
    return _routes(source, destination, tuple(offered), tuple(accepted), rules)


@functools.lru_cache(maxsize=256)
def _routes(
    source: Geometry,
    destination: Geometry,
    offered: tuple[str, ...],
    accepted: tuple[str, ...],
    rules: PlanRules,
) -> tuple[Route, ...]:
    for name, geometry in (("producer", source), ("consumer", destination)):
        _check(name, geometry)
    pairs = ((ours, theirs) for ours in source.groups for theirs in destination.groups)
    found = (_route(source, destination, *pair, offered, accepted, rules) for pair in pairs)
    return tuple(route for route in found if route)


def _route(
    source: Geometry,
    destination: Geometry,
    ours: Group,
    theirs: Group,
    offered: tuple[str, ...],
    accepted: tuple[str, ...],
    rules: PlanRules,
) -> Route | None:
    """What passes from a group of the producer to one of the consumer; None if they share nothing."""
    layers = tuple(sorted(set(ours.layers) & set(theirs.layers)))
    if not layers:
        return None
    if problem := _unlike(ours, theirs, layers):
        raise UnsupportedGeometryError(problem)
    heads = served(source.shard, destination.shard, ours.heads)
    layers = shared_layers(source.shard, destination.shard, ours.heads, layers)
    if not layers or not heads:
        return None
    codec = _codec(ours, theirs, offered, accepted)
    verbatim = codec == RAW.name and _alike(source, destination, ours, theirs, layers, heads)
    if not verbatim and ours.dtype not in ELEMENT_BYTES:
        held = len(source.heads(ours)), len(destination.heads(theirs))
        raise UnsupportedGeometryError(
            f"layers {layers[0]}-{layers[-1]}: pages of {ours.dtype} with {held[0]} / {held[1]} heads "
            "cannot be split; use the same number of tensor-parallel ranks on both sides"
        )
    return Route(
        source=ours,
        destination=theirs,
        layers=layers,
        heads=heads,
        source_head=heads.start - source.heads(ours).start,
        destination_head=heads.start - destination.heads(theirs).start,
        codec=codec,
        verbatim=verbatim,
        rules=rules,
    )


def _check(side: str, geometry: Geometry) -> None:
    shard = geometry.shard
    if shard.tp_rank >= shard.tp_size:
        raise UnsupportedGeometryError(f"{side} is rank {shard.tp_rank} of {shard.tp_size}")
    seen: set[int] = set()
    for group in geometry.groups:
        if twice := seen.intersection(group.layers):
            raise UnsupportedGeometryError(f"{side} has layer {min(twice)} twice")
        seen.update(group.layers)
        if group.heads % shard.tp_size and shard.tp_size % group.heads:
            raise UnsupportedGeometryError(
                f"{side} shares {group.heads} KV heads among {shard.tp_size} ranks: "
                "one must divide the other"
            )
        if group.scales and len(group.scales) != len(group.layers):
            raise UnsupportedGeometryError(
                f"{side} has {len(group.scales)} scales for {len(group.layers)} layers"
            )
        if not all(0 < scale < math.inf for pair in group.scales for scale in pair):
            raise UnsupportedGeometryError(f"{side} has scales {group.scales}: must be above 0")


def _unlike(ours: Group, theirs: Group, layers: tuple[int, ...]) -> str:
    """Why KV cannot pass from one group to the other; empty if it can."""
    where = f"layers {layers[0]}-{layers[-1]}"
    for name in ("kind", "heads", "key_dim", "value_dim"):
        if getattr(ours, name) != getattr(theirs, name):
            return (
                f"{where}: producer / consumer differ in {name} "
                f"{getattr(ours, name)} / {getattr(theirs, name)}"
            )
    if ours.kind == "recurrent":
        return (
            f"{where}: recurrent state ({ours.layout} / {theirs.layout}, page size "
            f"{ours.page_size} / {theirs.page_size}) cannot be moved"
        )
    if ours.window and not 0 < theirs.window <= ours.window:
        wanted = theirs.window or "all"
        return (
            f"{where}: producer keeps a window of {ours.window} tokens, consumer wants {wanted}; "
            "start both engines with the hybrid KV cache manager, or both without it"
        )
    known = ours.dtype in ELEMENT_BYTES and theirs.dtype in ELEMENT_BYTES
    same = [getattr(ours, n) == getattr(theirs, n) for n in ("dtype", "layout", "page_size")]
    if not known and not all(same):
        return (
            f"{where}: cache dtype {ours.dtype} / {theirs.dtype}, layout {ours.layout} / "
            f"{theirs.layout}, page size {ours.page_size} / {theirs.page_size}: "
            f"only {', '.join(ELEMENT_BYTES)} can be converted, others must be alike: start both engines with the "
            "same --kv-cache-dtype, --block-size and attention backend"
        )
    return ""


def _codec(ours: Group, theirs: Group, offered: Sequence[str], accepted: Sequence[str]) -> str:
    if ours.dtype not in ELEMENT_BYTES:
        return RAW.name
    return negotiate(offered, accepted, Elements(ours.dtype), Elements(theirs.dtype)).name


def _alike(
    source: Geometry,
    destination: Geometry,
    ours: Group,
    theirs: Group,
    layers: tuple[int, ...],
    heads: range,
) -> bool:
    """Whether a page has the same bytes on both sides: all of it, or its part that holds `heads`."""
    same = (
        bool(ours.layout)
        and all(
            getattr(ours, name) == getattr(theirs, name)
            for name in ("page_size", "dtype", "layout")
        )
        and all(ours.scale(layer) == theirs.scale(layer) for layer in layers)
    )
    whole = source.heads(ours) == destination.heads(theirs) == heads
    return same and (whole or (ours.heads_apart and theirs.heads_apart))
