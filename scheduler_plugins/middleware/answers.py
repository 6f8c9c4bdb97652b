# SPDX-License-Identifier: Apache-2.0
"""Answers to clients: the engine's answer, watched as it passes, or a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from scheduler_plugins.admission.gate import AdmissionGate, Ticket
from scheduler_plugins.middleware.asgi import Message, Send
from scheduler_plugins.qos.classes import Slo

_TAIL_BYTES = 512
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')


class Refusal(NamedTuple):
    """An answer that does not come from the engine."""

    status: int
    headers: Mapping[str, str]
    error: Mapping[str, Any]


def refusal(ticket: Ticket, slo: Slo) -> Refusal:
    """429, with the prediction, the promise, and what to do."""
    decision, prediction = ticket.decision, ticket.decision.prediction
    assert prediction is not None, "only a prediction refuses"
    ttft = decision.cause == "ttft"
    what = "the first token" if ttft else "a token"
    predicted_ms = (prediction.ttft_s if ttft else prediction.tpot_s) * 1e3
    promised_ms = slo.ttft_ms if ttft else slo.tpot_ms
    again_s = decision.retry_after_s
    error = {
        "message": f"Overloaded for class {ticket.qos!r}: {what} would take about "
        f"{predicted_ms:.0f} ms, the class is promised {promised_ms:g} ms. Nothing was computed. "
        f"Retry in {again_s} s, or send the request to another server.",
        "type": "rate_limit_exceeded",
        "param": None,
        "code": 429,
    }
    return Refusal(429, {"retry-after": str(again_s)}, error)


def too_large(limit_bytes: int) -> Refusal:
    """413 for a body above the limit."""
    error = {
        "message": f"The request body is larger than {limit_bytes >> 20} MiB: send less.",
        "type": "invalid_request_error",
        "param": None,
        "code": 413,
    }
    # The rest of the body is not read, so the connection cannot be used again.
    return Refusal(413, {"connection": "close"}, error)


async def respond(send: Send, what: Refusal) -> None:
    """Send it."""
    await respond_json(send, what.status, json.dumps({"error": what.error}).encode(), what.headers)


async def respond_json(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Send an answer of JSON."""
    sent = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Answer:
    """The engine's answer to one request on its way out. It tells the gate the times of tokens."""

    def __init__(
        self,
        gate: AdmissionGate,
        ticket: Ticket,
        send: Send,
        state: Mapping[str, Any],
        *,
        generates: bool = True,
    ) -> None:
        """Watch an answer.

        Args:
            state: the request's state (`scope["state"]`), in which vLLM leaves the usage.
            generates: False for embeddings and similar answers, which are complete with their last byte.
        """
        self._generates = generates
        self._tail = b""  # the end of an answer that generates nothing; it contains the usage
        self._gate = gate
        self._ticket = ticket
        self._send = send
        self._state = state
        self._ok = self._streamed = False
        self._first_s: float | None = None
        self._last_s: float | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on to the client."""
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message.get("headers", ()) if name == b"content-type"]
            self._ok = message["status"] == 200
            self._streamed = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body" and self._ok:
            self._body(message)
        await self._send(message)

    def ended(self) -> None:
        """Called when nothing more will come. If the answer was complete, learn from it."""
        self._gate.done(self._ticket)
        if not self._generates:
            self._pooled()
            return
        usage = getattr(self._state.get("request_metadata"), "final_usage_info", None)
        if self._first_s is None or self._last_s is None or usage is None:
            return
        more = (usage.completion_tokens or 0) - 1
        if not self._streamed:
            self._whole(more, self._last_s - self._ticket.arrived_s)
        elif more >= 1:
            self._gate.last_token(self._ticket, (self._last_s - self._first_s) / more)
        details = getattr(usage, "prompt_tokens_details", None)
        real = getattr(details, "cached_tokens", None)
        cached = None if real is None else (self._ticket.cached, real)
        self._gate.memory.answered(self._ticket.prompt, usage.prompt_tokens, cached)

    def _body(self, message: Message) -> None:
        part = message.get("body", b"")
        # Lines that begin with a colon keep the connection alive. They are not tokens.
        if self._first_s is None and part and not part.startswith(b":"):
            self._first_s = self._gate.now_s()
            self._gate.done(self._ticket)
            if self._streamed and self._generates:
                self._gate.first_token(self._ticket, self._first_s - self._ticket.arrived_s)
        if not self._generates:
            self._tail = (self._tail + part)[-_TAIL_BYTES:]
        if not message.get("more_body", False):
            self._last_s = self._gate.now_s()

    def _pooled(self) -> None:
        """Learn from an answer that generated nothing. It was ready when the prompt was computed."""
        if self._last_s is None:
            return
        self._gate.first_token(self._ticket, self._last_s - self._ticket.arrived_s)
        if match := _PROMPT_TOKENS.search(self._tail):
            self._gate.memory.answered(self._ticket.prompt, int(match.group(1)), None)

    def _whole(self, more: int, taken_s: float) -> None:
        """Learn from an answer in one piece, with `more` tokens after the first."""
        prediction = self._ticket.decision.prediction
        if prediction is None or more < 1:
            self._gate.first_token(self._ticket, taken_s)
            return
        # There is one time for prefill and decode together, so both are assumed to be off by the same factor.
        off = taken_s / (prediction.ttft_s + more * prediction.tpot_s)
        self._gate.first_token(self._ticket, off * prediction.ttft_s)
        self._gate.last_token(self._ticket, off * prediction.tpot_s)
