# SPDX-License-Identifier: Apache-2.0
"""The body of a request. It is read whole, decoded, and passed to the application in its new form."""

from __future__ import annotations

import json
from typing import Any

from scheduler_plugins.admission.endpoints import GENERATE
from scheduler_plugins.middleware.asgi import Message, Receive, Scope, headers_of
from scheduler_plugins.qos.settings import QOS_KEY


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


def decode_body(raw: bytes, path: str, *, in_body: bool) -> dict[str, Any] | None:
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
    return body if not in_body or _extras(body, path) is not None else None


def put_class(body: dict[str, Any], path: str, qos: str) -> None:
    """Write the class into a body from `decode_body`, where the scheduler finds it."""
    extras = {**(_extras(body, path) or {}), QOS_KEY: qos}
    if path == GENERATE:
        body["sampling_params"] = {**body["sampling_params"], "extra_args": extras}
    else:
        body["vllm_xargs"] = extras


def _extras(body: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The client's further arguments of sampling; None if there is no place for them."""
    if path == GENERATE:
        sampling = body.get("sampling_params")
        extras = (sampling.get("extra_args") or {}) if isinstance(sampling, dict) else None
    else:
        extras = body.get("vllm_xargs") or {}
    return extras if isinstance(extras, dict) else None


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
