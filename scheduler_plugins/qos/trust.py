# SPDX-License-Identifier: Apache-2.0
"""The class that the router gave a request, in a header that only the router can write.

Router and engines share one secret, in the variable `PD_ROUTER_KEY`. The router derives a key from the secret, and
signs the class together with the request's id, the time, and a number that it uses once. An engine with the secret
believes only that header, and each header once. An engine without the secret reads clients' headers.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Mapping
from hashlib import blake2b
from heapq import heappop, heappush
from hmac import compare_digest
from urllib.parse import quote, unquote

from pd_connector.config_rules import weakness
from pd_connector.control.keys import secret

logger = logging.getLogger(__name__)

HEADER = "X-PD-Class"
KEY_VARIABLE = "PD_ROUTER_KEY"
ADMIN_KEY_VARIABLE = "PD_ROUTER_ADMIN_KEY"
BELIEVED_S = 300.0
"""The largest difference between the clocks of router and engine. A signature older than this is invalid."""
_TELL_S = 60.0
MOST_SEEN = 100_000
"""Most signatures that are remembered. If more come within `BELIEVED_S`, the oldest are not believed any more."""


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


class Seen:
    """The signatures that an engine has accepted. Each is accepted once, so an eavesdropper cannot use a header again.
    Used by one thread."""

    def __init__(self) -> None:
        self._nonces: set[str] = set()
        self._by_time: list[tuple[int, str]] = []  # a heap
        self._forgotten_ms = 0
        """Signatures up to this time are forgotten, and not believed any more."""
        self._logged_s = -math.inf

    def first(self, at_ms: int, nonce: str, now_s: float) -> bool:
        """Whether this is the first time that a valid signature is seen."""
        if at_ms <= self._forgotten_ms or nonce in self._nonces:
            return False
        self._nonces.add(nonce)
        heappush(self._by_time, (at_ms, nonce))
        oldest_ms = (now_s - BELIEVED_S) * 1000
        while self._by_time[0][0] < oldest_ms or len(self._by_time) > MOST_SEEN:
            self._forgotten_ms, forgotten = heappop(self._by_time)
            self._nonces.discard(forgotten)
        return True

    def log_old(self, off_s: float) -> None:
        """Log, at most once a minute, that a valid signature is too old, and by how much."""
        now_s = time.monotonic()
        if now_s < self._logged_s + _TELL_S:
            return
        self._logged_s = now_s
        logger.warning(
            "%s: a router signed a class %.0f s %s, by the two clocks; not believed, so such requests are of the default "
            "class (at most %g s). Set both machines' clocks (NTP). Or somebody repeats an old header",
            *(HEADER, abs(off_s), "ago" if off_s > 0 else "in the future", BELIEVED_S),
        )


def signed(qos: str, request_id: str, key: bytes, now_s: float | None = None) -> str:
    """The header's value, for one request to one engine: time, a number used once, class, signature.

    Args:
        request_id: the request's `X-Request-Id`.
        key: from `class_key`.
        now_s: by the wall clock; None: now.
    """
    at = f"{(time.time() if now_s is None else now_s) * 1000:.0f}"
    nonce = secrets.token_hex(8)
    name = quote(qos, safe="")
    sent = request_id.encode("utf-8", "surrogateescape")
    return f"{at}.{nonce}.{name}.{_signature(at, nonce, name, sent, key)}"


def signed_class(
    headers: Mapping[str, str], key: bytes, seen: Seen, now_s: float | None = None
) -> str | None:
    """The class that the router gave; None if no router with this key gave a class to this request.

    Args:
        headers: the request's headers, names in lower case, values as ASGI servers decode them (Latin-1).
        seen: the signatures that were accepted before.
        now_s: by the wall clock; None: now.
    """
    at, _, rest = headers.get(HEADER.lower(), "").partition(".")
    nonce, _, rest = rest.partition(".")
    name, _, signature = rest.rpartition(".")
    request_id = headers.get("x-request-id", "").encode("latin-1", "replace")
    expected = _signature(at, nonce, name, request_id, key)
    if not key or not compare_digest(signature.encode(), expected.encode()):
        return None
    now_s = time.time() if now_s is None else now_s
    if abs(off_s := now_s - int(at) / 1000) > BELIEVED_S:
        seen.log_old(off_s)
        return None
    if not seen.first(int(at), nonce, now_s):
        return None
    return unquote(name)


def _signature(at: str, nonce: str, name: str, request_id: bytes, key: bytes) -> str:
    text = f"{at}\n{nonce}\n{name}\n".encode("utf-8", "replace") + request_id
    return blake2b(text, key=key, digest_size=16).hexdigest()
