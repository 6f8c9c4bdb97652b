# SPDX-License-Identifier: Apache-2.0
"""What a cache looks like, and which part of the model one rank holds. Frozen and pure.

Layers and KV heads are numbered as in the whole model, so that two ranks of unlike engines can
compare what they hold.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec

MAX_LAYERS = 4096
DRAFT_LAYERS = 2048
"""Number of the first layer of a draft model (speculative decoding). Layers of the model itself have
numbers below it. Without their KV of a prompt, answers are the same, and nearly no draft is accepted."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Layers = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
Scales = Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=MAX_LAYERS)]

Kind = Literal["attention", "latent", "state"]

STATE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "uint8": 1}
"""Bytes of an element of a state, by dtype. `uint8` marks bytes whose meaning only the engine knows."""


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The part of the model that one rank holds.

    It holds layers [first_layer, stop_layer), those of its pipeline stage. Its rank in the
    tensor-parallel group says which KV heads of these layers it holds.

    With context parallelism, neighbouring ranks share the tokens of the KV that they would otherwise hold in
    copies (`Group.interleave`). Ranks of a stage are numbered `tp_rank * pcp_size + pcp_rank`, and
    `cp_rank` is this number modulo `cp_size`.

    Attributes:
        cp_size: number of ranks that divide the tokens of a sequence among them; 1: tokens are not divided. vLLM's and
            SGLang's decode context parallelism, whose ranks are ranks of the tensor-parallel group.
        pcp_rank, pcp_size: the rank's place among the ranks with the same `tp_rank`, and their number. They have
            the same heads and states (vLLM's prefill context parallelism).
    """

    first_layer: Count
    stop_layer: Count
    tp_rank: Count
    tp_size: Positive
    # Schema 2. Fields at their defaults are not on the wire.
    cp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    pcp_rank: Count = 0
    pcp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1

    @property
    def has_cp(self) -> bool:
        """Whether there is context parallelism of either kind."""
        return self.cp_size > 1 or self.pcp_size > 1

    @property
    def cp_rank(self) -> int:
        """This rank's number among the ranks that divide a group's tokens: it tells which tokens the rank holds."""
        return (self.tp_rank * self.pcp_size + self.pcp_rank) % self.cp_size

    def heads(self, total: int) -> range:
        """The KV heads that this rank holds, of a layer with `total`. If there are more ranks than
        heads, `replicas(total)` neighbouring ranks hold the same head."""
        if self.tp_size <= total:
            share = total // self.tp_size
            return range(self.tp_rank * share, (self.tp_rank + 1) * share)
        head = self.tp_rank // self._neighbours(total)
        return range(head, head + 1)

    def replicas(self, total: int, *, split: bool = False) -> int:
        """Ranks that hold the same heads of a layer with `total`, and the same tokens of them.

        Args:
            split: the tokens are shared among the context-parallel ranks.
        """
        holders = self._neighbours(total) * self.pcp_size
        return holders // self.cp_size if split else holders

    def replica(self, total: int, *, split: bool = False) -> int:
        """This rank's place among the ranks that `replicas` counts, from 0."""
        place = self.tp_rank % self._neighbours(total) * self.pcp_size + self.pcp_rank
        return place // self.cp_size if split else place

    def _neighbours(self, total: int) -> int:
        """Ranks of the tensor-parallel group that hold the same heads."""
        return max(1, self.tp_size // total)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a state that is divided among ranks independently of the others, such as Q's part of a convolution.

    A layer's state is `[unit][row][dim]` for each of its sections. A geometry does not say where these elements
    lie in the engine's page: each rank's views have strides of their own (`pages/layer.py:StatePages`).

    Attributes:
        name: both sides pair sections by it: `conv.q`, `ssm`. It says which tensor the section is a part of.
        units: in the whole model, shared among ranks as KV heads are (`Shard.heads`), with copies if there are
            more ranks. 1: every rank holds all of it.
        rows: the rows of a convolution or of a ring (tokens that it looks back on); of a matrix, its first axis.
        dim: elements of a row of one unit.
        dtype: a key of `STATE_BYTES`.
    """

    name: Name
    units: Positive
    rows: Positive
    dim: Positive
    dtype: Name

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit. The dtype must be known."""
        return self.rows * self.dim * STATE_BYTES[self.dtype]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layers of one kind that share a page table. Several groups may have the same page table.

    Attributes:
        kind: `attention` (K and V of each head), `latent` (MLA: one vector a token, the same on
            every rank), or `state` (made by `state_group`: a page holds what a layer has kept of all tokens before one
            position). A request has one page of each `state` group's table that counts: `Offer.pages`
            and `Load.pages` list that page alone.
        layers: those that this rank holds, ascending.
        heads: KV heads of such a layer in the whole model; 1 for `latent`.
        key_dim: elements of K per token and head; of the whole vector for `latent`.
        value_dim: elements of V per token and head; 0 for `latent`.
        page_size: tokens of a page.
        window: tokens that are kept, the last ones of a sequence; 0 for all.
        dtype: element type: `bfloat16`, `float16`, `float32` or `fp8_e4m3`; any other name marks
            pages that only caches of the same name and layout can take.
        layout: name of the order of elements within a page. Pages of unlike layouts differ even
            where all sizes agree. Empty where a page is not dense.
        heads_apart: whether each head's part of a page is one dense run of bytes.
        table: which of the engine's page tables lists the pages of these layers.
        scales: for FP8, the factors for stored K and V, per layer; empty for 1.
        sections: sections of one layer's state, with distinct names. Empty for other kinds.
        state_tokens: tokens for which there is one entry (one K and V, one latent): 1, or 4 and 128 in DeepSeek V4.
            It divides `page_size`. Only entries whose tokens are all there pass; what an engine keeps of
            the others is in a `state` or a window of its own.
        interleave: tokens in a row that a context-parallel rank holds: rank r has the tokens with
            `(i // interleave) % cp_size == r`. It divides `page_size`. 0: every rank holds all tokens.
    """

    kind: Kind
    layers: Layers
    heads: Positive
    key_dim: Positive
    value_dim: Count
    page_size: Positive
    window: Count
    dtype: Name
    layout: Name
    heads_apart: bool
    # Always on the wire, as schema 1 has them: msgspec cannot tell what a function returns by default.
    table: Count = msgspec.field(default_factory=lambda: 0)
    scales: Scales = msgspec.field(default_factory=lambda: ())
    # Schema 2. Fields at their defaults are not on the wire.
    sections: Annotated[tuple[Section, ...], msgspec.Meta(max_length=64)] = ()
    state_tokens: Positive = 1
    interleave: Count = 0

    @property
    def page_entries(self) -> int:
        """Entries of a page: K and V, or latents."""
        return self.page_size // self.state_tokens

    @property
    def shares(self) -> frozenset[int]:
        """Numbers of heads, or of units of sections, that ranks share."""
        return frozenset(section.units for section in self.sections) or frozenset((self.heads,))

    def scale(self, layer: int) -> tuple[float, float]:
        """Scales of K and V of a layer, by its number in the model."""
        return self.scales[self.layers.index(layer)] if self.scales else (1.0, 1.0)


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rank's paged cache.

    Attributes:
        uncached: page tables of which the engine keeps nothing in its prefix cache. A load brings all tokens that their
            window keeps, whatever else the consumer has.
    """

    shard: Shard
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=64)]
    # Schema 2. Not on the wire if it is empty. (A group with a sixteenth field would have other bytes, even if it is left out.)
    uncached: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)] = ()

    def heads(self, group: Group) -> range:
        """The KV heads of `group` that this rank holds."""
        return self.shard.heads(group.heads)

    def stripe(self, group: Group) -> "Stripe":
        """The tokens of `group` that this rank holds."""
        if not group.interleave or self.shard.cp_size == 1:
            return WHOLE
        return Stripe(self.shard.cp_rank, self.shard.cp_size, group.interleave)

    @property
    def needs_schema(self) -> int:
        """The first wire schema in which this geometry can be said."""
        plain = not self.shard.has_cp and not any(
            group.kind == "state" or group.state_tokens > 1 or group.interleave
            for group in self.groups
        )
        return 1 if plain and not self.uncached else 2


