# SPDX-License-Identifier: Apache-2.0
"""What a policy is told of a client's request: read from its body and headers, without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_plugins.admission.prompt import CHUNK_BYTES, PromptMemory, prompt_of
from scheduler_plugins.router.policies.base import Request

SESSION_HEADER = "X-Session-Id"
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
"""Tokens of a block: hashes stand for pieces of `CHUNK_BYTES` bytes of text."""
_DEFAULT_MAX_TOKENS = 16


def describe(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    request_id: str,
    arrival_s: float,
    lengths: PromptMemory,
) -> Request:
    """The request as policies see it.

    Args:
        lengths: knows how many tokens a text has, by what engines said of earlier ones.
    """
    prompt = prompt_of(body)
    most = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_MAX_TOKENS
    user = body.get("user")
    return Request(
        id=request_id,
        tokens=lengths.tokens(prompt),
        hashes=tuple(prompt.chunks()),
        max_tokens=max(1, most),
        arrival_s=arrival_s,
        session=headers.get(SESSION_HEADER) or (user if isinstance(user, str) else ""),
    )
