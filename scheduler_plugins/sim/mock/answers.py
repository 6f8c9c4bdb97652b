# SPDX-License-Identifier: Apache-2.0
"""Answers of a mock engine, in the form of OpenAI and vLLM. Every token is the text " word"."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_plugins.admission.endpoints import GENERATE as GENERATE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"
WORD = 1
"""The id of every generated token."""


def answer(
    body: Mapping[str, Any],
    path: str,
    tokens: int,
    usage: Mapping[str, Any],
    params: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A whole answer of `tokens` tokens. `params`: its `kv_transfer_params`."""
    text, choice = " word" * tokens, {"index": 0, "finish_reason": "length"}
    said: dict[str, Any] = {"text": text}
    if path == CHAT:
        said = {"message": {"role": "assistant", "content": text}}
    elif path == GENERATE:
        said = {"token_ids": [WORD] * tokens}
    return {
        **_head(body, path, f"cmpl-{uuid.uuid4().hex}"),
        "choices": [{**choice, **said}],
        "usage": usage,
        "kv_transfer_params": params,
    }


def event(
    body: Mapping[str, Any], path: str, name: str, prompt: Sequence[int] | None, *, last: bool
) -> bytes:
    """One token of a stream. `prompt`: its ids, for the first one."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    if path == GENERATE:
        return _sent({**_head(body, path, name), "choices": [{**choice, "token_ids": [WORD]}]})
    choice |= {"delta": {"content": " word"}} if path == CHAT else {"text": " word"}
    content = {**_head(body, path, name), "choices": [choice]}
    if body.get("return_token_ids"):
        choice["token_ids"] = [WORD]
        if prompt is not None:
            (content if path == CHAT else choice)["prompt_token_ids"] = prompt
    return _sent(content)


def usage_event(body: Mapping[str, Any], path: str, name: str, usage: Mapping[str, Any]) -> bytes:
    """The chunk before the end mark, with `stream_options.include_usage`."""
    return _sent({**_head(body, path, name), "choices": [], "usage": usage})


def usage_of(prompt_tokens: int, tokens: int, cached: int) -> dict[str, Any]:
    """The field `usage`; as vLLM's with `--enable-prompt-tokens-details`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _head(body: Mapping[str, Any], path: str, name: str) -> dict[str, Any]:
    if path == GENERATE:
        return {"request_id": name, "model": body.get("model")}
    kind = "chat.completion" if path == CHAT else "text_completion"
    kind += ".chunk" if path == CHAT and body.get("stream") else ""
    return {"id": name, "object": kind, "created": int(time.time()), "model": body.get("model")}


def _sent(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
