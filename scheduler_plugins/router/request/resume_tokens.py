# SPDX-License-Identifier: Apache-2.0
"""Streams of token ids (vLLM's `/inference/v1/generate`) that go on at another engine.

Each event has the ids of its tokens, so the next request is the prompt with all ids that were sent. Its events get the
identity of the first engine's events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.prompt.body import SAMPLING
from scheduler_plugins.router.request.resume import UNFINISHED_CHARACTER, AnswerRecord

_DATA, _END = b"data: ", b"\n\n"
_OF_THE_WHOLE = ("routed_experts", "weight_versions")
"""Fields about the whole sequence. An engine that goes on knows only its own part."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice]
    request_id: str = ""
    output_mode: str = "tokens"
    usage: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_Event)


class TokenRecord(AnswerRecord):
    """The record of a stream of token ids. The client has all ids, so none is generated again."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """`body`: the client's body; the request is `resumable`."""
        super().__init__()
        self._body = body
        self._text = body.get("output_mode") == "text"
        self._cut = False  # the client's part does not end where another engine can begin

    def feed(self, events: bytes) -> bytes:
        try:
            return _END.join(map(self._noted, events.split(_END)))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            self._cut = True  # these events were noted but not sent
            raise EngineFailedError(
                "malformed", f"its events are not those of token ids: {error}"
            ) from None

    def next_body(self) -> dict[str, Any] | None:
        most = self._most
        if self._finished or self._cut or not self._first or most is None:
            return None
        if most <= len(self._sent):
            return None
        sampling = {**self._body[SAMPLING], "max_tokens": most - len(self._sent)}
        ids = [*self._body["token_ids"], *self._sent]
        return {**self._body, "token_ids": ids, SAMPLING: sampling}

    def ending(self) -> bytes | None:
        whole = self._most is not None and len(self._sent) >= self._most
        if not self._first or self._cut or not (self._finished or whole):
            return None
        events = []
        if not self._finished:
            choice = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": []}
            said = {"text": ""} if self._text else {}
            events.append({**self._first, "choices": [{**choice, **said, "logprobs": None}]})
        if (self._body.get("stream_options") or {}).get("include_usage") and not self._usage_sent:
            events.append(self._usage_event(len(self._body["token_ids"])))
        data = (*map(msgspec.json.encode, events), b"[DONE]")
        return b"".join(_DATA + item + _END for item in data)

    @property
    def _most(self) -> int | None:
        """Most tokens of the answer; None: not known. Without a limit the answer ends with the context."""
        most: int | None = self._body[SAMPLING].get("max_tokens")
        if most is None and self.context_tokens:
            most = self.context_tokens - len(self._body["token_ids"])
        return most

    def _noted(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        data = event[len(_DATA) :]
        if data.startswith(b'{"error"'):
            return event
        decoded = _DECODER.decode(data)
        if not self._first:
            self._first = {"request_id": decoded.request_id, "output_mode": decoded.output_mode}
        for choice in decoded.choices:
            self._note(choice)
        self._usage_sent = self._usage_sent or not (
            decoded.choices or bytes(decoded.usage) == b"null"
        )
        return self._as_first(data) if self.resumed else event

    def _note(self, choice: _Choice) -> None:
        ids = choice.token_ids or []
        self._sent += ids
        self._finished = self._finished or choice.finish_reason is not None
        if self._text:
            text = choice.text or ""
            # Only a single token's text shows where its character ends.
            whole = len(ids) == 1 and text and not text.endswith(UNFINISHED_CHARACTER)
            self._cut = not whole and (bool(ids) or self._cut)

    def _as_first(self, data: bytes) -> bytes:
        """An event of another engine, in the form of the first engine's events."""
        content = msgspec.json.decode(data)
        content["request_id"] = self._first["request_id"]
        for name in ("prompt_token_ids", "mm_placeholders"):
            content.pop(name, None)
        for choice in content["choices"]:
            choice.update({name: None for name in _OF_THE_WHOLE if name in choice})
        usage = content.get("usage")
        if isinstance(usage, dict):
            usage["prompt_tokens"] -= self._before
            usage["completion_tokens"] += self._before
        return _DATA + msgspec.json.encode(content)
