# SPDX-License-Identifier: Apache-2.0
"""Checks that an engine tokenizes as the model's files do, so it can be sent token ids.

With one token more or less, the ids differ and the answer is wrong, with status 200. So every special, added and
plain token is tried, once at each start of an engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.tokens.token_worker import Examined

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_UNKNOWN_IDS = 16
_SHOWN = 4

Ask = Callable[[BackendEngine, str, dict[str, Any]], Awaitable[object]]
"""Asks an engine at a path. Returns the decoded answer; `{}` for an error; None if the engine does not answer or
lacks the path."""


async def difference(ask: Ask, engine: BackendEngine, examined: Examined, model: str) -> str | None:
    """The first difference between an engine's tokens and the tokens of the model's files.

    Args:
        model: the model's name at the engine.

    Returns:
        The difference, for the log; empty: there is none; None: the engine does not answer.
    """
    for body, ours in examined.probes:
        theirs = tokens_in(await ask(engine, TOKENIZE, {**body, "model": model}))
        if theirs is None:
            return None
        if theirs != ours:
            return _first_difference(token_list(ours), token_list(theirs))
    first = examined.unknown_id
    ids = list(range(first, first + _UNKNOWN_IDS))
    answer = await ask(engine, DETOKENIZE, {"tokens": ids, "model": model})
    if answer is None:
        return None
    text = answer.get("prompt") if isinstance(answer, dict) else None
    if text:
        return (
            f"it has tokens from id {first} on ({str(text)[:40]!r}), and the files have none there"
        )
    return ""


def tokens_in(answer: object) -> bytes | None:
    """The tokens in an answer of `/tokenize`, as `index.hashes.token_bytes`; None: there are none."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    try:
        return token_bytes(tokens) if isinstance(tokens, list) else None
    except ValueError:
        return None


def _first_difference(ours: list[int], theirs: list[int]) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((n for n, (own, other) in pairs if own != other), min(len(ours), len(theirs)))
    their_ids, our_ids = theirs[at : at + _SHOWN], ours[at : at + _SHOWN]
    return f"it tokenizes a text as {their_ids}, and the model's files as {our_ids}"
