# SPDX-License-Identifier: Apache-2.0
"""Streams that go on at another engine, after the one that answered was lost.

Engines return the token ids of prompt and answer (`return_token_ids`). The next request is a completion of both, and
its events get the shape and the identity of the first events. So the client sees one answer. If nothing of a chat was
sent yet, the chat is sent again unchanged.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.prompt.body import CHAT

_IDS = re.compile(rb',"(prompt_token_ids|token_ids)":(null|\[[0-9, ]*\])')
_TOKEN_IDS, _NO_PROMPT_IDS = b',"token_ids":[', b',"prompt_token_ids":null'
_END, _OTHER_END = b"\n\n", b"\r\n\r\n"
_TEXT = re.compile(rb'"(?:text|content)":"((?:[^"\\]|\\.)*)"')
_OTHER_DELTA = re.compile(rb'"(?:reasoning|reasoning_content|tool_calls)":(?!null|\[\]|"")')
UNFINISHED_CHARACTER = "�"
_UNFINISHED = (UNFINISHED_CHARACTER.encode(), b"\\ufffd", b"\\uFFFD")
_TAIL = 8
"""Number of last tokens that show whether the text ends with a whole character."""

_DONE_TO_THE_PROMPT = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
"""Fields that act when the text becomes tokens. They must not act on the ids a second time."""
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


class AnswerRecord(ABC):
    """The part of an answer's stream that the client got, and all that another engine needs to go on."""

    asks: ClassVar[Mapping[str, Any]] = {}
    """Fields to add to the request, so that the engine's events have token ids."""

    def __init__(self) -> None:
        self._sent: list[int] = []
        self._first: dict[str, Any] = {}  # fields that all events of the first engine share
        self._finished = self._usage_sent = False
        self._before = 0  # tokens that came before the current engine
        self.context_tokens = 0
        """Context length of the first engine (prompt and answer together); 0: not known."""
        self.resumed = 0
        """How often the stream went on elsewhere."""

    @abstractmethod
    def feed(self, events: bytes) -> bytes:
        """Note complete events of the engine. Returns the events for the client.

        Raises:
            EngineFailedError: the engine sends something that is not an event of such an answer.
        """

    @abstractmethod
    def next_body(self) -> dict[str, Any] | None:
        """The request for what follows the sent part; None if too little is known."""

    @abstractmethod
    def ending(self) -> bytes | None:
        """The events that an engine still owed if it was lost after its last token; None if it owed tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of the answer that have come."""
        return len(self._sent)

    @property
    def advanced(self) -> bool:
        """Whether tokens have come from the current engine."""
        return self.tokens > self._before

    @property
    def tail(self) -> list[int]:
        """The last tokens, if some of them may belong to half a character; else empty."""
        return []

    def keep_back(self, parts: int) -> None:  # noqa: B027 - without a `tail`, nothing is kept back
        """The last `parts` tokens belong to half a character, so they are generated again."""

    def resume(self) -> None:
        """From now on, events come from another engine that was sent `next_body`."""
        self._before = len(self._sent)
        self.resumed += 1

    def _usage_event(self, prompt_tokens: int) -> dict[str, Any]:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.tokens}
        usage["total_tokens"] = prompt_tokens + self.tokens
        return {**self._first, "choices": [], "usage": usage}


