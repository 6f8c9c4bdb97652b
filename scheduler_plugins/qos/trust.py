# SPDX-License-Identifier: Apache-2.0
"""The class that the router gave a request, in a header that only the router can write.

Router and engines share one secret, in the variable `PD_ROUTER_KEY`. The router derives a key from the secret, and
signs the class together with the request's id and the time. An engine with the secret believes only that header. An
engine without the secret reads clients' headers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from urllib.parse import quote, unquote

from pd_connector.config import weakness
from pd_connector.control.keys import secret

HEADER = "X-PD-Class"
KEY_VARIABLE = "PD_ROUTER_KEY"
ADMIN_KEY_VARIABLE = "PD_ROUTER_ADMIN_KEY"
BELIEVED_S = 300.0
"""The largest difference between the clocks of router and engine. A signature older than this is invalid."""


def shared_key() -> str:
    """The secret in this process's environment; empty: there is none. Raises ValueError: the secret could be
    guessed."""
    return checked_key(KEY_VARIABLE, os.environ.get(KEY_VARIABLE, ""))


def checked_key(name: str, given: str) -> str:
    """The secret without its line end. Raises ValueError: the secret could be guessed."""
    key = given.strip()
    if key and (weak := weakness(key)):
        raise ValueError(
            f"{name}: a key {weak}. It could be guessed; `pd-connector key` makes a strong key"
        )
    return key


def class_key(shared: str) -> bytes:
    """The key that signs classes, derived from the shared secret; empty if there is none."""
    return secret(shared, b"pd-router-class") if shared else b""


def signed(qos: str, request_id: str, key: bytes, now_s: float | None = None) -> str:
    """The header's value: time, class, signature.

    Args:
        request_id: the request's `X-Request-Id`.
        key: from `class_key`.
        now_s: by the wall clock; None: now.
    """
    at = f"{time.time() if now_s is None else now_s:.0f}"
    name = quote(qos, safe="")
    sent = request_id.encode("utf-8", "surrogateescape")
    return f"{at}.{name}.{_signature(at, name, sent, key)}"


def signed_class(headers: Mapping[str, str], key: bytes, now_s: float | None = None) -> str | None:
    """The class that the router gave; None if no router with this key gave a class.

    Args:
        headers: the request's headers, names in lower case, values as ASGI servers decode them (Latin-1).
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
    return blake2b(text, key=key, digest_size=16).hexdigest()