class Stripe(NamedTuple):
    """The tokens of a sequence that one context-parallel rank holds: token i if `(i // interleave) % size == rank`.

    Its pages hold them without gaps, in order. So page n of its table has the tokens of the stripe among the
    `page_size * size` tokens from `n * page_size * size` on.

    >>> [token for token in range(16) if Stripe(1, 2, 4).holds(token)]
    [4, 5, 6, 7, 12, 13, 14, 15]
    >>> Stripe(1, 2, 4).place(13)
    5
    """

    rank: int
    size: int
    interleave: int

    def holds(self, token: int) -> bool:
        """Whether this rank holds the token."""
        return token // self.interleave % self.size == self.rank

    def place(self, token: int) -> int:
        """Number of a token that it holds, among those that it holds."""
        return token // (self.interleave * self.size) * self.interleave + token % self.interleave


WHOLE = Stripe(0, 1, 1)
"""All tokens."""


def state_group(layers: Layers, sections: tuple[Section, ...], table: int = 0) -> Group:
    """A group of layers with states.

    Args:
        layers: those that this rank holds, ascending. Their states are alike.
        sections: sections of the state of one layer, in the whole model.
        table: see `Group`.

    >>> gdn = state_group((0, 1, 2), (
    ...     Section("conv.q", units=16, rows=3, dim=128, dtype="bfloat16"),
    ...     Section("conv.k", units=16, rows=3, dim=128, dtype="bfloat16"),
    ...     Section("conv.v", units=32, rows=3, dim=128, dtype="bfloat16"),
    ...     Section("ssm", units=32, rows=128, dim=128, dtype="float32"),
    ... ))
    >>> gdn.kind, gdn.sections[3].unit_bytes
    ('state', 65536)
    """
    return Group(
        kind="state",
        layers=layers,
        heads=1,
        key_dim=1,
        value_dim=0,
        page_size=1,
        window=0,
        dtype="state",
        layout="",
        heads_apart=False,
        table=table,
        sections=sections,
    )


