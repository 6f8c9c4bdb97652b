# SPDX-License-Identifier: Apache-2.0
"""Rules that send like requests to the same engine: `session`, `prefix_hash`, `cache_aware`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View, cached_tokens
from scheduler_plugins.router.policies.load_rules import LeastWork
from scheduler_plugins.router.policies.sides import Choice, Rule, least

REMEMBERED = 100_000
"""Most sessions that are remembered. The least recently used session is forgotten first."""


class Session(Rule):
    """Sends requests of one session to one engine, where their prefixes are cached.

    A new session and a request without one go to the engine with the least work. A session moves
    when its engine is gone.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        # Keyed by digest, because clients choose the length of session names.
        self._homes: OrderedDict[bytes, str] = OrderedDict()
        self._new = LeastWork()

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        if not request.session:
            return self._new.choose(request, engines, view, now_s, random)
        name = blake2b(request.session.encode(errors="surrogatepass"), digest_size=16).digest()
        home = self._homes.get(name)
        home_engine = next((engine for engine in engines if engine.name == home), None)
        choice = (
            Choice(home_engine)
            if home_engine
            else self._new.choose(request, engines, view, now_s, random)
        )
        self._homes[name] = choice.engine.name
        self._homes.move_to_end(name)
        if len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return choice


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


MATCH = 0.3
"""A cached prefix decides if it covers more than this part of the prompt."""
ABSOLUTE, RELATIVE = 64, 1.5
"""Load is out of balance if the busiest engine exceeds the idlest by both limits: `ABSOLUTE` more
open requests, and `RELATIVE` times as many."""


class CacheAware(Rule):
    """Chooses the longest cached prefix while load is in balance, else the fewest open requests.

    SGLang's and vLLM's routers have the same rule and thresholds (`cache_aware`, `--cache-threshold
    0.3 --balance-abs-threshold 64 --balance-rel-threshold 1.5`).
    """

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        loads = [engine.open_requests for engine in engines]
        low, high = min(loads), max(loads)
        if high - low <= ABSOLUTE or high <= RELATIVE * low:
            matches = view.match(request.hashes, engines)
            best = max(matches)
            # A prefix that all engines have cached, such as a system prompt, prefers none.
            able = [e for e, blocks in zip(engines, matches, strict=True) if blocks == best]
            if cached_tokens(request, able[0], best) > MATCH * request.tokens:
                engines = able
        return Choice(least(engines, lambda engine: engine.open_requests, random))
