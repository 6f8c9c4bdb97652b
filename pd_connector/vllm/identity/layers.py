# SPDX-License-Identifier: Apache-2.0
"""Numbers and labels of vLLM's cached layers, from (part of the model, index, kind). Two engines compare their caches
by them."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pd_connector.kv.geometry import DRAFT_LAYERS

_INDEX = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class CacheId(NamedTuple):
    """Identifies a cache, the same on every engine."""

    number: int  # of the layer; a draft model's layers are numbered from `DRAFT_LAYERS` on
    label: str  # part of the model and kind of cache


def identify(names: Sequence[str], drafts: frozenset[str] = frozenset()) -> dict[str, CacheId]:
    """Number and label of each cache.

    A layer's number is its index. If layers have several caches, all caches of a part are numbered in order;
    the labels tell them apart.

    Args:
        names: vLLM's names, such as `model.layers.3.self_attn.attn`.
        drafts: names of the draft model's caches. Their indices are counted from its first layer: for some
            drafts vLLM continues after the model's own layers, for others it begins at 0.

    >>> found = identify(["model.layers.3.self_attn.attn", "draft_model.model.layers.3.self_attn.attn"],
    ...                  frozenset(["draft_model.model.layers.3.self_attn.attn"]))
    >>> list(found.values())
    [CacheId(number=3, label='model/attention'), CacheId(number=2048, label='draft/attention')]
    """
    own = [name for name in names if name not in drafts]
    caches = _identify("model", {name: index_of(name) for name in own})
    indices = {name: index_of(name) for name in names if name in drafts}
    order = sorted(set(indices.values()))
    placed = {name: order.index(index) for name, index in indices.items()}
    for name, (number, label) in _identify("draft", placed).items():
        caches[name] = CacheId(DRAFT_LAYERS + number, label)
    return caches


def index_of(name: str) -> int:
    """The index of a layer in its name: the first number between dots."""
    match = _INDEX.search(name)
    if match is None:
        raise ValueError(f"layer {name!r} has no index in its name")
    return int(match[1])


def draft_names(
    names: Sequence[str],
    layers: int,
    models: Mapping[str, int | None],
) -> frozenset[str]:
    """The caches of a draft model, if the engine speculates with one.

    Args:
        names: names of all caches, the model's own first, as vLLM made them.
        layers: number of the model's own layers.
        models: for each cache the number of its model; None if unknown.
    """
    own = next((models[name] for name in names if models.get(name) is not None), None)
    return frozenset(
        name
        for name in names
        if (own is not None and models.get(name) not in (None, own))
        or name.startswith("draft_model.")
        or index_of(name) >= layers
    )


def _identify(part: str, indices: Mapping[str, int]) -> dict[str, CacheId]:
    if len(set(indices.values())) == len(indices):
        label = f"{part}/attention"
        return {name: CacheId(index, label) for name, index in indices.items()}
    kinds = {name: _kind(name) for name in indices}
    order = sorted(set(kinds.values()))
    return {
        name: CacheId(index * len(order) + order.index(kinds[name]), f"{part}/{kinds[name]}")
        for name, index in indices.items()
    }


def _kind(name: str) -> str:
    """A name without its index."""
    return _INDEX.sub(".", name, count=1).strip(".")
