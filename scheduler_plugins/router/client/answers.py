# SPDX-License-Identifier: Apache-2.0
"""The router's own part of answers to clients: errors in OpenAI's format, headers, stream framing."""

import json
import re
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Any

from multidict import CIMultiDict

from scheduler_plugins.qos.trust import HEADER as CLASS_HEADER

REQUEST_ID = "X-Request-Id"
LONGEST_RETRY_S = 3600

# RFC 9110 section 7.6.1: headers that belong to one connection, not to the message.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The router writes a new, uncompressed body for each side. The other headers concern client and router only.
NOT_FORWARDED = HOP_BY_HOP | {
    "accept-encoding",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    CLASS_HEADER.lower(),  # only the router sets it
}
SGLANG_OVERRIDES = "x-override-"
"""Prefix of headers by which SGLang replaces a body's field, such as the room or the prefill engine's host. Only the
router sets those."""
# The last are orders to browsers about the engine's own origin. The client knows only the router's.
NOT_RETURNED = HOP_BY_HOP | {
    "content-encoding",
    "content-length",
    "alt-svc",
    "clear-site-data",
    "set-cookie",
    "strict-transport-security",
    "timing-allow-origin",
}
_CORS = "access-control-"
"""How the names of headers begin that tell browsers which pages may read an answer. Only the router sends them."""

EVENT_STREAM = "text/event-stream"
UNBUFFERED = {"X-Accel-Buffering": "no"}
"""Header of streams: nginx passes each event on at once. By default it collects 4 KiB first."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_END = max(map(len, EVENT_ENDS))
MOST_EVENT_BYTES = 64 << 20
"""Most bytes of one event. Log probabilities of a long prompt take a few MiB."""
_ERROR = b'data: {"error"'
_ROLE = rb'"delta":\s*\{"role":\s*"\w+",\s*"content":\s*""\}[^\n]*"finish_reason":\s*null'
NOTHING = re.compile(rb'(data: (\{[^\n]*("choices":\s*\[\]|' + _ROLE + rb")[^\n]*\}|\[DONE\])\s*)*")
"""Events of a stream that say nothing: the role that begins a chat, the usage, and the end mark."""
ABORTED = b'"finish_reason":"abort"'
"""Marks an answer that an engine ended early, as vLLM does when it is stopped. Inside a text, the quotes would be
escaped."""


def error_body(
    message: str, kind: str, code: int, param: str | None = None, **more: Any
) -> dict[str, Any]:
    """An error in the format of OpenAI and vLLM. `more` adds fields to the usual ones."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def error_event(message: str) -> bytes:
    """The last event of a stream that cannot go on."""
    text = json.dumps(error_body(message, "stream_interrupted", 502))
    return f"data: {text}\n\n".encode()


def error_in(events: bytes) -> tuple[int, str] | None:
    """Status and message of a stream's first event, if that event is the engine's own error; else None. SGLang
    answers a stream with 200 before it knows whether the request succeeds."""
    first, _, _ = events.partition(b"\n\n")
    if not first.startswith(_ERROR):
        return None
    try:
        error = json.loads(first.removeprefix(b"data: "))["error"]
        code, message = error["code"], str(error["message"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return (code, message) if isinstance(code, int) and code >= 500 else None


def before_error(events: bytes) -> tuple[bytes, tuple[int, str] | None]:
    """The events before the engine's own error, and the error's status and message. Without an error: all events, and
    None. vLLM ends its streams with an error when its core has died."""
    at = events.find(_ERROR)
    while at >= 0:
        if (not at or events[at - 1 : at] == b"\n") and (error := error_in(events[at:])):
            return events[:at], error
        at = events.find(_ERROR, at + 1)
    return events, None


def before_abort(events: bytes, said: bool = True) -> tuple[bytes, bool]:
    """The events before an abort, with which an engine ends its answer early, and whether there is an abort.

    Args:
        said: whether more than `NOTHING` has come in this stream. If vLLM aborts an answer before its first token, its
            stream has only `NOTHING`.
    """
    at = events.find(ABORTED)
    if at < 0 and not said and events.rstrip().endswith(b"[DONE]"):
        at = 0
    if at < 0:
        return events, False
    end = events.rfind(b"\n\n", 0, at)
    return events[: end + 2] if end >= 0 else b"", True


def headers_to_engine(headers: Iterable[tuple[str, str]], request_id: str) -> CIMultiDict[str]:
    """The client's headers as both engines get them, including authorization."""
    own = [(n, v) for n, v in headers if not n.lower().startswith(SGLANG_OVERRIDES)]
    sent = _without(own, NOT_FORWARDED)
    sent[REQUEST_ID] = request_id
    sent["Content-Type"] = "application/json"
    sent["Accept-Encoding"] = "identity"
    return sent


def headers_to_client(headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    said = [(name, value) for name, value in headers.items() if not name.lower().startswith(_CORS)]
    returned = _without(said, NOT_RETURNED)
    returned.setdefault(REQUEST_ID, request_id)
    if returned.get("Content-Type", "").startswith(EVENT_STREAM):
        returned.update(UNBUFFERED)
    return returned


def retry_after_s(headers: Mapping[str, str]) -> int:
    """Seconds of an engine's `Retry-After`; at least 1."""
    value = headers.get("Retry-After", "").strip()
    try:
        left_s = int(value) if value.isdecimal() else _until(value)
    except (ValueError, OverflowError):
        return 1  # neither a number nor a date, or too large
    return max(1, min(left_s, LONGEST_RETRY_S))


def _until(date: str) -> int:
    return ceil(parsedate_to_datetime(date).timestamp() - time.time())


def _without(headers: Iterable[tuple[str, str]], left_out: frozenset[str]) -> CIMultiDict[str]:
    pairs = list(headers)
    named = {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for token in value.split(",")
    }
    return CIMultiDict((n, v) for n, v in pairs if n.lower() not in left_out | named)


class EventCutter:
    """Passes only complete server-sent events, so an error event can follow at any time.

    The bytes stay unchanged: the joined results of `feed` are a prefix of its joined inputs.
    """

    def __init__(self) -> None:
        self.finished = False
        """Whether the last complete event was the end mark `data: [DONE]`."""
        self._held = bytearray()  # grows in place: an event may come in thousands of pieces

    def feed(self, chunk: bytes) -> bytes:
        """The events that `chunk` completes; empty if it completes none."""
        if not self._held and chunk.endswith(b"\n\n"):  # the common case
            self._look_for_end(chunk)
            return chunk
        held = self._held
        first = max(0, len(held) - _LONGEST_END + 1)  # no event ends before
        held += chunk
        ends = [at + len(mark) for mark in EVENT_ENDS if (at := held.rfind(mark, first)) >= 0]
        if not ends:
            return b""
        whole = bytes(held[: max(ends)])
        del held[: max(ends)]
        self._look_for_end(whole)
        return whole

    @property
    def held(self) -> bytes:
        """The start of an incomplete event."""
        return bytes(self._held)

    @property
    def overlong(self) -> bool:
        """Whether an event is too long to be one."""
        return len(self._held) > MOST_EVENT_BYTES

    def rest(self) -> bytes:
        """The rest at the end of the stream; not empty only if it is an end mark without its blank line."""
        self._look_for_end(self.held)
        return self.held if self.finished else b""

    def _look_for_end(self, data: bytes) -> None:
        tail = data[-40:].rstrip()
        if tail or data.strip():
            self.finished = tail.endswith(b"[DONE]")
