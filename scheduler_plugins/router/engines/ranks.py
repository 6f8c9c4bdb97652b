# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks behind one URL: which of them a request should go to."""

from __future__ import annotations

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
    """The call, for the rank that has most of the prompt cached; unchanged where that is of little use.

    Only for requests that one engine answers alone: the KV of a handoff comes from the one rank whose address is known.
    """
    prompt = request.hashes
    if len(engine.ranks) < 2 or engine.kind is not Kind.VLLM or not isinstance(prompt, PromptKeys):
        return call
    rank = prefixes.rank_with_most(prompt, engine, WORTH_TOKENS)
    if rank not in engine.ranks or HEADER in call.headers:
        return call
    headers = CIMultiDict(call.headers)
    headers[HEADER] = str(engine.ranks.index(rank))
    return replace(call, headers=headers)
