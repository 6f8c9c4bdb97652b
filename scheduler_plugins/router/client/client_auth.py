# SPDX-License-Identifier: Apache-2.0
"""Access of clients to the router, and the client headers that engines get."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.router.client.answers import REQUEST_ID, headers_to_engine
from scheduler_plugins.router.prompt.body import GENERATE, ONE_ENGINE
from scheduler_plugins.router.settings.config import RouterConfig

ANTHROPICS = "X-Api-Key"
"""Header in which clients of `/v1/messages` send their key by default."""

MOST_ID_CHARACTERS = 256
VERSION = "/version"
FOR_OPERATORS = ("/", "/live", "/health", "/metrics")
"""Endpoints whose answers name engines."""


def needs_key(path: str) -> bool:
    """Whether an endpoint requires the clients' key, if one is set."""
    return path.startswith("/v1/") or path in (*ONE_ENGINE, GENERATE, VERSION)


def may_enter(request: web.Request, key: str) -> bool:
    """Whether a client sent the key; always True if `key` is empty."""
    if not key:
        return True
    given = request.headers.get("Authorization") or f"Bearer {request.headers.get(ANTHROPICS, '')}"
    hashed = sha256(given.encode("utf-8", "replace")).digest()
    return compare_digest(hashed, sha256(f"Bearer {key}".encode()).digest())


def id_of(request: web.Request, body: Mapping[str, Any] | None = None) -> str:
    """The request id that the client sent, in its header or else as `request_id` of its body (as vLLM reads it), or a
    new one.

    The id appears in logs of the router and of engines. So line breaks are escaped, and a long id is cut.
    """
    given = request.headers.get(REQUEST_ID) or (body or {}).get("request_id")
    given = given[:MOST_ID_CHARACTERS] if isinstance(given, str) else ""
    shown = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in given)
    return shown[:MOST_ID_CHARACTERS] or uuid.uuid4().hex


def passed_headers(request: web.Request, request_id: str, config: RouterConfig) -> CIMultiDict[str]:
    """A request's headers as engines get them. The router's client key is removed."""
    headers = headers_to_engine(request.headers.items(), request_id)
    if config.client_key:
        headers.popall("Authorization", None)
        headers.popall(ANTHROPICS, None)
        if config.api_key:
            headers["Authorization"] = f"Bearer {config.api_key}"
    return headers
