# SPDX-License-Identifier: Apache-2.0
"""Streams that go on at another engine, after the one that answered was lost.

Engines are asked for the ids of prompt and answer (`return_token_ids`). The request that goes on is a completion of both,
and its events are given the shape and the identity of the first ones. The client sees one answer. A chat of which nothing was
said yet is asked for once more as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from scheduler_plugins.router.engines.exchange import EngineFailedError
from scheduler_plugins.router.prompt.body import CHAT

_IDS = re.compile(rb',"(prompt_token_ids|token_ids)":(null|\[[0-9, ]*\])')
_TOKEN_IDS, _NO_PROMPT_IDS = b',"token_ids":[', b',"prompt_token_ids":null'
_END, _OTHER_END = b"\n\n", b"\r\n\r\n"
_TEXT = re.compile(rb'"(?:text|content)":"((?:[^"\\]|\\.)*)"')
_OTHER_DELTA = re.compile(rb'"(?:reasoning|reasoning_content|tool_calls)":(?!null|\[\]|"")')
UNFINISHED_CHARACTER = "�"
_UNFINISHED = (UNFINISHED_CHARACTER.encode(), b"\\ufffd", b"\\uFFFD")
_TAIL = 8
"""Last tokens that tell whether the text ends with a whole character."""

_DONE_TO_THE_PROMPT = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
"""Fields that made the prompt's tokens of its text. The ids of the rest are not to be treated so again."""
_ONLY_IN_CHATS = frozenset(
    {
        "messages",
        "max_completion_tokens",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "include_reasoning",
        "documents",
        "mm_processor_kwargs",
    }
)


