# SPDX-License-Identifier: Apache-2.0
"""The body of a request. It is read whole, decoded, and passed to the application in its new form."""

from __future__ import annotations

import json
from typing import Any

from scheduler_plugins.middleware.asgi import Message, Receive, Scope, headers_of


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes | None:
    """The whole body; None if it is larger than `most_bytes`. If the client disconnects, the body ends there."""
    claimed = headers_of(scope).get("content-length", "")
    if claimed.isdecimal() and int(claimed) > most_bytes:
        return None
    parts, size_bytes = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > most_bytes:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def decode_body(raw: bytes, *, in_body: bool) -> dict[str, Any] | None:
    """The body, decoded like FastAPI does; None if the class cannot be written into it.

    The engine refuses such a body too, so no client can avoid its class with one.

    Args:
        in_body: whether the class is written into the body. Endpoints without `vllm_xargs` would accept any value
            there.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return body if not in_body or isinstance(body.get("vllm_xargs") or {}, dict) else None


def with_length(scope: Scope, length: int) -> Scope:
    dropped = (b"content-length", b"transfer-encoding")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in dropped]
    # The dictionary `state` is created here, so the copy and the original share it.
    scope.setdefault("state", {})
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def replayed(raw: bytes, receive: Receive) -> Receive:
    """Gives the body once, then the client's later messages, such as its disconnect."""
    waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
