# SPDX-License-Identifier: Apache-2.0
"""Decides whether a stream can go on at another engine: its request must allow it, and its sent part must end with a
whole character."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.handoff.engine_bodies import has_inputs
from scheduler_plugins.router.handoff.prompt_ids import text_of
from scheduler_plugins.router.prompt.body import GENERATE, SAMPLING
from scheduler_plugins.router.prompt.transfer import why_not_disaggregated
from scheduler_plugins.router.request.client_request import ParsedRequest
from scheduler_plugins.router.request.resume import UNFINISHED_CHARACTER, AnswerRecord, StreamRecord
from scheduler_plugins.router.request.shared import Shared

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
    """The record of a stream of token ids (vLLM's `/inference/v1/generate`).

    Each event has the ids of its tokens, so the next request is the prompt with all ids that were sent, and none is
    generated again. The next engine's events get the identity of the first engine's events.
    """

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


# A second engine sees the sent tokens as a part of the prompt, so these fields would act differently there.
_NOT_RESUMABLE = (
    "seed",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_detection",  # looks at generated tokens, not at the prompt
    "tools",
    "functions",
    "response_format",
    "structured_outputs",
    "suffix",
    "logits_processors",
    "thinking_token_budget",
    "bad_words",
    "vllm_xargs",
    "extra_args",
    "trace_decode_token_ids",
)
_LOGPROBS = ("logprobs", "top_logprobs", "logprob_token_ids")
"""Those of texts count the text before them. Those of token ids stand for themselves."""
_ZERO_IS_ASKED_FOR = ("seed", "logprobs")


def record_of(parsed: ParsedRequest) -> AnswerRecord | None:
    """Notes the sent part of the request's stream; None if no other engine can go on with it."""
    ids = parsed.path == GENERATE and parsed.body.get("output_mode") != "text"
    if parsed.one_engine or not resumable(parsed.fields, but=_LOGPROBS if ids else ()):
        return None
    return (
        TokenRecord(parsed.body)
        if parsed.path == GENERATE
        else StreamRecord(parsed.body, parsed.path)
    )


def resumable(fields: Mapping[str, Any], but: Collection[str] = ()) -> bool:
    """Whether another engine can go on with this request's stream: greedy, or sampled without a seed.

    Args:
        fields: the request `as_completion`.
        but: fields that do not matter.
    """
    if not fields.get("stream") or why_not_disaggregated(fields) is not None:
        return False
    zeros = (type(fields.get(name)) is int for name in _ZERO_IS_ASKED_FOR if name not in but)
    if has_inputs(fields) or any(zeros):
        return False  # token ids stand for text only
    return not any(fields.get(name) for name in (*_NOT_RESUMABLE, *_LOGPROBS) if name not in but)


MOST_PARTS = 3
"""Most tokens of half a character: a whole character has at most four bytes."""


async def cut_to_whole_characters(
    record: AnswerRecord,
    engine: BackendEngine,
    shared: Shared,
    headers: Mapping[str, str],
    model: Any,
) -> bool:
    """Cut the record to whole characters. The text of a whole character was sent; the text of a half one was not.

    If a prompt ends with half a character, vLLM 0.32 repeats the whole prompt in its answer.

    Args:
        engine: an engine with the tokenizer.
        model: the model's name, as the client gave it.

    Returns:
        Whether the end could be determined.
    """
    tail = record.tail
    if not tail:
        return True
    try:
        for parts in range(min(MOST_PARTS + 1, len(tail))):
            ids = tail[: len(tail) - parts]
            text = await text_of(shared.connections, engine, ids, headers, shared.config, model)
            if not text.endswith(UNFINISHED_CHARACTER):
                record.keep_back(parts)
                return True
    except EngineFailedError:
        pass
    return False