class StreamRecord(AnswerRecord):
    """The record of a completion's or a chat's stream."""

    asks: ClassVar[Mapping[str, Any]] = {"return_token_ids": True}

    def __init__(self, body: Mapping[str, Any], path: str) -> None:
        """`body`: the client's body; the request is `resumable` (`resumable.py`)."""
        super().__init__()
        self._body = dict(body)
        self._chat = path == CHAT
        self._text_mark = b'"content":"' if self._chat else b'"text":"'
        self._shows_ids = bool(body.get("return_token_ids"))
        self._prompt: bytes | None = None  # raw; parsed only if the stream breaks off
        self._unsettled: list[int] = []
        self._lost = False
        self._garbled = False  # the text ends with the mark for half a character
        self._several = False  # the last piece of text came with several tokens

    def feed(self, events: bytes) -> bytes:
        try:
            alone = events.find(_END) == len(events) - len(_END)
            if alone and (bare := self._plain(events)) is not None:
                return bare
            # Only events with vLLM's line ends can be split. Others would count as one event.
            self._lost = self._lost or _OTHER_END in events
            parts = events.split(_END)
            return _END.join(self._noted(part) if part else part for part in parts)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            self._lost = True  # these events were noted but not sent
            raise EngineFailedError(
                "malformed", "its events are not those of a completion"
            ) from None

    def next_body(self) -> dict[str, Any] | None:
        """The completion that goes on after the sent part, or the client's chat if nothing was sent yet. None if too
        little is known."""
        if self._prompt is None or self._lost or self._finished or not self._first:
            return None
        if self._garbled or (self._shows_ids and self._unsettled):
            return None  # the client would get the same part twice
        prompt = _ids(self._prompt)
        if prompt is None:
            return None
        if self._chat and not self._sent:
            # A parser may have held back tokens, such as the mark that begins the reasoning. Only a chat parses them.
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
        """The last tokens, if some of them may belong to half a character; else empty. An engine that sends several
        tokens together holds back the text of an incomplete character."""
        return self._sent[-_TAIL:] if self._several else []

    def keep_back(self, parts: int) -> None:
        if parts:
            self._unsettled = [*self._sent[-parts:], *self._unsettled]
            del self._sent[-parts:]
        self._several = False

    def ending(self) -> bytes | None:
        whole = self._most is not None and len(self._sent) >= self._most
        if not self._first or not (self._finished or whole):
            return None
        events = []
        if not self._finished:
            said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
            events.append({**self._first, "choices": [choice]})
        if (self._body.get("stream_options") or {}).get("include_usage") and not self._usage_sent:
            prompt = _ids(self._prompt) if self._prompt is not None else None
            if prompt is None or self._lost:
                return None
            events.append(self._usage_event(len(prompt)))
        data = (json.dumps(event, separators=(",", ":")) for event in events)
        return "".join(f"data: {item}\n\n" for item in (*data, "[DONE]")).encode()

    @property
    def _most(self) -> int | None:
        """Most tokens of the answer; None: not known.

        A chat without a limit ends with the context. A completion without a limit (or with `null`, in vLLM) ends
        after a few tokens. So a completion that goes on with a chat must name its limit.
        """
        most: int | None = self._body.get("max_tokens")
        if not self._chat:
            return _COMPLETIONS_DEFAULT if most is None else most
        most = self._body.get("max_completion_tokens") or most
        if most is None and self.context_tokens and self._prompt is not None:
            most = self.context_tokens - len(_ids(self._prompt) or ())
        return most

    def resume(self) -> None:
        super().resume()
        self._unsettled = []
        self._several = False

    def _plain(self, event: bytes) -> bytes | None:
        """As `_noted`, for an event with only tokens and text; None if the event may have more.

        It searches for fixed bytes, because regular expressions took half of the router's time per event. Quotes
        within a JSON string are escaped by a backslash, so the searched bytes never match inside the text.
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
        bare, ids = event, dict[bytes, bytes]()
        while match := _IDS.search(bare):
            ids.setdefault(match[1], match[2])
            bare = bare[: match.start()] + bare[match.end() :]
        if not self.resumed and ids.get(b"prompt_token_ids", b"null") != b"null":
            self._prompt = self._prompt or ids[b"prompt_token_ids"]
        if b"choices" in bare and not bare.startswith(b"data: [DONE]"):
            self._settle(bare, _ids(ids.get(b"token_ids", b"null")))
        if self.resumed:
            return self._as_first(event)
        if not self._first and bare.startswith(b"data: {"):
            self._first = _identity(bare)
        return event if self._shows_ids else bare

    def _settle(self, event: bytes, ids: list[int] | None) -> None:
        """Count the event's tokens as sent once their text is sent.

        An engine holds back the text of half a character. The next engine generates the tokens of that character
        again.
        """
        if (b'"reasoning' in event or b'"tool_calls"' in event) and _OTHER_DELTA.search(event):
            # Parsers of tool calls and of reasoning have a state that another engine lacks.
            self._lost = True
        text = _TEXT.search(event)
        said = text[1] if text else b""
        self._finished = self._finished or b'"finish_reason":"' in event
        self._usage_sent = self._usage_sent or (b'"choices":[]' in event and b'"usage":{' in event)
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
        """An event of another engine, in the form of the first engine's events."""
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
                choice["delta"].pop("role", None)  # sent already; some clients join all roles
        usage = content.get("usage")
        if isinstance(usage, dict):
            again = self._before
            usage["prompt_tokens"] = usage.get("prompt_tokens", again) - again
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + again
        return b"data: " + json.dumps(content, separators=(",", ":")).encode()


_COMPLETIONS_DEFAULT = 16
"""Tokens that a completion without a limit generates (OpenAI's and vLLM's default)."""
_IDS_DECODER = msgspec.json.Decoder(list[int] | None)


def _ids(text: bytes) -> list[int] | None:
    try:
        ids: list[int] | None = _IDS_DECODER.decode(text)
    except msgspec.MsgspecError:
        return None
    return ids


def _identity(event: bytes) -> dict[str, Any]:
    """The fields that all events of one answer share."""
    try:
        content = json.loads(event.removeprefix(b"data: "))
    except (ValueError, RecursionError):
        return {}
    return {
        name: content[name]
        for name in ("id", "object", "created", "model")
        if isinstance(content, dict) and name in content
    }
