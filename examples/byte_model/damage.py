# SPDX-License-Identifier: Apache-2.0
"""Spoil one page of a KV cache, as a faulty transfer would."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import DynamicCache

PAGE_TOKENS = 32
KINDS = ("zero", "stale", "displaced")

Layers = list[tuple[torch.Tensor, torch.Tensor]]  # per layer K and V: [row, kv head, token, dim]


class Damage(NamedTuple):
    kind: str  # "zero" | "stale": another prompt's KV | "displaced": the page before it, again
    page: int
    layer: int | None = None  # None: every layer
    head: int | None = None  # None: every KV head


def layers_of(cache: DynamicCache, tokens: int) -> Layers:
    """The first `tokens` positions of a cache."""
    return [(x.keys[:, :, :tokens], x.values[:, :, :tokens]) for x in cache.layers]


def cache_of(layers: Layers) -> DynamicCache:
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def spoil(layers: Layers, other: Layers, damage: Damage) -> Layers:
    """Return `layers` with one page replaced; `layers` itself is unchanged.

    Keys carry their position, so attention reads a prompt's KV as a set: exchanging two
    whole pages changes nothing. Every kind here changes the set ("displaced" needs a prompt
    of more than one page).

    `other` is what a stale page still holds: another prompt's KV, at least as many tokens.
    """
    first = damage.page * PAGE_TOKENS
    last = min(first + PAGE_TOKENS, layers[0][0].shape[2])
    spoilt = []
    for index, (pair, stale) in enumerate(zip(layers, other, strict=True)):
        if damage.layer in (None, index):
            pair = tuple(
                _spoil_tensor(x, y, damage, first, last) for x, y in zip(pair, stale, strict=True)
            )
        spoilt.append(pair)
    return spoilt


def _spoil_tensor(
    clean: torch.Tensor, stale: torch.Tensor, damage: Damage, first: int, last: int
) -> torch.Tensor:
    heads = slice(None) if damage.head is None else slice(damage.head, damage.head + 1)
    page = clean[:, heads, first:last]
    if damage.kind == "zero":
        page = torch.zeros_like(page)
    elif damage.kind == "stale":
        page = stale[:, heads, first:last]
    elif damage.kind == "displaced":
        page = clean.roll(PAGE_TOKENS, dims=2)[:, heads, first:last]
    else:
        raise ValueError(f"kind {damage.kind!r}: must be one of {', '.join(KINDS)}")
    spoilt = clean.clone()
    spoilt[:, heads, first:last] = page
    return spoilt
