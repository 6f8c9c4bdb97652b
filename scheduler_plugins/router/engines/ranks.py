# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks behind one URL: chooses the rank for a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from multidict import CIMultiDict

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import EngineCall
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.policies.base import Request

HEADER = "X-data-parallel-rank"
"""vLLM's header that sends a completion or chat to a rank. Ranks count among the ranks of one API server."""
WORTH_TOKENS = 256
"""A rank is chosen if it has this many more prompt tokens cached than any other. Otherwise the engine's own balancing
is better."""


def for_rank(
    call: EngineCall, engine: BackendEngine, request: Request, prefixes: Prefixes
) -> EngineCall:
    """The call of a request that one engine answers alone, sent to the rank with most of the prompt cached. The call
    is unchanged if that gains too little."""
    if engine.kind is not Kind.VLLM or HEADER in call.headers:
        return call
    rank = _with_most(engine, request, prefixes)
    return call if rank is None else sent_to(call, rank)


def rank_of_prefill(
    engine: BackendEngine, request: Request, prefixes: Prefixes, headers: Mapping[str, str]
) -> int | None:
    """The rank of a vLLM engine that computes a prompt for another engine, as an index in its addresses. The decode
    engine must know the rank in advance. Order: the rank that the client names, the rank with most of the prompt
    cached, the rank with the least work. None if the engine has one rank, or is SGLang.
    """
    if len(engine.addresses) < 2 or engine.kind is Kind.SGLANG:
        return None
    ranks = range(len(engine.addresses))
    named = headers.get(HEADER, "")
    if named.isascii() and named.isdecimal() and int(named) in ranks:
        return int(named)
    cached = _with_most(engine, request, prefixes)
    if cached is not None and cached in ranks:
        return cached
    under_way = Counter(engine.copies.values())
    return min(ranks, key=lambda rank: (under_way[rank], engine.copies_sent[rank]))


def sent_to(call: EngineCall, rank: int) -> EngineCall:
    """The call, sent to this rank of the engine's URL."""
    headers = CIMultiDict(call.headers)
    headers[HEADER] = str(rank)
    return replace(call, headers=headers)


def _with_most(engine: BackendEngine, request: Request, prefixes: Prefixes) -> int | None:
    """The rank of the engine's URL with most of the prompt cached; None if it gains too little."""
    prompt = request.hashes
    if len(engine.ranks) < 2 or not isinstance(prompt, PromptKeys):
        return None
    rank = prefixes.rank_with_most(prompt, engine, WORTH_TOKENS)
    return engine.ranks.index(rank) if rank in engine.ranks else None
