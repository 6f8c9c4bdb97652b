# SPDX-License-Identifier: Apache-2.0
"""What a policy is told of a client's request: read from its body and headers, and from its tokens if they are known."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from scheduler_plugins.admission.prompt import CHUNK_BYTES, PromptMemory, prompt_of
from scheduler_plugins.router.index.hashes import TOKEN_BYTES, prompt_extras
from scheduler_plugins.router.index.prefixes import PromptKeys
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.prompt.body import BadRequestError

SESSION_HEADER = "X-Session-Id"
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
"""Milliseconds after which the client does not want an answer any more."""
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
"""Tokens of a block: hashes stand for pieces of `CHUNK_BYTES` bytes of text."""
_MOST_DIGITS = 15
"""A number of milliseconds with more is no limit."""
_DEFAULT_MAX_TOKENS = 16
_MOST_TOKENS = 1 << 31
"""No answer has more; a client's number may be too large to be reckoned with."""


def timeout_s(headers: Mapping[str, str]) -> float:
    """Seconds that the client gives the request; infinite if it says nothing.

    Raises:
        BadRequestError: it says something else than a number of milliseconds.
    """
    told = headers.get(TIMEOUT_HEADER)
    if told is None:
        return inf
    if not told.isdecimal() or not told.strip("0"):
        raise BadRequestError(f"{TIMEOUT_HEADER} {told!r}: must be a number of milliseconds > 0")
    return inf if len(told) > _MOST_DIGITS else int(told) / 1e3


def describe(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    request_id: str,
    arrival_s: float,
    lengths: PromptMemory,
    tokens: bytes | None = None,
    adapter: str = "",
) -> Request:
    """The request as policies see it.

    Args:
        lengths: knows how many tokens a text has, by what engines said of earlier ones.
        tokens: the prompt's token ids (`index.hashes.token_bytes`); None: nobody has tokenized it.
        adapter: name of the LoRA adapter that it asks for.
    """
    prompt = prompt_of(body)
    salt = body.get("cache_salt")
    extras = prompt_extras(adapter, salt if isinstance(salt, str) else "")
    most = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_MAX_TOKENS
    user = body.get("user")
    return Request(
        id=request_id,
        tokens=lengths.tokens(prompt) if tokens is None else max(1, len(tokens) // TOKEN_BYTES),
        hashes=PromptKeys(prompt.chunks(), tokens, extras),
        max_tokens=max(1, min(most, _MOST_TOKENS)),
        arrival_s=arrival_s,
        deadline_s=arrival_s + timeout_s(headers),
        session=headers.get(SESSION_HEADER) or (user if isinstance(user, str) else ""),
    )
