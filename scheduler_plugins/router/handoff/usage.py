# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt was cached, from the prefill engine's answer into the decode engine's.

A decode engine counts KV that was handed over as cached, so that a prompt which was computed a moment ago looks free. vLLM takes
the prefill engine's count where a proxy names it (`remote_prefill_cached_tokens`); here both engines are asked at once.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from scheduler_plugins.router.prompt.body import cached_tokens_in

DETAILS = b'"prompt_tokens_details"'
_DATA = b"data: "
_END = b"\n\n"


class PromptUsage(NamedTuple):
    """What an engine that computed a prompt found of it in its cache, and what it has cached of it since, in tokens; None: it does
    not tell."""

    cached: int | None = None
    created: int | None = None


def prompt_usage(answer: object) -> PromptUsage:
    """What a prefill engine's answer says: in its usage, in vLLM's parameters for proxies, or as SGLang's `/generate` does."""
    cached = cached_tokens_in(answer)
    for path in (
        ("kv_transfer_params", "remote_prefill_cached_tokens"),
        ("meta_info", "cached_tokens"),
    ):
        cached = _count(answer, *path) if cached is None else cached
    created = _count(answer, "usage", "prompt_tokens_details", "created_cache_tokens")
    return PromptUsage(cached, created)


class UsagePatch:
    """Puts it into an answer, whole or streamed. What it has put there once it may put there again."""

    def __init__(self, told: PromptUsage) -> None:
        """`told`: what is not known of it becomes null: the decode engine's own figure would be wrong."""
        self._told = told

    def whole(self, content: bytes) -> bytes:
        """A complete answer, or the data of one event."""
        try:
            answer = json.loads(content)
            usage = answer["usage"]
            details, tokens = usage["prompt_tokens_details"], int(usage["prompt_tokens"])
        except (ValueError, TypeError, LookupError, RecursionError):
            return content
        if not isinstance(details, dict):
            return content
        # A stream that goes on elsewhere has a longer prompt there than the client's.
        cached, created = (None if n is None else min(n, tokens) for n in self._told)
        details["cached_tokens"] = cached
        if "created_cache_tokens" in details:
            details["created_cache_tokens"] = created
        return json.dumps(answer, separators=(",", ":")).encode()

    def events(self, data: bytes) -> bytes:
        """Whole server-sent events, in order. Only those with such a count are changed."""
        return _END.join(map(self._event, data.split(_END)))

    def _event(self, event: bytes) -> bytes:
        if DETAILS not in event or not event.startswith(_DATA):
            return event
        return _DATA + self.whole(event[len(_DATA) :])


def _count(answer: object, *path: str) -> int | None:
    found: Any = answer
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if type(found) is int and found >= 0 else None
