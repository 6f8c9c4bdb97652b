# SPDX-License-Identifier: Apache-2.0
"""The class of a request inside its id, for requests that have no other place for it.

A generation carries its class in `vllm_xargs`. vLLM's pooling requests (embeddings, scores) take nothing
of the kind, but the id that the client or the middleware gives (`X-Request-Id`) is a part of the id that
the engine sees.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

_MARK = "qos:"
_CLASS = re.compile(r"[^:]*?qos:([^:]*):")
"""The first mark counts: what follows it may have come from the client."""


def with_class(request_id: str, qos: str) -> str:
    """The id with the name of a class in it; of ASCII characters if `request_id` is."""
    return f"{_MARK}{quote(qos, safe='')}:{request_id}"


def without_class(request_id: str) -> str:
    """The id that `with_class` was given."""
    return request_id.split(":", 2)[2] if request_id.startswith(_MARK) else request_id


def class_in(engine_id: str) -> str:
    """The class in the id of a request in the engine, which vLLM has added to at both ends; "" if none."""
    found = _CLASS.match(engine_id)
    return unquote(found.group(1)) if found else ""
