# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks behind one URL: which of them a request should go to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from multidict import CIMultiDict

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import EngineCall
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.index.prefixes import PrefixReader, PromptKeys
from scheduler_plugins.router.policies.base import Request

HEADER = "X-data-parallel-rank"
"""By which vLLM's completions and chats are sent to a rank, counted among the ranks of that API server."""
WORTH_TOKENS = 256
"""A rank must have so many tokens of the prompt more than any other. With less to gain the engine's own balancing is better."""


def for_rank(
    call: EngineCall, engine: BackendEngine, request: Request, prefixes: PrefixReader
) -> EngineCall:
    """The call of a request that one engine answers alone, for the rank that has most of the prompt cached; unchanged
    where that is of little use."""
    if engine.kind is not Kind.VLLM or HEADER in call.headers:
        return call
    rank = _with_most(engine, request, prefixes)
    return call if rank is None else sent_to(call, rank)


def rank_of_prefill(
    engine: BackendEngine, request: Request, prefixes: PrefixReader, headers: Mapping[str, str]
) -> int | None:
    """Which of a vLLM engine's ranks computes a prompt for another engine, as a place among its addresses: the decode
    engine must be told before. The one that the client names; else that has most of the prompt cached; else that has least to do.
    None where the engine has one rank, or is SGLang's.
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
    """The call, for this rank among those of the engine's URL."""
    headers = CIMultiDict(call.headers)
    headers[HEADER] = str(rank)
    return replace(call, headers=headers)


def _with_most(engine: BackendEngine, request: Request, prefixes: PrefixReader) -> int | None:
    """The rank that has most of the prompt cached, among those of the engine's URL; None where that is of little use."""
    prompt = request.hashes
    if len(engine.ranks) < 2 or not isinstance(prompt, PromptKeys):
        return None
    rank = prefixes.rank_with_most(prompt, engine, WORTH_TOKENS)
    return engine.ranks.index(rank) if rank in engine.ranks else None
