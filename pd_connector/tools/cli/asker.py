# SPDX-License-Identifier: Apache-2.0
"""Asks engines the same prompt in every way, and compares the answers.

Every prompt is sent three times, each time with a cache salt of its own, so that no prefix cache helps. First
through the router (time to first token, bytes, descriptors). Then in the two steps of a simpler proxy, which
shows the handoff from outside. Last to the prefill engine alone: its answer is the reference, computed without
disaggregation.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch import Client, Samples

DECODED_TOKENS = 32
METRICS_DEADLINE_S = 20.0


class DemoError(PDConnectorError):
    """The engines run, but do not do what the demo should show."""


class StreamedAnswer(NamedTuple):
    """One streamed answer."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    first_token_s: float  # request sent -> first token streamed


class PromptResult(NamedTuple):
    """The figures shown for one prompt."""

    prompt_tokens: int
    first_token_s: float
    handoff_s: float
    wire_bytes: int
    descriptors: int
    difference: float  # largest logprob difference from the reference; infinite if tokens differ


class Asker:
    """Sends prompts in all three ways, and compares the answers."""

    def __init__(self, prefill: Client, decode: Client, router: Client) -> None:
        self._prefill = prefill
        self._decode = decode
        self._router = router
        self._model = prefill.model()

    def warm_up(self) -> None:
        """Send one request each way, so that no shown request is an engine's first."""
        self.ask("Once upon a time")

    def ask(self, prompt: str) -> PromptResult:
        """Send this prompt in all three ways.

        Raises:
            DemoError: the decode engine got no KV, and computed the prompt itself.
        """
        before = self._decode.metrics()
        routed = self._stream(self._router, prompt)
        moved = wait_for_transfer(self._decode, before)
        stepped = self._two_steps(prompt)
        alone = self._stream(self._prefill, prompt)
        return PromptResult(
            routed.prompt_tokens,
            routed.first_token_s,
            stepped.first_token_s,
            int(moved.total("pd_connector:received_bytes_total")),
            int(moved.total("pd_connector:received_chunks_total")),
            max(difference(reply, alone) for reply in (routed, stepped)),
        )

    def _two_steps(self, prompt: str) -> StreamedAnswer:
        """Prefill, then decode: the time of the decode engine's first token is the handoff."""
        extra: dict[str, Any] = {"cache_salt": uuid.uuid4().hex}
        body = {**self._body(prompt, extra), "max_tokens": 1}
        body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        params = self._prefill.post("/v1/completions", body).get("kv_transfer_params")
        if not params:
            raise DemoError("the prefill engine answered without kv_transfer_params")
        return self._stream(self._decode, prompt, extra | {"kv_transfer_params": params})

    def _stream(
        self, client: Client, prompt: str, extra: Mapping[str, Any] | None = None
    ) -> StreamedAnswer:
        body = self._body(prompt, extra or {"cache_salt": uuid.uuid4().hex})
        body["stream_options"] = {"include_usage": True}
        tokens: list[str] = []
        logprobs: list[float] = []
        prompt_tokens, first_s = 0, math.nan
        sent = time.perf_counter()
        for event in client.stream("/v1/completions", body):
            if "error" in event:
                raise DemoError(f"{client.base_url} answered with an error: {event['error']}")
            for choice in event["choices"]:
                if not tokens:
                    first_s = time.perf_counter() - sent
                tokens += choice["logprobs"]["tokens"]
                logprobs += choice["logprobs"]["token_logprobs"]
            if event.get("usage"):
                prompt_tokens = int(event["usage"]["prompt_tokens"])
        return StreamedAnswer(tuple(tokens), tuple(logprobs), prompt_tokens, first_s)

    def _body(self, prompt: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": DECODED_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            **extra,
        }


def wait_for_transfer(decode: Client, before: Samples) -> Samples:
    """The growth of a decode engine's metrics, once they show the transfer. Raises DemoError."""
    deadline = time.monotonic() + METRICS_DEADLINE_S
    while True:
        grown = decode.metrics().since(before)
        if grown.total("pd_connector:received_transfers_total"):
            return grown
        if time.monotonic() > deadline:
            raise DemoError(
                "the decode engine received no KV; its failure counters: " + failures(grown)
            )
        time.sleep(0.1)


def one_transfer(reply: StreamedAnswer, alone: StreamedAnswer, moved: Samples) -> PromptResult:
    """The figures for a prompt after the arrival of its one transfer.

    Args:
        reply: the pair's answer.
        alone: one engine's answer.
        moved: growth of the decode engine's metrics.
    """
    return PromptResult(
        reply.prompt_tokens,
        reply.first_token_s,
        moved.total("pd_connector:transfer_seconds_sum"),
        int(moved.total("pd_connector:received_bytes_total")),
        int(moved.total("pd_connector:received_chunks_total")),
        difference(reply, alone),
    )


def difference(reply: StreamedAnswer, reference: StreamedAnswer) -> float:
    if reply.tokens != reference.tokens:
        return math.inf
    return max(abs(a - b) for a, b in zip(reply.logprobs, reference.logprobs, strict=True))


def failures(grown: Samples) -> str:
    """Failure counters that have grown, with their causes."""
    found = [
        f"{name.removeprefix('pd_connector:')}{sorted(v for k, v in labels if k == 'cause')}"
        for (name, labels), value in grown.items()
        if value > 0
        and name.startswith("pd_connector:")
        and any(k == "cause" for k, _ in labels)
        and name.endswith("_total")
    ]
    return ", ".join(found) or "none has grown (did the router find the prefill engine?)"
