# SPDX-License-Identifier: Apache-2.0
"""What of a request is tokenized, as a body for `/tokenize`."""

from collections.abc import Mapping
from typing import Any

MOST_CHARACTERS = 1 << 20
"""A longer prompt is not tokenized, because it would block the workers for seconds."""


_BESIDE_TOKENS = ("prompt_embeds", "features", "content_parts")
_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)


def tokenize_body(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body for `/tokenize` of a request `as_completion`; None for several prompts, images, or too much text."""
    if "messages" in body:
        messages = body["messages"]
        if not all(_plain(message) for message in messages):
            return None
        if sum(len(message["content"]) for message in messages) > MOST_CHARACTERS:
            return None
        return {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    prompt = body.get("prompt")
    if isinstance(prompt, list) and (not prompt or type(prompt[0]) is not int):
        return None
    if not isinstance(prompt, str | list) or any(body.get(name) for name in _BESIDE_TOKENS):
        return None
    if len(prompt) > MOST_CHARACTERS:
        return None
    return {"prompt": prompt, "add_special_tokens": body.get("add_special_tokens", True)}


def _plain(message: object) -> bool:
    """Whether a message has only text."""
    return isinstance(message, dict) and isinstance(message.get("content"), str)