def has_drafts(geometry: Geometry) -> bool:
    """Whether a rank has layers of a draft model."""
    return any(layer >= DRAFT_LAYERS for group in geometry.groups for layer in group.layers)


def without_drafts(geometry: Geometry) -> Geometry:
    """The same cache without layers of a draft model."""
    groups = []
    for group in geometry.groups:
        kept = [place for place, layer in enumerate(group.layers) if layer < DRAFT_LAYERS]
        if len(kept) == len(group.layers):
            groups.append(group)
        elif kept:
            layers = tuple(group.layers[place] for place in kept)
            scales = tuple(group.scales[place] for place in kept) if group.scales else ()
            groups.append(msgspec.structs.replace(group, layers=layers, scales=scales))
    return msgspec.structs.replace(geometry, groups=tuple(groups))


def page_span(first_token: int, stop_token: int, page_size: int) -> range:
    """Pages of a sequence, of `page_size` tokens each, that hold tokens [first_token, stop_token).
    The first and the last may hold others, too.

    >>> page_span(20, 40, page_size=16)
    range(1, 3)
    """
    return range(first_token // page_size, -(-stop_token // page_size))


def pages_for(tokens: int, page_size: int) -> int:
    """Pages of `page_size` tokens that hold `tokens` tokens; the last may be partly filled.

    >>> pages_for(40, page_size=16)
    3
    """
    return len(page_span(0, tokens, page_size))
