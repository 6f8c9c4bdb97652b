# SPDX-License-Identifier: Apache-2.0
"""What a cache looks like, and which part of the model one rank holds. Frozen and pure.

Layers and KV heads are numbered as in the whole model, so that two ranks of unlike engines can
compare what they hold.
"""

from typing import Annotated, Literal

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

Kind = Literal["attention", "latent", "recurrent"]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the model that one rank holds.

    It holds layers [first_layer, stop_layer), those of its pipeline stage. Its rank in the
    tensor-parallel group says which KV heads of these layers it holds.
    """

    first_layer: Count
    stop_layer: Count
    tp_rank: Count
    tp_size: Positive

    def heads(self, total: int) -> range:
        """The KV heads that this rank holds, of a layer with `total`. If there are more ranks than
        heads, `replicas(total)` neighbouring ranks hold the same head."""
        if self.tp_size <= total:
            share = total // self.tp_size
            return range(self.tp_rank * share, (self.tp_rank + 1) * share)
        head = self.tp_rank // self.replicas(total)
        return range(head, head + 1)

    def replicas(self, total: int) -> int:
        """Ranks of the tensor-parallel group that hold the same heads."""
        return max(1, self.tp_size // total)

    def replica(self, total: int) -> int:
        """This rank's place among the ranks that hold the same heads, from 0."""
        return self.tp_rank % self.replicas(total)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers of one kind that share a page table. Several groups may have the same page table.

    Attributes:
        kind: `attention` (K and V of each head), `latent` (MLA: one vector a token, the same on
            every rank), or `recurrent` (a state for the whole sequence, in the engine's own form).
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
        scales: for FP8, what stored K and V are to be multiplied with, per layer; empty for 1.
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
    table: Count = 0
    scales: Scales = ()

    def scale(self, layer: int) -> tuple[float, float]:
        """Scales of K and V of a layer, by its number in the model."""
        return self.scales[self.layers.index(layer)] if self.scales else (1.0, 1.0)


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's paged cache."""

    shard: Shard
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=64)]

    def heads(self, group: Group) -> range:
        """The KV heads of `group` that this rank holds."""
        return self.shard.heads(group.heads)


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
