# SPDX-License-Identifier: Apache-2.0
"""How long a prompt takes at an engine that has a part of it cached, or can fetch a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import (
    EngineView,
    PrefixSource,
    Request,
    View,
    cached_tokens,
)

Prefill = tuple[float, PrefixSource | None]
"""Seconds that a prompt takes at an engine, and the source of a fetched prefix (None: no fetch)."""
NOTHING: Prefill = (0.0, None)
Matches = Iterable[tuple[PrefixSource, int]]
"""Engines or pools, and the blocks of a prompt that each has."""


def prefills(
    request: Request, engines: Sequence[EngineView], view: View, costs: Mapping[str, CostModel]
) -> dict[str, Prefill]:
    """By engine: its prefill, with what it has cached itself and what KV pools have.

    Args:
        costs: by engine.
    """
    pools = pool_matches(request, view)
    return {
        engine.name: prefill(
            request,
            engine,
            costs[engine.name],
            cached_tokens(request, engine, blocks),
            pools,
            view,
        )
        for engine, blocks in zip(engines, view.match(request.hashes, engines), strict=True)
    }


def pool_matches(request: Request, view: View) -> list[tuple[PrefixSource, int]]:
    """The KV pools, and the blocks of the prompt that each has."""
    pools = view.pools()
    return list(zip(pools, view.match(request.hashes, pools), strict=True)) if pools else []


def prefill(
    request: Request,
    engine: EngineView,
    costs: CostModel,
    own: int,
    others: Matches,
    view: View,
    threshold: float = 1.0,
) -> Prefill:
    """The fastest way for an engine to compute a prompt.

    Args:
        costs: costs of the engine.
        own: tokens of the prompt that the engine has cached.
        others: sources that it can fetch from.
        threshold: factor. The engine fetches only from a source with more than `threshold` times
            its own cached tokens.
    """
    best_s = costs.prefill_s(request.tokens, own)
    pull_from: PrefixSource | None = None
    for other, there in others:
        most = cached_tokens(request, other, there)
        if own * threshold < most:  # in tokens: a pool has blocks of another size
            pulled_s = view.transfer_s(other, engine, most - own)
            pulled_s += costs.prefill_s(request.tokens, most)
            if pulled_s < best_s:
                best_s, pull_from = pulled_s, other
    return best_s, pull_from
