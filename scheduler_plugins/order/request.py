# SPDX-License-Identifier: Apache-2.0
"""A waiting request, with the attributes that policies and the queue use."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BlockHash = Hashable


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Waiting:
    """A request as the queue knows it. Equality is identity."""

    id: str
    tokens: int
    """Tokens that must be in the cache before the next token can be generated."""
    block_hashes: Sequence[BlockHash]
    """One hash per full block, in order. As in vLLM, a hash stands for the whole prompt up to the end of its block:
    equal hashes mean equal prefixes."""
    arrival_s: float
    """Time of arrival, by any clock that all requests share."""
    qos: str = ""
    """Name of its class; any unknown name means the default class."""
    max_tokens: int = 16
    """The most tokens that the request may generate."""
    priority: int = 0
    """vLLM's priority: smaller goes first. Only the policy `priority` reads it."""
    loaded: int = 0
    """Leading tokens whose KV another engine sends. They cost nothing here."""
