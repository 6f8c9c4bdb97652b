# SPDX-License-Identifier: Apache-2.0
"""Makes the `Request` for policies from a client's body and headers, and from its tokens if they are known."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from scheduler_plugins.admission.prompt import CHUNK_BYTES, PromptMemory, prompt_of
from scheduler_plugins.router.index.hashes import TOKEN_BYTES, prompt_extras
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.prompt.body import BadRequestError

SESSION_HEADER = "X-Session-Id"
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
"""Header with the milliseconds after which the client no longer wants an answer."""
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
"""Approximate tokens of one text block: a hash covers `CHUNK_BYTES` bytes of text."""
_MOST_DIGITS = 15
"""A number of milliseconds with more digits counts as no limit."""
_DEFAULT_MAX_TOKENS = 16
_MOST_TOKENS = 1 << 31
"""Cap on a client's `max_tokens`. No answer is longer, and a huge number would spoil sums."""


def timeout_s(headers: Mapping[str, str]) -> float:
    """The client's time limit for the request, in seconds; infinite if it sets none.

    Raises:
        BadRequestError: the header is not a number of milliseconds.
    """
    value = headers.get(TIMEOUT_HEADER)
    if value is None:
        return inf
    if not value.isdecimal() or not value.strip("0"):
        raise BadRequestError(f"{TIMEOUT_HEADER} {value!r}: must be a number of milliseconds > 0")
    return inf if len(value) > _MOST_DIGITS else int(value) / 1e3


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
        lengths: estimates the tokens of a text from counts that engines reported earlier.
        tokens: the prompt's token ids (`index.hashes.token_bytes`); None: it is not tokenized.
        adapter: name of the LoRA adapter that the request asks for.
    """
    prompt = prompt_of(body)
    salt = body.get("cache_salt")
    extras = prompt_extras(adapter, salt if isinstance(salt, str) else "")
    most = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_MAX_TOKENS
    user = body.get("user")
    return Request(
        id=request_id,
        tokens=lengths.tokens(prompt) if tokens is None else max(1, len(tokens) // TOKEN_BYTES),
        hashes=PromptKeys(
            prompt.chunks(),
            tokens,
            extras,
            None if adapter else salt if isinstance(salt, str) else "",
        ),
        max_tokens=max(1, min(most, _MOST_TOKENS)),
        arrival_s=arrival_s,
        deadline_s=arrival_s + timeout_s(headers),
        session=headers.get(SESSION_HEADER) or (user if isinstance(user, str) else ""),
    )
