# SPDX-License-Identifier: Apache-2.0
"""The class of a request inside its id, for requests without another place for the class.

A generation carries its class in `vllm_xargs`. vLLM's pooling requests (embeddings, scores) have no such field. But the
id from the client or the middleware (`X-Request-Id`) is a part of the id that the engine sees.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

_MARK = "qos:"
_CLASS = re.compile(r"[^:]*?qos:([^:]*):")
"""The first mark counts, because the text behind it may come from the client."""


def with_class(request_id: str, qos: str) -> str:
    """The id with the name of a class in it. It is ASCII if `request_id` is ASCII."""
    return f"{_MARK}{quote(qos, safe='')}:{request_id}"


def without_class(request_id: str) -> str:
    """The original id, without the class of `with_class`."""
    return request_id.split(":", 2)[2] if request_id.startswith(_MARK) else request_id


def class_in(engine_id: str) -> str:
    """The class in the id of a request in the engine; "" if none. vLLM has extended the id at both ends."""
    match = _CLASS.match(engine_id)
    return unquote(match.group(1)) if match else ""
