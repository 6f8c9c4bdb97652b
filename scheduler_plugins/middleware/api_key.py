# SPDX-License-Identifier: Apache-2.0
"""Checks vLLM's API key before vLLM does: a client without the key must learn nothing here."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence

from scheduler_plugins.middleware.asgi import Scope


def may_enter(scope: Scope) -> bool:
    """Whether vLLM's own key check, which runs after this middleware, will accept the request."""
    state = getattr(scope.get("app"), "state", None)
    given = getattr(getattr(state, "args", None), "api_key", None) or ()
    keys = [key for key in given or [os.environ.get("VLLM_API_KEY")] if key]
    if not keys:
        return True
    # If there are several such headers, vLLM reads the first.
    authorizations = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    scheme, _, token = (authorizations[0].decode("latin-1") if authorizations else "").partition(
        " "
    )
    return scheme.lower() == "bearer" and _is_one_of(token, keys)


def _is_one_of(token: str, keys: Sequence[str]) -> bool:
    """Compare in constant time, so that the time tells nothing about the keys."""
    sent = hashlib.sha256(token.encode()).digest()
    matches = [secrets.compare_digest(sent, hashlib.sha256(key.encode()).digest()) for key in keys]
    return any(matches)
