# SPDX-License-Identifier: Apache-2.0
"""Which layers and heads pass from one rank to another, and in which codec. Pure functions of the two
ranks' geometries; both sides compute the same routes.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES, FP8_E4M3, RAW, Elements, negotiate
from pd_connector.kv.geometry import Geometry, Group, Section, Shard
from pd_connector.plan.fit import check, unlike
from pd_connector.plan.rules import NEWEST_RULES, PlanRules
from pd_connector.plan.stripes import Stripes, common


@dataclass(frozen=True, eq=False)
class Route:
    """Layers and heads of one group that pass from one rank to a group of another rank. The heads of a route of a
    state are units of one section.

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
    section: Section | None = None  # of a state, which passes along this route; None: KV of tokens
    whole: bool = (
        False  # all tokens of a window pass: the destination has none of them (`Geometry.uncached`)
    )
    stripes: Stripes | None = None  # the tokens that both sides hold; None: both hold all

    @functools.cached_property
    def source_page_tokens(self) -> int:
        """Tokens of the sequence for which a table of the source has one page."""
        return self.source.page_size * (self.stripes.source.size if self.stripes else 1)

    @functools.cached_property
    def destination_page_tokens(self) -> int:
        """Tokens of the sequence for which a table of the destination has one page."""
        return self.destination.page_size * (self.stripes.destination.size if self.stripes else 1)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether there is an entry for each token, and both sides hold all of them."""
        return self.section is None and self.stripes is None and self.source.state_tokens == 1

    def entries(self, first_token: int, stop_token: int) -> int:
        """Entries (one K and V, one latent) that pass of tokens [first_token, stop_token)."""
        if self.stripes is None:
            return (stop_token - first_token) // self.source.state_tokens
        return self.stripes.count(first_token, stop_token) // self.source.state_tokens

    def most_entries(self, tokens: int) -> int:
        """Entries that pass of `tokens` tokens in a row, at most."""
        most = tokens if self.stripes is None else self.stripes.most(tokens)
        return -(-most // self.source.state_tokens)

    @property
    def error_of(self) -> str:
        """The codec that limits the accuracy of the KV at the destination. For an FP8 cache it is `raw`: the cache would
        store the same codes from uncoded elements."""
        return RAW.name if self.destination.dtype == FP8_E4M3.name else self.codec

    def first_token(self, first_token: int, stop_token: int) -> int:
        """The first token of [first_token, stop_token) that passes.

        It is the first one that the destination's window keeps. If whole pages can pass, it is the
        first token of that one's page. If there is an entry for several tokens, it is the first of them.
        """
        if self.whole:
            first_token = 0
        if not self.destination.window:
            return first_token - first_token % self.source.state_tokens
        kept = max(0, stop_token - self.destination.window + 1)
        kept -= kept % self.source.state_tokens
        page_start = kept - kept % self.source_page_tokens
        if self.verbatim and page_start >= first_token:
            return page_start
        return max(first_token - first_token % self.source.state_tokens, kept)

    @functools.cached_property
    def token_step(self) -> int:
        """Tokens between places where pages begin on both sides, if one page size divides the other."""
        return max(self.source_page_tokens, self.destination_page_tokens)


Splits = tuple[bool, bool]
"""Whether the tokens are shared among context-parallel ranks: the producer's, the consumer's."""


def served(source: Shard, destination: Shard, heads: int, splits: Splits = (False, False)) -> range:
    """The heads, of a layer with `heads` KV heads, that `source` sends to `destination`.

    If several ranks of the producer hold the same heads (of the same tokens), the ranks of the consumer share them
    out: each consumer rank asks one producer rank. See also `shared_layers`.

    >>> served(Shard(0, 2, tp_rank=0, tp_size=2), Shard(0, 2, tp_rank=1, tp_size=4), heads=8)
    range(2, 4)
    """
    here, there = source.heads(heads), destination.heads(heads)
    both = range(max(here.start, there.start), min(here.stop, there.stop))
    have, want = _copies(source, destination, heads, splits)
    (number, count), (other, count_there) = have, want
    chosen = other % count == number if count <= count_there else number % count_there == other
    return both if chosen and both else range(0)


def _copies(
    source: Shard, destination: Shard, heads: int, splits: Splits
) -> tuple[tuple[int, int], tuple[int, int]]:
    """For each side: the rank's number among the ranks with the same heads and tokens, and how many such ranks there are."""
    ours, theirs = splits
    return (
        (source.replica(heads, split=ours), source.replicas(heads, split=ours)),
        (destination.replica(heads, split=theirs), destination.replicas(heads, split=theirs)),
    )