class StreamRecord:
    """What a client has been sent of one stream, and what it takes to go on."""

    def __init__(self, body: Mapping[str, Any], path: str) -> None:
        """`body`: the client's, of a request that is `resumable` (`resumable.py`)."""
        self._body = dict(body)
        self._chat = path == CHAT
        self._text_mark = b'"content":"' if self._chat else b'"text":"'
        self._shows_ids = bool(body.get("return_token_ids"))
        self._prompt: bytes | None = None  # as it was sent: read only if the stream breaks off
        self._sent: list[int] = []
        self._unsettled: list[int] = []
        self._first: dict[str, Any] = {}
        self._lost = False
        self._garbled = False  # the text ends with what stands for half a character
        self._several = False  # the last text came with several tokens
        self._finished = False
        self._told_usage = False
        self._before = 0  # tokens that were sent before the engine that answers now
        self.context_tokens = 0
        """Most tokens of prompt and answer together at the engine that began; 0: not known."""
        self.resumed = 0
        """How often the stream went on elsewhere."""

    @property
    def asks(self) -> dict[str, Any]:
        """What is added to the request, so that the engine tells the ids."""
        return {"return_token_ids": True}

    def feed(self, events: bytes) -> bytes:
        """Note whole events of the engine. Returns what the client is sent instead of them.

        Raises:
            EngineFailedError: an engine that goes on for another one sends something else than a completion.
        """
        try:
            alone = events.find(_END) == len(events) - len(_END)
            if alone and (bare := self._plain(events)) is not None:
                return bare
            # Only events that end as vLLM's do are told apart: others would be counted as one.
            self._lost = self._lost or _OTHER_END in events
            parts = events.split(_END)
            return _END.join(self._noted(part) if part else part for part in parts)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            self._lost = True  # what was noted just now has not been sent
            raise EngineFailedError("malformed", "its events are no completion's") from None

    def next_body(self) -> dict[str, Any] | None:
        """The completion that goes on after what was sent, or the client's chat if nothing was said yet; None if that is not
        known well enough."""
        if self._prompt is None or self._lost or self._finished or not self._first:
            return None
        if self._garbled or (self._shows_ids and self._unsettled):
            return None  # the client would be sent the same twice
        prompt = _ids(self._prompt)
        if prompt is None:
            return None
        if self._chat and not self._sent:
            # A parser may have kept back what came, such as the mark that begins the reasoning: only a chat parses it.
            return dict(self._body)
        most = self._most
        if most is None or most <= len(self._sent):
            return None
        body = {name: value for name, value in self._body.items() if name not in _ONLY_IN_CHATS}
        body["prompt"] = [*prompt, *self._sent]
        body["max_tokens"] = most - len(self._sent)
        for name in _DONE_TO_THE_PROMPT:
            body.pop(name, None)
        return body

    @property
    def tokens(self) -> int:
        """Tokens of the answer that have come."""
        return len(self._sent) + len(self._unsettled)

    @property
    def tail(self) -> list[int]:
        """The last tokens, if some of them may be of half a character: an engine that sends several together keeps
        back the text of those at their end. Else empty."""
        return self._sent[-_TAIL:] if self._several else []

    def keep_back(self, parts: int) -> None:
        """The last `parts` tokens are of half a character: they are generated again."""
        if parts:
            self._unsettled = [*self._sent[-parts:], *self._unsettled]
            del self._sent[-parts:]
        self._several = False

    def ending(self) -> bytes | None:
        """The events that an engine still owed when it was lost after its last token; None where it owed tokens."""
        whole = self._most is not None and len(self._sent) >= self._most
        if not self._first or not (self._finished or whole):
            return None
        events = []
        if not self._finished:
            said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
            events.append({**self._first, "choices": [choice]})
        if (self._body.get("stream_options") or {}).get("include_usage") and not self._told_usage:
            prompt = _ids(self._prompt) if self._prompt is not None else None
            if prompt is None or self._lost:
                return None
            usage = {"prompt_tokens": len(prompt), "completion_tokens": self.tokens}
            usage["total_tokens"] = len(prompt) + self.tokens
            events.append({**self._first, "choices": [], "usage": usage})
        data = (json.dumps(event, separators=(",", ":")) for event in events)
        return "".join(f"data: {one}\n\n" for one in (*data, "[DONE]")).encode()

    @property
    def _most(self) -> int | None:
        """Most tokens of the answer; None: that is not known.

        A chat that names no limit ends with the context. A completion without one ends after a few tokens, in vLLM also
        where it says `null`, so the one that goes on for a chat has to name what is left.
        """
        most: int | None = self._body.get("max_tokens")
        if not self._chat:
            return _COMPLETIONS_DEFAULT if most is None else most
        most = self._body.get("max_completion_tokens") or most
        if most is None and self.context_tokens and self._prompt is not None:
            most = self.context_tokens - len(_ids(self._prompt) or ())
        return most

    def resume(self) -> None:
        """Events come from another engine from now on: it was sent `next_body`."""
        self._unsettled = []
        self._several = False
        self._before = len(self._sent)
        self.resumed += 1

    def _plain(self, event: bytes) -> bytes | None:
        """As `_noted`, for an event that tells of tokens and of text and of nothing else; None where it may be another one.

        A few searches for fixed bytes: regular expressions took half of the router's time for an event. Quotes within a JSON string have a
        backslash before them, so none of these can be found in the text itself.
        """
        if self.resumed or self._shows_ids or self._unsettled or not self._first:
            return None
        at, said = event.find(_TOKEN_IDS), event.find(self._text_mark)
        if (
            at < 0
            or said < 0
            or event.startswith(b'"', said + len(self._text_mark))
            or b'"finish_reason":"' in event
            or b'"reasoning' in event
            or b'"tool_calls"' in event
            or _UNFINISHED[0] in event
            or _UNFINISHED[1] in event
            or _UNFINISHED[2] in event
        ):
            return None
        end = event.find(b"]", at) + 1
        bare = event[:at] + event[end:]
        if b'token_ids"' in bare:
            bare = bare.replace(_NO_PROMPT_IDS, b"", 1)
        ids = _ids(event[at + len(_TOKEN_IDS) - 1 : end])
        if ids is None or b'token_ids"' in bare:
            return None
        self._sent += ids
        self._garbled, self._several = False, len(ids) > 1
        return bare

    def _noted(self, event: bytes) -> bytes:
        bare, found = event, dict[bytes, bytes]()
        while match := _IDS.search(bare):
            found.setdefault(match[1], match[2])
            bare = bare[: match.start()] + bare[match.end() :]
        if not self.resumed and found.get(b"prompt_token_ids", b"null") != b"null":
            self._prompt = self._prompt or found[b"prompt_token_ids"]
        if b"choices" in bare and not bare.startswith(b"data: [DONE]"):
            self._settle(bare, _ids(found.get(b"token_ids", b"null")))
        if self.resumed:
            return self._as_first(event)
        if not self._first and bare.startswith(b"data: {"):
            self._first = _identity(bare)
        return event if self._shows_ids else bare

    def _settle(self, event: bytes, ids: list[int] | None) -> None:
        """Count the event's tokens as sent, once their text is.

        An engine keeps back the text of half a character. Its tokens are generated again by the next engine.
        """
        if (b'"reasoning' in event or b'"tool_calls"' in event) and _OTHER_DELTA.search(event):
            # Parsers of calls and of reasoning have a state that no other engine has.
            self._lost = True
        text = _TEXT.search(event)
        said = text[1] if text else b""
        self._finished = self._finished or b'"finish_reason":"' in event
        self._told_usage = self._told_usage or (b'"choices":[]' in event and b'"usage":{' in event)
        if ids is None:
            self._lost = self._lost or bool(said)
            return
        self._unsettled += ids
        if said:
            self._sent += self._unsettled
            self._unsettled = []
            self._garbled = said.endswith(_UNFINISHED)
            self._several = len(ids) > 1

    def _as_first(self, event: bytes) -> bytes:
        """An event of another engine, as the first engine would have sent it."""
        if not event.startswith(b"data: {"):
            return event
        content = json.loads(event.removeprefix(b"data: "))
        content.update(self._first)
        content.pop("prompt_token_ids", None)
        for choice in content.get("choices", ()):
            choice.pop("prompt_token_ids", None)
            if not self._shows_ids:
                choice.pop("token_ids", None)
            if self._chat and "delta" not in choice:
                choice["delta"] = {"content": choice.pop("text", "")}
            elif self._chat:
                choice["delta"].pop("role", None)  # the client has it; some join what they get
        usage = content.get("usage")
        if isinstance(usage, dict):
            again = self._before
            usage["prompt_tokens"] = usage.get("prompt_tokens", again) - again
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + again
        return b"data: " + json.dumps(content, separators=(",", ":")).encode()


_COMPLETIONS_DEFAULT = 16
"""Tokens that a completion generates if it does not say how many (OpenAI's default, and vLLM's)."""
_IDS_DECODER = msgspec.json.Decoder(list[int] | None)


def _ids(text: bytes) -> list[int] | None:
    try:
        found: list[int] | None = _IDS_DECODER.decode(text)
    except msgspec.MsgspecError:
        return None
    return found


def _identity(event: bytes) -> dict[str, Any]:
    """What all events of one answer have in common."""
    try:
        content = json.loads(event.removeprefix(b"data: "))
    except (ValueError, RecursionError):
        return {}
    return {
        name: content[name]
        for name in ("id", "object", "created", "model")
        if isinstance(content, dict) and name in content
    }
