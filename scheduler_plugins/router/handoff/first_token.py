# SPDX-License-Identifier: Apache-2.0
"""Moves the first token's log probabilities from the prefill engine's answer into the decode engine's.

An SGLang decode engine continues from the token that a vLLM prefill engine has chosen. vLLM does not give its connector
this token's log probability; only the completion's answer has it.
"""

import json
from typing import Any, NamedTuple

_DATA = b"data: "
_END = b"\n\n"


class FirstLogprobs(NamedTuple):
    """Log probabilities of the token that follows the prompt.

    Attributes:
        chosen: log probability of the chosen token.
        top: texts and log probabilities of the likeliest tokens, the likeliest first; as many as the request asks for.
    """

    chosen: float
    top: dict[str, float]


def first_logprobs(answer: object, count: int) -> FirstLogprobs | None:
    """The log probabilities in a completion of one token; None if it has none.

    Args:
        count: number of likeliest tokens that the request asks for. vLLM adds the chosen token if it is not among them.
    """
    try:
        logprobs = answer["choices"][0]["logprobs"]  # type: ignore[index]
        chosen = float(logprobs["token_logprobs"][0])
        top = dict((logprobs.get("top_logprobs") or [None])[0] or {})
        values = {str(token): float(value) for token, value in top.items()}
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    ranked = sorted(values.items(), key=lambda pair: pair[1], reverse=True)
    return FirstLogprobs(chosen, dict(ranked[:count]))


class FirstTokenPatch:
    """Puts the log probabilities into an answer, complete or streamed."""

    def __init__(self, logprobs: FirstLogprobs) -> None:
        self._logprobs = logprobs
        self.done = False
        """Whether the first token has come."""

    def whole(self, content: bytes) -> bytes:
        """Patch a complete answer. Content that is not a completion stays as it is."""
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            return content
        return _encoded(answer) if self._patch(answer) else content

    def events(self, data: bytes) -> bytes:
        """Patch complete server-sent events, in order. Only the event with the first token changes."""
        if self.done:
            return data
        return _END.join(self._event(event) for event in data.split(_END))

    def _event(self, event: bytes) -> bytes:
        if self.done or not event.startswith(_DATA):
            return event
        try:
            answer = json.loads(event[len(_DATA) :])
        except (ValueError, RecursionError):
            return event
        return _DATA + _encoded(answer) if self._patch(answer) else event

    def _patch(self, answer: Any) -> bool:
        """Put the log probabilities into this answer. Returns whether the first token was there."""
        try:
            logprobs = answer["choices"][0]["logprobs"]
        except (KeyError, IndexError, TypeError):
            return False
        if not isinstance(logprobs, dict):
            return False
        if logprobs.get("content"):
            self._patch_chat(logprobs["content"][0])
        elif logprobs.get("token_logprobs"):
            self._patch_completion(logprobs)
        else:
            return False
        self.done = True
        return True

    def _patch_chat(self, entry: dict[str, Any]) -> None:
        entry["logprob"] = self._logprobs.chosen
        if entry.get("top_logprobs"):
            entry["top_logprobs"] = [
                {"token": token, "bytes": list(token.encode()), "logprob": value}
                for token, value in self._logprobs.top.items()
            ]

    def _patch_completion(self, logprobs: dict[str, Any]) -> None:
        logprobs["token_logprobs"][0] = self._logprobs.chosen
        top = logprobs.get("top_logprobs")
        if top and top[0]:
            # Replace all entries. SGLang repeats one dummy token here, and equal texts are one key.
            top[0] = self._logprobs.top


def _encoded(answer: object) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()