def shared_layers(
    source: Shard,
    destination: Shard,
    heads: int,
    layers: tuple[int, ...],
    splits: Splits = (False, False),
) -> tuple[int, ...]:
    """The part of `layers` that `source` sends to `destination`.

    That is all of them, unless the producer has more ranks with the same heads than the consumer:
    then several of them serve `destination`, and each sends a run of the layers.
    """
    (number, have), (other, want) = _copies(source, destination, heads, splits)
    if have <= want:
        return layers
    servers = len(range(other, have, want))
    index = number // want
    return layers[len(layers) * index // servers : len(layers) * (index + 1) // servers]


def meet(source: Shard, destination: Shard, heads: Iterable[int]) -> bool:
    """Whether anything can pass from `source` to `destination`.

    Without context parallelism, it does pass. With it, the geometries say which tokens do, and perhaps none.

    Args:
        heads: numbers of KV heads, and of units of states, that the model's layers have.
    """
    if max(source.first_layer, destination.first_layer) >= min(
        source.stop_layer, destination.stop_layer
    ):
        return False
    if source.cp_size > 1 or destination.cp_size > 1:
        return any(_overlap(source.heads(total), destination.heads(total)) for total in set(heads))
    return any(served(source, destination, total) for total in set(heads))


def _overlap(first: range, other: range) -> bool:
    return max(first.start, other.start) < min(first.stop, other.stop)


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
        check(name, geometry)
    groups = (*source.groups, *destination.groups)
    if any(group.kind == "state" for group in groups):
        rules = rules.beside_states
    routes: list[Route] = []
    for ours in source.groups:
        for theirs in destination.groups:
            layers = tuple(sorted(set(ours.layers) & set(theirs.layers)))
            if not layers:
                continue
            if problem := unlike(ours, theirs, layers):
                raise UnsupportedGeometryError(problem)
            pair = source, destination, ours, theirs, layers
            if ours.kind == "state":
                routes += _state_routes(*pair, rules)
            elif route := _route(*pair, offered, accepted, rules):
                routes.append(route)
    return tuple(routes)


def _state_routes(
    source: Geometry,
    destination: Geometry,
    ours: Group,
    theirs: Group,
    layers: tuple[int, ...],
    rules: PlanRules,
) -> Iterator[Route]:
    """What passes of states: a route for each section, because each is shared among ranks by itself."""
    for section in ours.sections:
        shards = source.shard, destination.shard
        units = served(*shards, section.units)
        passing = shared_layers(*shards, section.units, layers)
        if units and passing:
            yield Route(
                source=ours,
                destination=theirs,
                layers=passing,
                heads=units,
                source_head=units.start - source.shard.heads(section.units).start,
                destination_head=units.start - destination.shard.heads(section.units).start,
                codec=RAW.name,
                verbatim=False,
                rules=rules,
                section=section,
            )


def _route(
    source: Geometry,
    destination: Geometry,
    ours: Group,
    theirs: Group,
    layers: tuple[int, ...],
    offered: tuple[str, ...],
    accepted: tuple[str, ...],
    rules: PlanRules,
) -> Route | None:
    """What passes from a group of the producer to one of the consumer; None if nothing does."""
    stripe, other = source.stripe(ours), destination.stripe(theirs)
    splits = stripe.size > 1, other.size > 1
    stripes = common(stripe, other)
    heads = served(source.shard, destination.shard, ours.heads, splits)
    layers = shared_layers(source.shard, destination.shard, ours.heads, layers, splits)
    if not layers or not heads or (stripes is not None and not stripes.tokens):
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
        whole=theirs.table in destination.uncached,
        stripes=stripes,
    )


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
        and source.stripe(ours) == destination.stripe(theirs)
    )
    whole = source.heads(ours) == destination.heads(theirs) == heads
    return same and (whole or (ours.heads_apart and theirs.heads_apart))
