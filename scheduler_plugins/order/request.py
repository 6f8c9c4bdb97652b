# SPDX-License-Identifier: Apache-2.0
"""A waiting request, as far as policies and the queue look at it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BlockHash = Hashable


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Waiting:
    """What the queue knows of a request. Two are the same if they are the same object."""

    id: str
    tokens: int
    """Tokens to have in the cache before the next one can be generated."""
    block_hashes: Sequence[BlockHash]
    """One for each full block, in order; each stands for the whole prompt up to the end of its
    block, as vLLM's do: equal hashes mean equal prefixes."""
    arrival_s: float
    """When it came, by any clock that all requests share."""
    qos: str = ""
    """Name of its class; any unknown name means the default class."""
    max_tokens: int = 16
    """Most tokens it may generate."""
    priority: int = 0
    """vLLM's: smaller goes first. Only the policy `priority` reads it."""
    loaded: int = 0
    """Leading tokens whose KV another engine sends: they cost nothing here."""
