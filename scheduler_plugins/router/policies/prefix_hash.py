# SPDX-License-Identifier: Apache-2.0
"""`prefix_hash`: a consistent hash of the prompt's beginning, with bounded load."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.sides import Choice, Rule

BLOCKS = 2
"""Blocks of the prompt that are hashed. The first block alone is often a system prompt that all
requests share."""
LOAD_BOUND = 1.25
"""No engine gets more than this many times the mean of open requests."""


class PrefixHash(Rule):
    """Sends prompts with the same beginning to the same engine. Engines that join or leave move few
    prompts.

    Every engine draws a number for the prompt (rendezvous hashing); the largest wins. An engine
    that has more than 1.25 times the mean of open requests is skipped (Mirrokni, Thorup,
    Zadimoghaddam: consistent hashing with bounded loads). The rule has no state, so any number of
    routers agree.
    """

    def __init__(self, blocks: int = BLOCKS, load_bound: float = LOAD_BOUND) -> None:
        self._blocks = blocks
        self._load_bound = load_bound

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        total = 1 + sum(engine.open_requests for engine in engines)
        bound = ceil(self._load_bound * total / len(engines))
        able = [engine for engine in engines if engine.open_requests < bound]
        key = repr(request.hashes[: self._blocks][-1:] or request.id).encode()
        return Choice(max(able, key=lambda engine: _drawn(key, engine.name)))


def _drawn(key: bytes, name: str) -> bytes:
    return blake2b(key, digest_size=8, key=blake2b(name.encode(), digest_size=32).digest()).digest()
