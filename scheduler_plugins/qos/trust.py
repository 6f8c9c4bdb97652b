# SPDX-License-Identifier: Apache-2.0
"""The class that the router gave a request, in a header that nobody else can write.

Router and engines have one key, in the variable `PD_ROUTER_KEY`. The router signs the class together with the request's id
and the time. An engine with the key believes that header and no other; without the key it reads clients' headers as before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from urllib.parse import quote, unquote

HEADER = "X-PD-Class"
KEY_VARIABLE = "PD_ROUTER_KEY"
BELIEVED_S = 300.0
"""Clocks of router and engine may differ by this much, and nobody can use a signature after it."""


def router_key() -> bytes:
    """The key of this process's environment; empty: there is none."""
    return os.environ.get(KEY_VARIABLE, "").encode()


def signed(qos: str, request_id: str, key: bytes, now_s: float | None = None) -> str:
    """The header's value: time, class, signature.

    Args:
        request_id: the request's `X-Request-Id`.
        now_s: by the wall clock; None: now.
    """
    at = f"{time.time() if now_s is None else now_s:.0f}"
    name = quote(qos, safe="")
    sent = request_id.encode("utf-8", "surrogateescape")
    return f"{at}.{name}.{_signature(at, name, sent, key)}"


def signed_class(headers: Mapping[str, str], key: bytes, now_s: float | None = None) -> str | None:
    """The class that the router gave; None: no router with this key gave one.

    Args:
        headers: of the request, names in lower case, values as ASGI servers decode them (Latin-1).
        now_s: by the wall clock; None: now.
    """
    at, _, rest = headers.get(HEADER.lower(), "").partition(".")
    name, _, signature = rest.rpartition(".")
    request_id = headers.get("x-request-id", "").encode("latin-1", "replace")
    wanted = _signature(at, name, request_id, key)
    if not key or not compare_digest(signature.encode(), wanted.encode()):
        return None
    late_s = (time.time() if now_s is None else now_s) - float(at)
    return unquote(name) if abs(late_s) <= BELIEVED_S else None


def _signature(at: str, name: str, request_id: bytes, key: bytes) -> str:
    text = f"{at}\n{name}\n".encode("utf-8", "replace") + request_id
    return blake2b(text, key=blake2b(key).digest(), digest_size=16).hexdigest()
