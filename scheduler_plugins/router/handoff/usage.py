# SPDX-License-Identifier: Apache-2.0
"""Moves the count of cached prompt tokens from the prefill engine's answer into the decode engine's.

A decode engine counts KV from a handoff as cached, so a freshly computed prompt looks free. vLLM takes the prefill
engine's count from a proxy (`remote_prefill_cached_tokens`). That does not work here, because both engines are asked
at the same time.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

DETAILS = b'"prompt_tokens_details"'
_DATA = b"data: "
_END = b"\n\n"
_USAGE = b'"usage"'
"""Name of the field. Inside a text, the quotes would be escaped."""
_MOST_USAGE_BYTES = 16 << 10
_USAGE_DECODER = json.JSONDecoder()


class PromptUsage(NamedTuple):
    """For the engine that computed a prompt: tokens that it found in its cache, tokens that it has cached since, and all
    tokens of the prompt; None: not reported."""

    cached: int | None = None
    created: int | None = None
    tokens: int | None = None


def prompt_usage(answer: object) -> PromptUsage:
    """The counts in a prefill engine's answer: in its usage, in vLLM's parameters for proxies, or as in SGLang's
    `/generate`."""
    cached = None
    for path in (
        ("usage", "prompt_tokens_details", "cached_tokens"),
        ("kv_transfer_params", "remote_prefill_cached_tokens"),
        ("meta_info", "cached_tokens"),
    ):
        cached = _count(answer, *path) if cached is None else cached
    created = _count(answer, "usage", "prompt_tokens_details", "created_cache_tokens")
    tokens = _count(answer, "usage", "prompt_tokens")
    if tokens is None:
        tokens = _count(answer, "meta_info", "prompt_tokens")
    return PromptUsage(cached, created, tokens)


class UsagePatch:
    """Puts the counts into an answer, complete or streamed. Patching twice changes nothing more."""

    def __init__(self, usage: PromptUsage) -> None:
        """`usage`: the counts. An unknown count becomes null, because the decode engine's own count would be wrong."""
        self._usage = usage

    def whole(self, content: bytes) -> bytes:
        """Patch a complete answer, or the data of one event."""
        # Only the usage is parsed: log probabilities can make an answer very long.
        name = content.rfind(_USAGE)
        begin = content.find(b"{", name)
        try:
            text = content[begin : begin + _MOST_USAGE_BYTES].decode("utf-8", "replace")
            usage, length = _USAGE_DECODER.raw_decode(text if name >= 0 else "")
            details, tokens = usage["prompt_tokens_details"], int(usage["prompt_tokens"])
        except (ValueError, TypeError, LookupError, RecursionError):
            return content
        if not isinstance(details, dict):
            return content

        def at_most(count: int | None) -> int | None:
            # At a second engine, the prompt is longer than the client's prompt.
            return None if count is None else min(count, tokens)

        details["cached_tokens"] = at_most(self._usage.cached)
        if "created_cache_tokens" in details:
            details["created_cache_tokens"] = at_most(self._usage.created)
        end = begin + len(text[:length].encode())
        patched = json.dumps(usage, separators=(",", ":")).encode()
        return content[:begin] + patched + content[end:]

    def events(self, data: bytes) -> bytes:
        """Patch complete server-sent events, in order. Only events with such a count change."""
        return _END.join(map(self._event, data.split(_END)))

    def _event(self, event: bytes) -> bytes:
        if DETAILS not in event or not event.startswith(_DATA):
            return event
        return _DATA + self.whole(event[len(_DATA) :])


def _count(answer: object, *path: str) -> int | None:
    value: Any = answer
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and value >= 0 else None
