# SPDX-License-Identifier: Apache-2.0
"""Whether what an engine sent is an answer at all.

A proxy's page, an empty object or an error with status 200 comes fast. If it counted as an answer, that engine would
look fastest and get nearly all requests.
"""

from __future__ import annotations

import asyncio
import json
import re
from codecs import getincrementaldecoder
from typing import Any

import msgspec

from scheduler_plugins.router.engines.exchange import OVERLOADED
from scheduler_plugins.router.engines.failures import (
    EXCERPT_BYTES,
    EngineFailedError,
    OverloadedError,
)

PARSED_BYTES = 1 << 20
"""An answer or event of at most this size is parsed at once, which takes a few milliseconds. Only the form of a longer one is
checked, because the parser would hold the event loop, in any thread."""
_DATA, _END = b"data: ", b"\n\n"
_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\{')


class _Object(msgspec.Struct):
    """Any JSON object."""


class _Completion(msgspec.Struct):
    choices: list[_Object]


class _Event(msgspec.Struct):
    choices: list[_Object] | msgspec.UnsetType = msgspec.UNSET
    error: Any = msgspec.UNSET


class _Code(msgspec.Struct):
    code: int


class _Error(msgspec.Struct):
    error: _Code


_COMPLETION = msgspec.json.Decoder(_Completion)
_EVENT = msgspec.json.Decoder(_Event)
_OBJECT = msgspec.json.Decoder(_Object)
_ANY = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])
_ERROR = msgspec.json.Decoder(_Error)


async def status_of(status: int, kind: str, content: bytes, *, completes: bool) -> int:
    """Check an answer of status 2xx that is not streamed. Returns its real status: if the body is an
    error about the client's request, that error's status.

    Args:
        kind: its `Content-Type`.
        completes: whether it must be a completion. Otherwise it can be any object or list, or bytes of another type.

    Raises:
        EngineFailedError: it is not an answer.
    """
    expected = "200 and an object with choices" if completes else "200 and a JSON object or list"
    is_text = kind.startswith("text/") or "json" in kind or not kind
    if status == 200 and content and not (completes or is_text):
        return status
    fits = status == 200 and await _is_utf8(content)
    if fits and len(content) > PARSED_BYTES:
        fits = _has_form(content, completes=completes)
    elif fits:
        fits = _fits(_COMPLETION if completes else _ANY, content)
    if fits:
        return status
    said = " ".join(content[:EXCERPT_BYTES].decode("utf-8", "replace").split())
    code = _code_in(content) if status == 200 else 0
    if code in OVERLOADED:
        raise OverloadedError(code, said, 1)
    if 400 <= code < 500:
        return code
    cause = f"status_{code}" if code >= 500 else "malformed"
    raise EngineFailedError(cause, f"it answered {status} (wanted: {expected}): {said}")


def good_events(events: bytes, *, completes: bool) -> bytes:
    """The complete server-sent events up to the first malformed one.

    Args:
        completes: whether each must be an event of a completion. Otherwise its data can be any JSON object.
    """
    if not _is_text(events):
        return b""
    if b"\r" in events:  # rare, and looked at together
        return events if _is_good(events.replace(b"\r\n", b"\n"), completes=completes) else b""
    if events.count(_END) == 1 and events.endswith(_END):  # the common case
        return events if _is_good(events, completes=completes) else b""
    at = 0
    while at < len(events):
        end = events.find(_END, at) + len(_END)
        end = end if end >= at + len(_END) else len(events)
        if not _is_good(events[at:end], completes=completes):
            return events[:at]
        at = end
    return events


def _is_good(event: bytes, *, completes: bool) -> bool:
    """Whether each of these events has the data of an answer's event. An event without data is a comment, which is
    good, too."""
    form = _EVENT if completes else _OBJECT
    if event.startswith(_DATA) and event.count(b"\n") == len(_END):
        data = event[len(_DATA) :]
        if len(data) > PARSED_BYTES:
            return data.startswith(b"{") and data.rstrip().endswith(b"}")
        return data.startswith(b"[DONE]") or _fits(form, data)
    for block in event.split(_END):
        lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines).strip()
        if lines and data != b"[DONE]" and not _fits(form, data):
            return False
    return True


def _fits(form: msgspec.json.Decoder[Any], content: bytes) -> bool:
    try:
        value = form.decode(content)
    except msgspec.ValidationError:
        return False
    except (ValueError, RecursionError):
        try:  # Python's own parser reads NaN, which engines may write
            value = msgspec.convert(json.loads(content), form.type)
        except (ValueError, RecursionError):
            return False
    if form is _EVENT:
        return value.choices is not msgspec.UNSET or value.error is not msgspec.UNSET
    if form is _ANY:
        return isinstance(value, list) or bool(value.keys() - {"error"})
    return form is _OBJECT or bool(value.choices)


def _code_in(content: bytes) -> int:
    """The status in an answer that is only an error; 0: there is none."""
    try:
        return _ERROR.decode(content[:PARSED_BYTES]).error.code
    except (ValueError, RecursionError):
        return 0


def _has_form(content: bytes, *, completes: bool) -> bool:
    stripped = content.strip()
    if completes:
        form = stripped.startswith(b"{") and stripped.endswith(b"}")
        return form and _CHOICES.search(content) is not None
    return (stripped[:1], stripped[-1:]) in ((b"{", b"}"), (b"[", b"]"))


def _is_text(content: bytes) -> bool:
    if content.isascii():
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


async def _is_utf8(content: bytes) -> bool:
    """Whether the bytes are UTF-8. Others have a turn between pieces."""
    if len(content) <= PARSED_BYTES:
        return _is_text(content)
    decoder = getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(content), PARSED_BYTES):
            decoder.decode(content[at : at + PARSED_BYTES], final=at + PARSED_BYTES >= len(content))
            await asyncio.sleep(0)
    except UnicodeDecodeError:
        return False
    return True
